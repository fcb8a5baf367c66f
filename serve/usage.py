"""Token counts of one request, as reported to clients, logs and traces."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.core.stats import Passes, vllm_fields


@dataclass
class Usage:
    """Token counts of one request, summed over its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were read from the prefix cache."""
    reasoning_tokens: int = 0
    prediction: tuple[int, int] | None = None
    """Tokens of the request's `prediction` that were accepted, and the others; None without one."""
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    cycles: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    passes: list[Passes | None] = field(default_factory=list)
    """Of each choice; None before its first token."""
    finish_reasons: list[str] = field(default_factory=list)
    """Finish reasons of the ended choices; "error" or "abort" for those that failed or were
    cancelled."""
    queued: float | None = None
    """Seconds from the submission until a choice got a slot, or until the client left."""
    first_token: float | None = None
    """Seconds from the submission to the first token."""
    speculative: dict[str, object] | None = None
    """Effective `speculative` options; None if the request has neither `speculative` nor a
    prediction."""

    def to_json(self) -> dict[str, object]:
        """OpenAI's `usage`. It has no counts of drafts: see `metrics`."""
        details = {"reasoning_tokens": self.reasoning_tokens}
        if self.prediction is not None:
            names = "accepted_prediction_tokens", "rejected_prediction_tokens"
            details |= dict(zip(names, self.prediction, strict=True))
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": details,
        }

    @property
    def tau(self) -> float:
        """Tokens that verify passes emitted per pass, as `Acceptance.tau`."""
        return sum(self.emitted) / sum(self.cycles) if sum(self.cycles) else 1.0

    def metrics(self) -> dict[str, object]:
        """Counts of speculative decoding, for the reply's `metrics`: our names, then vLLM's, which
        clients such as AIPerf read."""
        asked: dict[str, object] = (
            {} if self.speculative is None else {"speculative": self.speculative}
        )
        return asked | {
            "speculative_decoding": {
                "verify_passes": sum(self.cycles),
                "draft_tokens": sum(self.drafted),
                "accepted_tokens": sum(self.accepted),
                "tokens_per_pass": round(self.tau, 4),
                **self._by_vllms_names(),
            }
        }

    def _by_vllms_names(self) -> dict[str, object]:
        """All choices together; {} before the first token."""
        known = [passes.histogram() for passes in self.passes if passes is not None]
        if not known:
            return {}
        return vllm_fields([sum(counts) for counts in zip(*known, strict=True)], sum(self.drafted))

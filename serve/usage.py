"""What one request took, as it is told to clients, logs and traces."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Usage:
    """Token counts of one request, summed over its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts' tokens, those that the prefix cache had."""
    reasoning_tokens: int = 0
    prediction: tuple[int, int] | None = None
    """Tokens of the request's `prediction` that its answers repeated, and the others; None: there
    was none."""
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    cycles: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    """Of the choices that have ended, and "error" or "abort" of those that did not end well."""
    first_token: float | None = None
    """Seconds until there was one."""
    speculative: dict[str, object] | None = None
    """How the request was drafted for; None: it neither asked for anything nor brought guesses."""

    def to_json(self) -> dict[str, object]:
        """OpenAI's usage. What was drafted is none of it: see `metrics`."""
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
        """Tokens per verify pass."""
        return 1 + sum(self.accepted) / sum(self.cycles) if sum(self.cycles) else 1.0

    def metrics(self) -> dict[str, object]:
        """How speculation fared."""
        asked: dict[str, object] = (
            {} if self.speculative is None else {"speculative": self.speculative}
        )
        return asked | {
            "speculative_decoding": {
                "verify_passes": sum(self.cycles),
                "draft_tokens": sum(self.drafted),
                "accepted_tokens": sum(self.accepted),
                "tokens_per_pass": round(self.tau, 4),
            }
        }

"""The results of an acceptance evaluation, computed from counts and outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seqs
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from specdec.core.stats import FIRST_BUCKET, Acceptance


@dataclass(frozen=True)
class PromptOutcome:
    """One prompt's run: its output, and its acceptance."""

    prompt_id: str
    category: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    finish: str | None
    acceptance: Acceptance


@dataclass(frozen=True)
class Tau:
    """Tokens per verify pass over a set of prompts, with a bootstrap 95 % interval."""

    name: str
    prompts: int
    tokens: int
    cycles: int
    tau: float
    low: float
    high: float
    rate: float
    """Share of the drafted tokens that were accepted."""


@dataclass(frozen=True)
class Position:
    """One draft position, 0 first. Shares of all verify passes, but for `conditional`."""

    index: int
    proposed: float
    accepted: float
    conditional: float
    """Share accepted at this position among the passes that accepted the guess before it (for
    position 0: among those with a guess). A pass without a guess here counts as not accepted."""


@dataclass(frozen=True)
class Speed:
    """Decoding only, warm; `wall_seconds` is everything, prefill and host included."""

    decode_tokens: int
    decode_seconds: float
    wall_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Equality:
    """Whether the drafter changed a token; digests are over the ids of all outputs."""

    equal: bool
    plain_sha256: str
    drafted_sha256: str
    first_difference: dict[str, Any] | None
    """Prompt id, position in its output, and both tokens there (None: the output had ended)."""


@dataclass(frozen=True)
class Evaluation:
    """The whole report. `to_json` is what `--json` prints."""

    settings: dict[str, Any]
    overall: Tau
    categories: list[Tau]
    contexts: list[Tau]
    """By the length of prompt and answer before each pass, in buckets (`context_bucket`)."""
    positions: list[Position]
    histogram: list[int]
    """How many verify passes accepted 0, 1, ... k draft tokens."""
    speeds: dict[str, Speed]
    """`plain` (drafter none), `drafted`, and whatever else was timed."""
    equality: Equality
    distinct_4: float
    """Distinct 4-grams over all 4-grams of the plain outputs. Low means repetitive texts, which
    raise acceptance."""
    prompts: list[dict[str, Any]]
    skipped: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    @property
    def decode_ratio(self) -> float:
        """Decode speed with the drafter over without."""
        plain = self.speeds["plain"].tokens_per_second
        return self.speeds["drafted"].tokens_per_second / plain if plain else 0.0

    @property
    def wall_ratio(self) -> float:
        """Wall-clock time without the drafter over with: above 1 it pays."""
        drafted = self.speeds["drafted"].wall_seconds
        return self.speeds["plain"].wall_seconds / drafted if drafted else 0.0

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        for name, speed in self.speeds.items():
            document["speeds"][name]["tokens_per_second"] = speed.tokens_per_second
        return {**document, "decode_ratio": self.decode_ratio, "wall_ratio": self.wall_ratio}


def measure_tau(name: str, outcomes: Seqs[PromptOutcome], resamples: int, seed: int = 0) -> Tau:
    """Tau as a ratio of sums; the interval resamples prompts, which are what is independent."""
    emitted = np.array([o.acceptance.emitted for o in outcomes], np.float64)
    cycles = np.array([o.acceptance.cycles for o in outcomes], np.float64)
    total = Acceptance()
    for outcome in outcomes:
        total.merge(outcome.acceptance)
    low = high = total.tau
    if total.cycles and len(outcomes) > 1:
        picks = np.random.default_rng(seed).integers(0, len(outcomes), (resamples, len(outcomes)))
        passes = cycles[picks].sum(1)
        # A resample of outputs that all ended at once has no pass and no tau.
        taus = emitted[picks].sum(1)[passes > 0] / passes[passes > 0]
        low, high = (float(q) for q in np.percentile(taus, [2.5, 97.5]))
    tokens = sum(len(o.tokens) for o in outcomes)
    return Tau(name, len(outcomes), tokens, total.cycles, total.tau, low, high, total.rate)


def by_category(outcomes: Seqs[PromptOutcome], resamples: int) -> list[Tau]:
    names = sorted({o.category for o in outcomes})
    groups = ([o for o in outcomes if o.category == name] for name in names)
    return [measure_tau(name, group, resamples) for name, group in zip(names, groups, strict=True)]


def by_context(outcomes: Seqs[PromptOutcome], resamples: int) -> list[Tau]:
    """A row for each bucket of text lengths with a pass; its tokens are those that were emitted
    there."""
    rows = []
    for name, own in split_by_context(outcomes).items():
        row = measure_tau(name, own, resamples)
        rows.append(replace(row, tokens=sum(o.acceptance.emitted for o in own)))
    return rows


def split_by_context(outcomes: Seqs[PromptOutcome]) -> dict[str, list[PromptOutcome]]:
    """By span of the text's length, "0 – 512" first: the prompts with a pass there, with only these
    passes in their acceptance."""
    found = {}
    for bucket in sorted({bucket for o in outcomes for bucket in o.acceptance.by_context}):
        held = [(o, o.acceptance.by_context.get(bucket)) for o in outcomes]
        own = [replace(o, acceptance=counts) for o, counts in held if counts is not None]
        found[_span(bucket)] = own
    return found


def _span(bucket: int) -> str:
    return f"{bucket:,} – {2 * bucket or FIRST_BUCKET:,}"


def measure_positions(total: Acceptance, k: int) -> list[Position]:
    accepted = total.per_position(k)
    positions = []
    for i in range(k):
        before = total.accepted_at[i - 1] if i else total.drafted_at[0]
        conditional = total.accepted_at[i] / before if before else 0.0
        proposed = total.drafted_at[i] / total.cycles if total.cycles else 0.0
        positions.append(Position(i, proposed, accepted[i], conditional))
    return positions


def compare(plain: Seqs[PromptOutcome], drafted: Seqs[PromptOutcome]) -> Equality:
    """Outcomes of the same prompts in the same order."""
    ours, theirs = digest(plain), digest(drafted)
    return Equality(ours == theirs, ours, theirs, _first_difference(plain, drafted))


def digest(outcomes: Seqs[PromptOutcome]) -> str:
    """SHA-256 over prompt ids and output ids."""
    lines = (f"{o.prompt_id}:{' '.join(map(str, o.tokens))}\n" for o in outcomes)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def distinct(outputs: Seqs[Seqs[int]], n: int = 4) -> float:
    """Distinct n-grams over all n-grams, pooled over the outputs; 0 where there are none."""
    grams = [tuple(out[i : i + n]) for out in outputs for i in range(len(out) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def _first_difference(
    plain: Seqs[PromptOutcome], drafted: Seqs[PromptOutcome]
) -> dict[str, Any] | None:
    for ours, theirs in zip(plain, drafted, strict=True):
        a, b = ours.tokens, theirs.tokens
        if a != b:
            at = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
            return {
                "prompt": ours.prompt_id,
                "position": at,
                "plain": a[at] if at < len(a) else None,
                "drafted": b[at] if at < len(b) else None,
            }
    return None

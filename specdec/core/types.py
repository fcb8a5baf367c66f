"""Data that scheduler, target, drafter and server exchange. Each field's docstring names its
writer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence as Seqs
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from specdec.core.errors import UserError
from specdec.core.pictures import PlacedPicture, SoftRows, check_places
from specdec.core.prediction import Prediction
from specdec.core.stats import Acceptance

Array = Any
"""A numpy, jax or torch array: the loop only indexes and compares."""

NO_GUESS = -1
"""A draft's entry without a guess; it never equals a token id."""

SAT_OUT = -1
"""In `Round.accepted`: nothing was chosen for this row in this cycle, not even the free token."""

MAX_LOGPROBS = 20
"""Most alternatives with log-probabilities that a request may have at each position."""

MAX_DRAFT = 31
"""Largest number of draft tokens per cycle (K)."""

FinishReason = Literal["stop", "length", "grammar_limit", "cancelled", "error"]
"""grammar_limit: the constraint's grammar became too ambiguous to be followed any further."""

Guesser = Literal["drafter", "prediction", "constraint"]
"""Source of a guess: the drafter, a predicted text, or a constraint that allows only one token."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class Sampling:
    """How the target chooses one request's tokens. Written by the caller, read by the target.

    Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch the filter off. Penalties
    follow vLLM: repetition over prompt and output, presence and frequency over the output.
    Raises UserError where a value is out of range or not finite.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            value = getattr(self, name)
            _require(math.isfinite(value), f"{name} must be a finite number, got {value}")
        _require(
            0 <= self.temperature <= 100,
            f"temperature must be in [0, 100], got {self.temperature}; 0 is greedy",
        )
        _require(0 <= self.top_k < 2**31, f"top_k must be 0 (off) or more, got {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}")
        _require(
            0.01 <= self.repetition_penalty <= 100,
            f"repetition_penalty must be in [0.01, 100], got {self.repetition_penalty}; 1 is off",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, f"{name} must be in [-2, 2], got {value}")
        _require(0 <= self.seed < 2**64, f"seed must be in [0, 2^64), got {self.seed}")
        if self.logprobs is not None:
            _require(
                0 <= self.logprobs <= MAX_LOGPROBS,
                f"logprobs must be 0 to {MAX_LOGPROBS}, got {self.logprobs}",
            )
        for token, bias in self.logit_bias:
            _require(
                token >= 0 and -100 <= bias <= 100,
                f"logit_bias must map token ids to values in [-100, 100], got {token}: {bias}",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_sampler(self) -> bool:
        """Whether anything but the raw argmax decides the choice."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return not self.greedy or bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)


class Constraint(Protocol):
    """Restricts a sequence's next tokens, as a function of its ids so far, draft included.

    It belongs to one sequence and may cache how far it has read. Its methods are called for several
    sequences at a time.
    """

    failure: str | None
    """Why it can't go on, None while it can: the engine then ends the sequence with this error,
    where there is an `ends_at`, there."""
    ends_at: int | None
    """Number of emitted tokens after which the constraint can't be followed, as the last call of
    `masks` found; None where all its rows were made. A function of the ids before that place, so
    the engine ends the sequence there, if its text comes to it, whatever was drafted."""

    def masks(self, seq: Sequence, draft: Seqs[int], out: Array) -> None:
        """Clear the bits of forbidden tokens in `out` [at least len(draft) + 1, words] uint32,
        where all bits are set: row j is for the position after the text and draft[:j]. Rows after a
        forbidden guess may hold anything."""
        ...

    def forced(self, seq: Sequence) -> list[int]:
        """The next tokens that the constraint forces, as far as it can determine them."""
        ...

    def packed(self) -> dict[str, Any]:
        """JSON values from which another process rebuilds the constraint."""
        ...


@dataclass(frozen=True)
class Speculative:
    """A request's own drafter and depth."""

    drafter: str | None = None
    """One of the loaded drafters; None: the engine's."""
    k: int | None = None
    """Most guesses per cycle, 0 for none; None: the engine's K."""


@dataclass(frozen=True)
class Reuse:
    """A request's use of the prefix cache: it reads from it and adds to it."""

    scope: str = ""
    """API key and salt. Prompts of different scopes never share anything."""
    partings: tuple[int, ...] = ()
    """Positions of the prompt where later prompts may diverge, beside its end."""


@dataclass(frozen=True)
class Owner:
    """A sequence's origin. Slots are shared over callers, then over a caller's requests."""

    caller: str = ""
    request: str = ""


@dataclass(eq=False)
class Sequence:
    """One text that is generated. The engine owns `tokens`; drafters and targets only read it.

    After prefill, `tokens` is always one token longer than the target's KV cache: the last token
    was chosen but has not been fed yet.
    """

    tokens: list[int]
    """Prompt, then everything emitted. Written by the engine. At a picture's places the ids are
    those of `pictures.place_ids`."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 16
    """Most tokens to emit. Written by the caller."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the sequence; the stop id itself is emitted last. Written by the caller."""
    request_id: str = ""
    constraint: Constraint | None = None
    """Restricts its tokens, None for no restriction. Written by the caller, read by the target."""
    prediction: Prediction | None = None
    """A text that it is expected to repeat, used as guesses with any drafter. Written by the
    caller, read by the loop."""
    speculative: Speculative | None = None
    """Its own drafter and depth, None for the engine's. Written by the caller, read by loops and
    drafters."""
    reuse: Reuse | None = field(default_factory=Reuse)
    """None: nothing is read from the prefix cache, and nothing added. Written by the caller."""
    owner: Owner = field(default_factory=Owner)
    """It affects when the sequence runs, never its tokens. Written by the server, read by the
    scheduler."""
    pictures: tuple[PlacedPicture, ...] = ()
    """The prompt's pictures in order. Kept while it runs, because it may be prefilled again.
    Written by the caller, read by the target."""
    prompt_len: int = 0
    """Length of the prompt within `tokens`. Set here from `tokens`."""
    slot: int = -1
    """The target's KV slot, -1 while waiting. Written by the scheduler."""
    seatings: int = 0
    """How often it got a slot: more than once where it gave way to others. Written by the
    scheduler."""
    seated: float | None = None
    """When it first got a slot, in seconds of `time.monotonic`; None while it waits. Written by the
    engine."""
    prefilled: int = 0
    """Tokens that are in the KV cache before it runs. Written by the scheduler."""
    kept: int = 0
    """Prompt tokens that the prefix cache had when it was seated. Written by the engine."""
    cached: int = 0
    """Prompt tokens that came from the prefix cache. Written by the scheduler."""
    finish: FinishReason | None = None
    """Why it ended, None while it runs. Written by the engine."""
    cancelled: bool = False
    """Set between steps; the engine frees the slot at the next."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Acceptance statistics of this sequence. Written by the engine."""
    reported: bool = False
    """Whether its events have a `CycleReport`. Written by the caller."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        _require(self.prompt_len > 0, "the prompt is empty: send at least one token")
        _require(self.max_tokens >= 1, f"max_tokens must be 1 or more, got {self.max_tokens}")
        check_places(self.tokens, self.pictures)

    def most_guesses(self, k: int) -> int:
        """This sequence's limit of guesses per cycle, at most the engine's k."""
        wish = self.speculative
        return k if wish is None or wish.k is None else min(k, wish.k)

    @property
    def emitted(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def fed(self) -> int:
        """Tokens that the KV cache holds while it runs: all but the last one that was chosen."""
        return self.prompt_len + max(0, self.emitted - 1)

    def check_ids(self, vocab: int) -> None:
        """Raise UserError for token ids that a model with `vocab` of them does not have."""
        named = (*self._outside_pictures(), *dict(self.sampling.logit_bias))
        strange = max(named) if max(named) >= vocab else min(named)
        _require(
            0 <= strange < vocab,
            f"prompt or logit_bias names token {strange}, but this model's ids are 0 to "
            f"{vocab - 1}",
        )

    def _outside_pictures(self) -> list[int]:
        found, last = [], 0
        for placed in self.pictures:
            found += self.tokens[last : placed.start]
            last = placed.stop
        return found + self.tokens[last:]


@dataclass(frozen=True)
class LogprobRows:
    """Log-probabilities of the unshaped distribution, one row per position.

    chosen [B, T] float32; top_ids and top_logprobs [B, T, n], best first; checksums [B, T, 2], two
    sums modulo 2^32 over the bits of all logits, which no order of summation changes; sampling [B,
    11], 32-bit words of what else the sampler reads of a row: `targets.sampling_params.WORDS`.
    """

    chosen: Array
    top_ids: Array
    top_logprobs: Array
    checksums: Array
    sampling: Array

    def each(self, function: Callable[[Array], Array]) -> LogprobRows:
        """function of every array."""
        parts = self.chosen, self.top_ids, self.top_logprobs, self.checksums, self.sampling
        return LogprobRows(*map(function, parts))


@dataclass(frozen=True)
class Step:
    """A target's result: row b's `features[b, j]` is the state *from which* it chose `chosen[b,
    j]`. Written by the target, read by the engine and the drafter."""

    chosen: Array
    """[B, T] int32."""
    features: Array | None = None
    """[at least B, at least T, F] with padding at the end, or None if the target was loaded without
    features; of a model on several cards a tuple with each card's. Rows are in the order that
    `by_slot` determines."""
    logprobs: LogprobRows | None = None
    """Only if a sequence has `sampling.logprobs`."""
    by_slot: bool = False
    """Whether row b's features are at its slot's number instead of b. Selecting them would need a
    program for each number of rows, compiled while requests wait."""
    pictures: SoftRows = ()
    """Of a prefill: its pictures' rows, as they stood among the embeddings."""


@dataclass(frozen=True)
class Proposal:
    """The guesses of one cycle. Written by the drafter, read by the loop. In JAX it is a pytree
    (`targets/jax/device_drafter.py`)."""

    tokens: Array
    """[B, at most k] int32 target ids, NO_GUESS where there is no guess. The target verifies all
    columns."""
    source: Array | None = None
    """[B] or [B, columns] int32: the drafter that made each row's guesses, or each guess, as an
    index into `names`. None: one drafter made all of them."""
    names: tuple[str, ...] = ()
    """The drafters that this one combines."""


@dataclass(frozen=True)
class CycleChoice:
    """How the next cycle of a device loop runs. Written by the drafter's `ready`; the defaults are
    those of a drafter that chooses nothing."""

    depth: int | None = None
    """Guesses that the cycle verifies; None: the loop's K."""
    variant: str = ""
    """Which of the drafter's captured cycles runs."""
    takes_known: bool = True
    """Whether predicted tokens come before the drafter's guesses."""
    repeats: bool = True
    """Whether the choice also holds for further cycles of the same dispatch."""


@dataclass(frozen=True)
class Check:
    """One question of a target's self-check: how many results differ in any bit, of how many."""

    question: str
    differing: int
    total: int

    @property
    def passed(self) -> bool:
        return self.differing == 0


@dataclass(frozen=True)
class ForcedPrefix:
    """Guesses from predictions and constraints; they come before the drafter's own."""

    rows: Array
    """[B, k] int32, NO_GUESS after them."""
    source: tuple[Guesser, ...]
    """The source of each row's guesses."""


@dataclass(frozen=True)
class Round:
    """One cycle's outcome, for the rows it ran on.

    accepted [B]: how many draft tokens each row keeps, SAT_OUT for a row that took no part (a
    driver that runs ahead of the host may include a new row only one cycle later).
    """

    proposal: Proposal
    step: Step
    accepted: Array
    forced_prefix: ForcedPrefix | None = None
    """The draft's guesses from other sources than the drafter; None: there are none."""
    seconds: Mapping[str, float] | None = None
    """Seconds of its parts (`timing.PARTS`); None in a device loop."""


class TokenLogprob(NamedTuple):
    """One emitted token's log-probability, the best alternatives (id, logprob), best first, the 64
    bits of `LogprobRows.checksums`, and its row of `LogprobRows.sampling`, little endian.

    A tuple because there is one for each token, and a frozen dataclass takes three times as long.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    checksum: int
    sampling: bytes


@dataclass(frozen=True)
class CycleReport:
    """One cycle's outcome for one sequence: one read of the weights. Written by the engine."""

    draft: tuple[int, ...]
    """The guessed tokens."""
    guessers: tuple[Guesser | str, ...]
    """The source of each guess; a composite drafter's parts by name."""
    accepted: int
    """How many guesses were emitted; the token after them, if any, is the target's own."""
    seconds: float
    """The time of the cycle; in a device loop the mean of its dispatch."""


@dataclass(frozen=True)
class Event:
    """The tokens that one cycle or prefill added to one sequence, for callers of the engine."""

    sequence: Sequence
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    report: CycleReport | None = None
    """The cycle's report, if `Sequence.reported`; None for prefill's token."""

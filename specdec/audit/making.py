"""Receipts of answers that this engine gave."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seqs
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from specdec.audit.receipt import (
    FORMAT,
    AnswerPart,
    Arithmetic,
    ConstraintPart,
    Finish,
    LimitsPart,
    ModelPart,
    OutputPart,
    Part,
    PromptPart,
    Receipt,
    SamplingPart,
    commitments_of,
    packed_floats,
    sentence_of,
    shortest,
)
from specdec.core.errors import UserError
from specdec.core.types import Constraint, Sampling, Sequence, TokenLogprob
from specdec.core.version import VERSION

PLAIN = OutputPart(form="plain", special=False, tools=None, in_thought=False)
"""All text is the answer's."""
SHOWN_DIGITS = 8
"""Hexadecimal digits of each half of a fingerprint."""


@dataclass(frozen=True)
class Identity:
    """What gives an answer beside its request: a model and an arithmetic."""

    model: ModelPart
    arithmetic: Arithmetic

    @cached_property
    def fingerprint(self) -> str:
        """The version, and short digests of the weights and of the arithmetic: equal for servers
        whose answers to one request are the same."""
        weights = {"weights": self.model.weights, "suppress": self.model.suppress}
        halves = _digest(repr(weights)), _digest(_text(self.arithmetic))
        return f"specdec-{VERSION}-{halves[0]}-{halves[1]}"


@dataclass(frozen=True)
class Ended:
    """An answer, as its client has it."""

    ids: Seqs[int]
    """Up to and with the one that ended it."""
    finish: Finish | None
    stops: Seqs[str] = ()
    output: OutputPart = PLAIN
    choice: int = 0
    text: str | None = None
    logprobs: Seqs[TokenLogprob] | None = None
    """Of each id."""


def receipt_of(identity: Identity, seq: Sequence, ended: Ended) -> Receipt:
    """The receipt of an answer. seq: the sequence that gave it, whose `max_tokens` is the one in
    force. Raises UserError for an empty answer, for one whose text was forced, and for a request
    beyond the format's bounds."""
    if not ended.ids:
        raise UserError("an empty answer has no receipt")
    try:
        return _receipt(identity, seq, ended)
    except ValidationError as failure:
        raise UserError(f"this answer has no receipt: {sentence_of(failure)}") from None


def _receipt(identity: Identity, seq: Sequence, ended: Ended) -> Receipt:
    return Receipt(
        format=FORMAT,
        model=identity.model,
        arithmetic=identity.arithmetic,
        prompt=PromptPart(ids=tuple(seq.tokens[: seq.prompt_len])),
        sampling=_sampling(seq.sampling),
        seed=str(seq.sampling.seed),
        choice=ended.choice,
        limits=LimitsPart(
            max_tokens=seq.max_tokens,
            stop_ids=tuple(sorted(seq.stop_ids)),
            stop=tuple(ended.stops),
            output=ended.output,
        ),
        constraint=_constraint(seq.constraint),
        answer=AnswerPart(ids=tuple(ended.ids), finish=ended.finish, text=ended.text),
        **_witnesses(ended.logprobs),
    )


def _witnesses(logprobs: Seqs[TokenLogprob] | None) -> dict[str, Any]:
    """Evidence of the weights beside the ids."""
    if logprobs is None:
        return {}
    return {
        "logprobs": packed_floats([each.logprob for each in logprobs]),
        "commitments": commitments_of(logprobs),
    }


def _sampling(sampling: Sampling) -> SamplingPart:
    return SamplingPart(
        temperature=shortest(sampling.temperature),
        top_k=sampling.top_k,
        top_p=shortest(sampling.top_p),
        min_p=shortest(sampling.min_p),
        repetition_penalty=shortest(sampling.repetition_penalty),
        presence_penalty=shortest(sampling.presence_penalty),
        frequency_penalty=shortest(sampling.frequency_penalty),
        logit_bias=tuple((token, shortest(bias)) for token, bias in sampling.logit_bias),
    )


def _constraint(constraint: Constraint | None) -> ConstraintPart | None:
    if constraint is None:
        return None
    packed: dict[str, Any] = constraint.packed()
    if "recite" in packed:
        raise UserError("a recited text has no receipt: nothing was chosen")
    return ConstraintPart.model_validate(packed)


def _text(part: Part) -> str:
    return part.model_dump_json()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:SHOWN_DIGITS]

"""The receipt: one request, and the answer that is claimed for it, as JSON.

Everything that decides a token or the end is in it, resolved: no default is left to the reader. A
key that this version does not read is refused, as it might be a parameter. So a new key makes a new
number of the format, and a reader takes the numbers that it lists.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence as Seqs
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specdec.core.errors import UserError
from specdec.core.types import MAX_DRAFT, Sampling, TokenLogprob

FORMAT = "specdec-receipt/4"
"""The number that is written."""
COMMITTED = {
    "specdec-receipt/1": (),
    "specdec-receipt/2": ("logits",),
    "specdec-receipt/3": ("logits", "sampling"),
    FORMAT: ("logits", "sampling"),
}
"""The numbers that are read, and what each one's commitments have."""
BLOCK = 32
"""Ids of an answer for which there is one commitment."""
MOST_BYTES = 32 * 2**20
"""Bytes of a receipt: four times those of the largest request, whose grammar it may hold."""
MOST_IDS = 2**20
"""Ids in one list: several times the longest context."""
MOST_STOPS = 1024
"""Stop strings, and names of tools."""
LONGEST_NAME = 1000
"""Characters of a name, a version or a stop string."""
DIGEST_DIGITS = 16
"""Hexadecimal digits of a commitment."""
LONGEST_REASON = 300
"""Characters of an error that are shown."""
Made = TypeVar("Made", bound=BaseModel)

Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[tuple[Id, ...], Field(max_length=MOST_IDS)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
Finish = Literal["stop", "length", "tool_calls"]
Blocks = Annotated[
    tuple[Annotated[str, Field(pattern=r"\A[0-9a-f]{16}\z")], ...], Field(max_length=MOST_IDS)
]


class Part(BaseModel):
    """An object of a receipt: no unknown keys, no other types, only finite numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class ModelPart(Part):
    """Which model."""

    name: Name
    """For people; not compared."""
    weights: Annotated[dict[Name, Digest], Field(max_length=4096)]
    """sha256 of each file of weights, and of those with their form, by file name."""
    tokenizer: Digest
    template: Digest
    """Of the chat template. For people: the prompt is ids."""
    suppress: Ids
    """Ids that are never chosen."""


class Arithmetic(Part):
    """All that changes bits, beside the weights."""

    backend: Literal["jax", "cuda"]
    device: Name
    """The accelerator's kind; of a CPU its name and a digest of its features."""
    place: Literal["cuda", "cpu"] | None
    """Where backend cuda runs: a GPU, or its references on a CPU; None with jax."""
    dtype: Literal["float32", "bfloat16", "fp8", "fp8-w8a8", "int4"] | None
    """With cuda the one that is used; with jax as `ModelConfig` has it, like the next two."""
    kv_dtype: Literal["bfloat16", "fp8", "int8"] | None
    int8: bool
    tp: Annotated[int, Field(ge=1, le=1024)]
    slots: Annotated[int, Field(ge=1, le=4096)]
    max_len: Annotated[int, Field(ge=2, le=2**24)]
    width: Annotated[int, Field(ge=1, le=MAX_DRAFT + 1)]
    """Tokens per row of a verify."""
    chunk: Annotated[int, Field(ge=1, le=2**24)]
    """Tokens of a prefill chunk."""
    features: Annotated[tuple[Count, ...], Field(max_length=1024)]
    """Layers whose outputs the programs return."""
    pictures: Count | None = None
    """With jax, tokens of the largest picture that is taken, which lengthens rings of the K/V
    cache; 0: none is. None before number 4."""
    target: Digest
    """Of the target's plan, layer by layer."""
    flags: Annotated[str, Field(max_length=10_000)]
    """XLA_FLAGS of the process, with jax."""
    versions: Annotated[dict[Name, Name], Field(max_length=64)]
    """Of specdec and of the libraries that compute."""


class PromptPart(Part):
    ids: Annotated[Ids, Field(min_length=1)]


class SamplingPart(Part):
    """Sampling parameters, each the shortest decimal number of the float32 that was used."""

    temperature: float
    top_k: Count
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Annotated[tuple[tuple[Id, float], ...], Field(max_length=MOST_IDS)]

    @model_validator(mode="after")
    def _a_bias_for_each_id_once(self) -> SamplingPart:
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise ValueError("logit_bias has an id twice")
        return self


class OutputPart(Part):
    """How the text is taken apart: stop strings are looked for in the answer alone."""

    form: Literal["plain", "chat"]
    """chat: thoughts and calls are no part of the answer."""
    special: bool
    """Whether the text has special tokens."""
    tools: Annotated[tuple[Name, ...], Field(max_length=MOST_STOPS)] | None
    """Names of the tools; None where calls are plain text."""
    in_thought: bool
    """Whether the prompt ends within a thought."""


class LimitsPart(Part):
    """What ends the answer."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    """Most tokens, as it was in force: cut to the context."""
    stop_ids: Ids
    """End tokens included."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)], ...],
        Field(max_length=MOST_STOPS),
    ]
    output: OutputPart


class BudgetPart(Part):
    """`specdec.constraints.rules.ThinkingLimit`."""

    open_id: Id
    close_id: Id
    tokens: Count
    inside: bool


class ConstraintPart(Part):
    """`specdec.constraints.constraint.TextRules`."""

    grammar: str | None
    allowed: Ids | None
    bad_words: Annotated[
        tuple[Annotated[Ids, Field(min_length=1)], ...], Field(max_length=MOST_IDS)
    ]
    min_tokens: Count
    stop_ids: Ids
    budget: BudgetPart | None


class AnswerPart(Part):
    """The claim."""

    ids: Annotated[Ids, Field(min_length=1)]
    """Up to and with the one that ended it."""
    finish: Finish | None
    """None: so far, as of a stream that broke off."""
    text: str | None = None


class CommitmentsPart(Part):
    """Digests of numbers that the model computed, a block of ids each; the last may have fewer."""

    block: Literal[32]
    """Ids of a block."""
    logits: Blocks
    """Of the bits of all logits before any shaping: weights and arithmetic."""
    sampling: Blocks | None = None
    """Of the same bits, together with what else the sampler read there: parameters, seed and
    biases."""

    def digests(self) -> list[tuple[str, tuple[str, ...]]]:
        """Those that there are, by name."""
        named = ("logits", self.logits), ("sampling", self.sampling)
        return [(name, blocks) for name, blocks in named if blocks is not None]


class Receipt(Part):
    """One answer with all that decides it."""

    format: Literal[
        "specdec-receipt/1", "specdec-receipt/2", "specdec-receipt/3", "specdec-receipt/4"
    ]
    model: ModelPart
    arithmetic: Arithmetic
    prompt: PromptPart
    sampling: SamplingPart
    seed: Annotated[str, Field(pattern=r"\A(0|[1-9][0-9]{0,19})\z")]
    """Digits, because readers of JSON lose integers above 2^53; with the choice's number added."""
    choice: Annotated[int, Field(ge=0, lt=2**16)]
    """Which of a request's n choices, from 0."""
    limits: LimitsPart
    constraint: ConstraintPart | None
    answer: AnswerPart
    logprobs: str | None = None
    """Log-probability of each id before any shaping: float32, little endian, in base64."""
    commitments: CommitmentsPart | None = None

    @model_validator(mode="after")
    def _what_belongs_together(self) -> Receipt:
        if (self.arithmetic.pictures is not None) != (self.format == FORMAT):
            raise ValueError(f"arithmetic.pictures is a part of {FORMAT}, and of it alone")
        if self.answer.text is not None and self.answer.finish is None:
            raise ValueError("answer.text needs an answer that has ended")
        if self.logprobs is not None and len(self.chosen_logprobs()) != len(self.answer.ids):
            raise ValueError("logprobs must hold one float32 for each id")
        if self.commitments is not None:
            self._check_commitments(self.commitments)
        return self

    def _check_commitments(self, found: CommitmentsPart) -> None:
        names = tuple(name for name, _ in found.digests())
        if names != COMMITTED[self.format]:
            right = " and ".join(COMMITTED[self.format]) or "none"
            raise ValueError(f"the commitments of {self.format} are {right}")
        if self.logprobs is None:
            raise ValueError("commitments go with logprobs")
        for name, blocks in found.digests():
            if len(blocks) != -(-len(self.answer.ids) // BLOCK):
                raise ValueError(f"commitments.{name} must have one digest for {BLOCK} ids")

    def chosen_logprobs(self) -> np.ndarray:
        """`logprobs` as float32 [ids]."""
        assert self.logprobs is not None
        return _floats(self.logprobs)

    def sampling_of(self) -> Sampling:
        """The engine's form of the parameters, with log-probabilities if the receipt has them.
        Raises UserError for values out of range."""
        logprobs = None if self.logprobs is None else 0
        values = self.sampling.model_dump()
        values["logit_bias"] = tuple(map(tuple, values["logit_bias"]))
        return Sampling(**values, seed=int(self.seed), logprobs=logprobs)

    def to_text(self) -> str:
        """The file: one line of JSON."""
        return json.dumps(self.to_json(), ensure_ascii=False, separators=(",", ":")) + "\n"

    def to_json(self) -> dict[str, Any]:
        """The receipt as JSON values, without what is optional and absent."""
        document = self.model_dump(mode="json")
        for name in ("logprobs", "commitments"):
            if document[name] is None:
                del document[name]
        if self.answer.text is None:
            del document["answer"]["text"]
        if self.arithmetic.pictures is None:
            del document["arithmetic"]["pictures"]
        if self.commitments is not None and self.commitments.sampling is None:
            del document["commitments"]["sampling"]
        return document


def read_receipt(data: bytes) -> Receipt:
    """A receipt from a file's bytes. Raises UserError with one sentence about the first fault."""
    if len(data) > MOST_BYTES:
        raise UserError(f"it has {len(data):,} bytes, and a receipt at most {MOST_BYTES:,}")
    document = _document(data)
    _check_format(document)
    _check_chosen(document)
    receipt = _validated(Receipt, data)
    receipt.sampling_of()
    return receipt


def _document(data: bytes) -> Any:
    try:
        return json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant)
    except UserError:
        raise
    except (ValueError, RecursionError) as problem:
        raise UserError(f"it is not JSON: {_short(str(problem))}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers differ in which of two values they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UserError("an object has a key twice")
    return found


def _no_constant(name: str) -> None:
    raise UserError(f"{name} is no number of JSON")


def _check_format(document: Any) -> None:
    found = document.get("format") if isinstance(document, dict) else None
    if found not in COMMITTED:
        raise UserError(f"it is not a receipt that is read here: format must be {FORMAT!r}")


def _check_chosen(document: dict[str, Any]) -> None:
    constraint = document.get("constraint")
    if isinstance(constraint, dict) and "recite" in constraint:
        raise UserError("its constraint recites the answer, so that any claim would hold")


def _validated(model: type[Made], data: bytes) -> Made:
    try:
        return model.model_validate_json(data)
    except ValidationError as failure:
        raise UserError(sentence_of(failure)) from None


def sentence_of(failure: ValidationError) -> str:
    """The first fault, and where it is."""
    first = failure.errors(include_url=False, include_input=False)[0]
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    return _short(f"{where}: {message[0].lower()}{message[1:]}".removeprefix(": "))


def _short(text: str) -> str:
    """On one line, whatever keys a stranger's file has."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}…"


def _floats(text: str) -> np.ndarray:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    except ValueError:
        raise ValueError("logprobs must be float32 numbers in base64") from None


def packed_floats(values: list[float]) -> str:
    """`Receipt.logprobs` of log-probabilities."""
    return base64.b64encode(np.array(values, "<f4").tobytes()).decode()


def commitments_of(chosen: Seqs[TokenLogprob]) -> CommitmentsPart:
    """Of each id."""
    logits = [each.checksum.to_bytes(8, "little") for each in chosen]
    sampling = [own + each.sampling for own, each in zip(logits, chosen, strict=True)]
    return CommitmentsPart(block=BLOCK, logits=_blocks(logits), sampling=_blocks(sampling))


def _blocks(parts: list[bytes]) -> tuple[str, ...]:
    """A digest for each block of ids."""
    blocks = [b"".join(parts[i : i + BLOCK]) for i in range(0, len(parts), BLOCK)]
    return tuple(hashlib.sha256(block).hexdigest()[:DIGEST_DIGITS] for block in blocks)


def shortest(value: float) -> float:
    """The number whose decimal form is the shortest of its float32's."""
    return float(str(np.float32(value)))

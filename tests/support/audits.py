"""Answers with their receipts, made by an engine itself; and receipts changed in one place."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seqs
from dataclasses import replace
from typing import Any

from serve.outputs import output_of
from serve.runner import Update
from serve.stream import ChoiceText
from specdec.audit.making import PLAIN, Ended, Identity, receipt_of
from specdec.audit.receipt import Arithmetic, ModelPart, OutputPart, Receipt, read_receipt
from specdec.core.engine import Engine
from specdec.core.types import Sequence, TokenLogprob

DIGEST = "0" * 64
IDENTITY = Identity(
    ModelPart(
        name="fake",
        weights={"model.safetensors": DIGEST},
        tokenizer=DIGEST,
        template=DIGEST,
        suppress=(),
    ),
    Arithmetic(
        backend="jax",
        device="none",
        place=None,
        dtype=None,
        kv_dtype=None,
        int8=False,
        tp=1,
        slots=2,
        max_len=512,
        width=8,
        chunk=4,
        features=(),
        pictures=0,
        target=DIGEST,
        flags="",
        versions={},
    ),
)
"""Of the fake target."""


def answers(
    engine: Engine,
    seqs: Seqs[Sequence],
    tokenizer: Any,
    identity: Identity = IDENTITY,
    stops: Seqs[Seqs[str]] = (),
    output: OutputPart = PLAIN,
) -> list[Receipt]:
    """The receipts of what the engine gives, ended at stop strings as the server does it. stops: of
    each sequence; none by default."""
    stops = stops or [()] * len(seqs)
    texts = {
        seq: ChoiceText(tokenizer, own, output_of(output, tokenizer))
        for seq, own in zip(seqs, stops, strict=True)
    }
    ended: dict[Sequence, Ended] = {}
    logprobs: dict[Sequence, list[TokenLogprob]] = {seq: [] for seq in seqs}
    written = dict.fromkeys(seqs, "")
    for event in engine.run(list(seqs)):
        seq = event.sequence
        assert event.error is None, event.error
        if seq in ended:
            continue
        logprobs[seq] += event.logprobs or ()
        piece = texts[seq].feed(Update(0, event.tokens, event.logprobs, event.finish))
        written[seq] += piece.text
        if piece.finish is not None:
            seq.cancelled = True
            count = texts[seq].token_count
            ids = seq.tokens[seq.prompt_len : seq.prompt_len + count]
            chosen = logprobs[seq][:count] if seq.sampling.logprobs is not None else None
            text = written[seq] if output.form == "plain" else None
            ended[seq] = Ended(ids, piece.finish, (), output, text=text, logprobs=chosen)
    pairs = zip(seqs, stops, strict=True)
    return [receipt_of(identity, seq, replace(ended[seq], stops=own)) for seq, own in pairs]


def changed(receipt: Receipt, *path: Any, value: Any) -> Receipt:
    """The receipt with one value of its JSON replaced, and without the text and log-probabilities
    of the claim, which would give away what its ids don't."""
    document = _with(receipt, path, value)
    document.pop("logprobs", None)
    document.pop("commitments", None)
    document["answer"].pop("text", None)
    return read_receipt(text_of(document))


def relabelled(receipt: Receipt, *path: Any, value: Any) -> Receipt:
    """The receipt with one value of its JSON replaced, and all else as it was."""
    return read_receipt(text_of(_with(receipt, path, value)))


def _with(receipt: Receipt, path: Seqs[Any], value: Any) -> dict[str, Any]:
    document = receipt.to_json()
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


def text_of(document: Any) -> bytes:
    """A receipt's file."""
    return json.dumps(document).encode()

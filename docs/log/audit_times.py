"""What an audit costs on a card, and whether two kinds of card give the same answers.

    PYTHONPATH=. python docs/log/audit_times.py gemma-4-31b --out answers.json
    PYTHONPATH=. python docs/log/audit_times.py gemma-4-31b --against answers.json

Random weights of true size, the same on all cards. Answers of 512 tokens to prompts of up to 384,
with log-probabilities and commitments, are made without a drafter and verified by replay: 32 at
once, and alone. With --against, ids and commitments are compared with those of an earlier run.
Needs a Hopper card.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence as Seqs
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafters import registry
from specdec.assembly.engine import make_engine
from specdec.assembly.model import Model, random_model
from specdec.audit.identity import identity_of
from specdec.audit.making import Ended, receipt_of
from specdec.audit.receipt import Receipt, read_receipt
from specdec.audit.verify import judged_by
from specdec.core.config import ModelConfig
from specdec.core.types import MAX_DRAFT, Sampling, Sequence, TokenLogprob
from tests.support.audits import changed

ANSWERS = 48
AT_ONCE = 32
ALONE = 2
TOKENS = 512
LONGEST = 384
"""Tokens of a prompt: all of it is read by kernels of decoding."""
FORGED_AT = 400


def speculation(k: int = 0) -> Any:
    own = registry.config_type()(drafter="none", k=k)
    return registry.resolved(own, ModelConfig("x"), random=True)


def loaded(asked: argparse.Namespace) -> Model:
    own = {"dtype": asked.dtype, "kv_dtype": asked.kv_dtype, "max_len": LONGEST + TOKENS}
    config = ModelConfig(asked.name, backend="cuda", slots=AT_ONCE, **own)
    model = random_model(asked.name, config, speculation(MAX_DRAFT))
    # What an identity reads of files are mini's: these weights have none.
    return replace(model, config=replace(model.config, model="mini"))


def requests(vocab: int, witnesses: bool) -> list[Sequence]:
    found = []
    for i in range(ANSWERS):
        random = np.random.default_rng(i)
        text = random.integers(3, vocab, 20 + 31 * i % (LONGEST - 20)).tolist()
        sampling = Sampling(
            temperature=(1.0, 0.7, 0.0)[i % 3],
            top_p=0.9 if i % 4 == 1 else 1.0,
            seed=int(random.integers(1 << 40)),
            logprobs=0 if witnesses else None,
        )
        found.append(Sequence(text, sampling, max_tokens=TOKENS, request_id=str(i)))
    return found


def played(model: Model, seqs: Seqs[Sequence]) -> tuple[float, dict[str, list[TokenLogprob]]]:
    """Seconds, and each id's log-probability with its commitments."""
    engine, details = make_engine(model, speculation()), {}
    began = time.perf_counter()
    for event in engine.run(list(seqs)):
        assert event.error is None, event.error
        details.setdefault(event.sequence.request_id, []).extend(event.logprobs or ())
    return time.perf_counter() - began, details


def receipts(model: Model, seqs: Seqs[Sequence], details: dict[str, Any]) -> list[Receipt]:
    identity = identity_of(model)
    return [
        receipt_of(
            identity,
            seq,
            Ended(seq.tokens[seq.prompt_len :], "length", logprobs=details.get(seq.request_id)),
        )
        for seq in seqs
    ]


def verified(model: Model, claims: list[Receipt]) -> float:
    """Seconds; all are true."""
    began = time.perf_counter()
    verdicts = judged_by(model, claims)
    taken = time.perf_counter() - began
    width = model.target.max_draft + 1
    for claim, verdict in zip(claims, verdicts, strict=True):
        assert verdict.kind == "verified", verdict
        assert verdict.reads == -(-(len(claim.answer.ids) - 1) // width), verdict
    return taken


def timed(model: Model, some: slice, what: str) -> list[Receipt]:
    """Receipts of some of the answers, generated and verified together; prints both times."""
    vocab = model.target.vocab
    seqs = requests(vocab, False)[some]
    bare, _ = played(model, seqs)
    less = verified(model, receipts(model, seqs, {}))
    seqs = requests(vocab, True)[some]
    made, details = played(model, seqs)
    claims = receipts(model, seqs, details)
    taken = verified(model, claims)
    reads = sum(-(-(TOKENS - 1) // (model.target.max_draft + 1)) for _ in claims)
    print(
        f"{what}: generated in {bare:.2f} s, verified in {less:.3f} s = {less / bare:.3f} of it; "
        f"with commitments {made:.2f} s ({made / bare:.3f} of {bare:.2f}) and {taken:.3f} s = "
        f"{taken / made:.3f} of it; {reads} reads each",
        flush=True,
    )
    return claims


def check_forged(model: Model, claims: list[Receipt]) -> None:
    forged = [
        changed(c, "answer", "ids", FORGED_AT, value=c.answer.ids[FORGED_AT] + 1) for c in claims
    ]
    found = [(verdict.kind, verdict.at) for verdict in judged_by(model, forged)]
    assert found == [("differs", FORGED_AT)] * len(forged), found
    print(f"{len(forged)} forged at {FORGED_AT}: each is found there")


def compared(claims: list[Receipt], earlier: list[Any]) -> None:
    ids = logits = sampling = numbers = 0
    for claim, text in zip(claims, earlier, strict=True):
        other = read_receipt(text.encode())
        assert claim.commitments and other.commitments
        assert claim.prompt == other.prompt and claim.seed == other.seed
        ids += claim.answer.ids == other.answer.ids
        numbers += claim.logprobs == other.logprobs
        logits += claim.commitments.logits == other.commitments.logits
        sampling += claim.commitments.sampling == other.commitments.sampling
    tokens = sum(len(claim.answer.ids) for claim in claims)
    print(
        f"beside the earlier run's {len(claims)} answers of {tokens} tokens: ids of {ids} equal, "
        f"log-probabilities of {numbers}, commitments to logits of {logits}, to sampling of "
        f"{sampling}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--dtype", default="fp8")
    parser.add_argument("--kv-dtype", default="fp8")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    asked = parser.parse_args()
    print(f"{asked}, {torch.cuda.get_device_name()}", flush=True)
    model = loaded(asked)
    played(model, requests(model.target.vocab, True)[:AT_ONCE])  # captures
    played(model, requests(model.target.vocab, False)[:AT_ONCE])
    for i in range(ALONE):
        timed(model, slice(i, i + 1), f"answer {i} alone, {'captures' if i == 0 else 'captured'}")
    claims = timed(model, slice(AT_ONCE), f"{AT_ONCE} at once")
    claims += timed(model, slice(AT_ONCE, ANSWERS), f"{ANSWERS - AT_ONCE} at once")
    check_forged(model, claims[:8])
    if asked.out:
        asked.out.write_text(json.dumps([claim.to_text() for claim in claims]))
    if asked.against:
        compared(claims, json.loads(asked.against.read_text()))


if __name__ == "__main__":
    main()

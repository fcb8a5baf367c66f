"""CPU seconds of a replay's host, without the target's.

    PYTHONPATH=. python docs/log/audit_host.py

A target that looks up what it chooses, with log-probabilities, in a table of random ids; its own
seconds are left out. Three kinds of receipts: of ids alone, with a stop string that never comes,
and with a text, in mini's words.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence as Seqs
from typing import Any

import numpy as np

from drafters.none.host import NoDrafter
from serve.runner import Update
from serve.stream import ChoiceText
from specdec.audit.making import Ended, receipt_of
from specdec.audit.receipt import Receipt
from specdec.audit.replay import replayed
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.protocols import OneByOne
from specdec.core.types import LogprobRows, Sampling, Sequence, Step
from targets.mini import checkpoint_path
from targets.tokenizer import load_tokenizer
from tests.support.audits import IDENTITY

AT_ONCE = 32
TOKENS = 200
PROMPT = 8
WIDTH = 8
WORDS = 11
"""Of `LogprobRows.sampling`."""


class Known(OneByOne):
    """Looks up what it chooses; a prompt's first token is the answer's number."""

    def __init__(self, vocab: int) -> None:
        self.slots, self.vocab, self.max_len = AT_ONCE, vocab, PROMPT + TOKENS
        self.max_draft, self.prefill_chunk = WIDTH - 1, PROMPT
        draw, size = np.random.default_rng(1), (AT_ONCE, TOKENS + WIDTH)
        self.ids = draw.integers(300, vocab, size, np.int32)
        self.top_ids = draw.integers(0, vocab, (*size, 20), np.int32)
        self.values = -draw.random((*size, 20), np.float32)
        self.sums = draw.integers(0, 2**32, (*size, 2), np.uint32)
        self.words = draw.integers(0, 2**32, (AT_ONCE, WORDS), np.uint32)
        self.seconds = 0.0

    def prefill(self, seq: Sequence, start: int, stop: int) -> Step:
        return self._step([seq], 1)

    def verify(self, seqs: Seqs[Sequence], draft: Any) -> Step:
        return self._step(seqs, 1 + np.shape(draft)[1])

    def _step(self, seqs: Seqs[Sequence], width: int) -> Step:
        began = time.process_time()
        row = np.array([seq.tokens[0] for seq in seqs])
        at = np.array([[seq.emitted] for seq in seqs]) + np.arange(width)
        places = row[:, None], at
        ids, values, sums = self.top_ids[places], self.values[places], self.sums[places]
        details = LogprobRows(values[..., 0], ids, values, sums, self.words[row])
        step = Step(self.ids[places], None, details)
        self.seconds += time.process_time() - began
        return step


def made(target: Known, tokenizer: Any, kind: str) -> list[Receipt]:
    seqs = [
        Sequence([i] * PROMPT, Sampling(seed=i, logprobs=0), max_tokens=TOKENS)
        for i in range(AT_ONCE)
    ]
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    details: dict[Sequence, list[Any]] = {seq: [] for seq in seqs}
    for event in engine.run(seqs):
        details[event.sequence] += event.logprobs or ()
    found = []
    for seq in seqs:
        ids = seq.tokens[PROMPT:]
        text = ChoiceText(tokenizer).feed(Update(0, tuple(ids), finish="length")).text
        stops = ("never comes",) if kind == "stop" else ()
        told = text if kind == "text" else None
        ended = Ended(ids, "length", stops, text=told, logprobs=details[seq])
        found.append(receipt_of(IDENTITY, seq, ended))
    return found


def host_seconds(target: Any, tokenizer: Any, receipts: list[Receipt]) -> float:
    target.seconds, began = 0.0, time.process_time()
    verdicts = replayed(receipts, target, tokenizer, target.max_draft)
    taken = time.process_time() - began - target.seconds
    assert {v.kind for v in verdicts} == {"verified"}, verdicts[0]
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=9)
    asked = parser.parse_args()
    tokenizer = load_tokenizer(checkpoint_path("mini"))
    target = Known(tokenizer.vocab_size)
    for kind in ("ids", "stop", "text"):
        receipts = made(target, tokenizer, kind)
        taken = sorted(host_seconds(target, tokenizer, receipts) for _ in range(asked.times))
        print(
            f"{kind}: {1e3 * taken[0]:.1f} ms at least, {1e3 * taken[len(taken) // 2]:.1f} in the "
            f"middle, of {AT_ONCE * TOKENS} ids"
        )


if __name__ == "__main__":
    main()

"""First-class fakes: a target that can be calculated by hand, and drafters that mean harm."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import numpy as np

from specdec.core.protocols import OneByOne
from specdec.core.types import NO_GUESS, Array, Proposal, Sequence, Step


class FakeTarget(OneByOne):
    """Chooses (sum of (position + 1) * token over all it was fed, + seed) mod vocab.

    It keeps what it was fed per slot as a KV cache would, so reading a rejected draft's entry or
    losing a committed one changes every later token.
    """

    pages = None

    def __init__(
        self,
        slots: int = 2,
        vocab: int = 50,
        max_len: int = 512,
        max_draft: int = 7,
        chunk: int = 4,
    ) -> None:
        self.slots, self.vocab, self.max_len = slots, vocab, max_len
        self.max_draft, self.prefill_chunk = max_draft, chunk
        self.fed = np.full((slots, max_len + max_draft + 1), -7, np.int64)

    def _choose(self, seq: Sequence, length: int) -> int:
        fed = self.fed[seq.slot, :length]
        return (int((fed * np.arange(1, length + 1)).sum()) + seq.sampling.seed) % self.vocab

    def prefill(self, seq: Sequence, start: int, stop: int) -> Step:
        self.fed[seq.slot, start:stop] = seq.tokens[start:stop]
        return Step(np.array([[self._choose(seq, stop)]], np.int32))

    def verify(self, seqs: Seqs[Sequence], draft: Array) -> Step:
        rows = []
        for b, seq in enumerate(seqs):
            start = len(seq.tokens) - 1
            fed = [seq.tokens[-1], *np.asarray(draft)[b]]
            self.fed[seq.slot, start : start + len(fed)] = fed
            rows.append([self._choose(seq, start + j + 1) for j in range(len(fed))])
        return Step(np.array(rows, np.int32))


class Oracle:
    """Guesses the plain run's tokens, shifted by `shift`: always right with 0, else always
    wrong."""

    def __init__(self, plain: dict[str, list[int]], shift: int = 0, vocab: int = 50) -> None:
        self.plain, self.shift, self.vocab = plain, shift, vocab

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        pass

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        draft = np.full((len(seqs), k), NO_GUESS, np.int32)
        for b, seq in enumerate(seqs):
            coming = self.plain[seq.request_id][len(seq.tokens) :][:k]
            draft[b, : len(coming)] = [(t + self.shift) % self.vocab for t in coming]
        return Proposal(draft)

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        pass

    def reset(self, seq: Sequence) -> None:
        pass


class Noise:
    """Random guesses: from the vocabulary, or, with `wild`, from far outside it."""

    def __init__(self, vocab: int, wild: bool = False, seed: int = 0) -> None:
        self.low, self.high = (-(2**31), 2**31 - 1) if wild else (0, vocab)
        self.random = np.random.default_rng(seed)

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        pass

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        guesses = self.random.integers(self.low, self.high, (len(seqs), k))
        return Proposal(guesses.astype(np.int32))

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        pass

    def reset(self, seq: Sequence) -> None:
        pass


class ScriptedTarget(FakeTarget):
    """Emits the given tokens whatever it is fed, then the token `end`."""

    def __init__(self, script: list[int], end: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.script, self.end = script, end

    def _choose(self, seq: Sequence, length: int) -> int:
        at = length - seq.prompt_len
        return self.script[at] if 0 <= at < len(self.script) else self.end

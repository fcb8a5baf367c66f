"""Plain decoding: the drafter that proposes nothing, through the same loop as all others."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import numpy as np

from specdec.core.types import NO_GUESS, Array, Proposal, Sequence, Step


class NoDrafter:
    def reset(self, seq: Sequence) -> None:
        pass

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        pass

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        return Proposal(np.full((len(seqs), k), NO_GUESS, np.int32))

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        pass

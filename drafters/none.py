"""Plain decoding: the drafter that proposes nothing, through the same loop as all others."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from specdec.types import NO_GUESS, Array, Sequence, Step


class NoDrafter:
    def propose(self, seqs: Rows[Sequence], k: int) -> Array:
        return np.full((len(seqs), k), NO_GUESS, np.int32)

    def observe(self, seqs: Rows[Sequence], step: Step, accepted: Array) -> None:
        pass

    def reset(self, seq: Sequence) -> None:
        pass

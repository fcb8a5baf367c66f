"""One speculative step. This page is speculative decoding; the rest is making it fast.

The drafter guesses k tokens, the target reads its weights once and chooses at all k + 1 positions,
and the longest prefix of the guess that equals the choice is kept, plus one token for free. The
output is the target's own choice at every position, so it cannot depend on the drafter.

The host loop calls this with numpy and real sequences; the device loop traces this very function
(`drafters/device_cycle_jax.py`).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from specdec.accept import accept
from specdec.protocols import Cycle, Drafter, Target
from specdec.types import Round, Sequence


def cycle(target: Target, drafter: Drafter, seqs: Rows[Sequence], k: int) -> Round:
    draft = drafter.propose(seqs, k)
    step = target.verify(seqs, draft)
    accepted = accept(draft, step.chosen)
    drafter.observe(seqs, step, accepted)
    return Round(draft, step, accepted)


def host_cycle(target: Target, drafter: Drafter, k: int) -> Cycle:
    """The plain driver: one cycle per call. Plain decoding is the drafter `none`, or k = 0."""
    return lambda seqs, hurry: [cycle(target, drafter, seqs, k)]

"""One speculative step. This page is speculative decoding; the rest is making it fast.

The drafter guesses k tokens, the target reads its weights once and chooses at all k + 1 positions,
and the longest prefix of the guess that equals the choice is kept, plus one token for free. The
output is the target's own choice at every position, so it cannot depend on the drafter.

The host loop calls this with the running sequences; the device loops trace it (JAX) or capture it
in a CUDA graph, with a batch of arrays (`targets/jax/device_loop.py`, `targets/cuda/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs
from dataclasses import replace

from specdec.core.accept import accept
from specdec.core.constraint import GuidedDrafter, Plain
from specdec.core.protocols import Batch, Cycle, Drafter, Proposer, Target, Verifier
from specdec.core.timing import Timed
from specdec.core.types import Array, Round, Sequence


def cycle(
    target: Verifier[Batch],
    drafter: Proposer[Batch],
    batch: Batch,
    k: int,
    accept: Callable[[Array, Array], Array] = accept,
) -> Round:
    proposal = drafter.propose(batch, k)
    step = target.verify(batch, proposal.tokens)
    accepted = accept(proposal.tokens, step.chosen)
    drafter.observe(batch, step, accepted)
    return Round(proposal, step, accepted)


def host_cycle(target: Target, drafter: Drafter, k: int) -> Cycle:
    """The plain driver: one cycle per call. Plain decoding is the drafter `none`, or k = 0."""
    return lambda seqs, single: [guided_cycle(target, drafter, seqs, k)]


def guided_cycle(
    target: Verifier[Seqs[Sequence]],
    drafter: Proposer[Seqs[Sequence]],
    seqs: Seqs[Sequence],
    k: int,
) -> Round:
    """A cycle driven by the host; in its draft, predictions and forced tokens come first. If no
    sequence speculates it is plain decoding, and the drafter is not called."""
    speculates = any(seq.most_guesses(1) for seq in seqs)
    guided = GuidedDrafter(drafter if speculates else Plain())
    timed = Timed(target, guided)
    done = cycle(timed, timed, seqs, k if speculates else 0)
    return replace(done, forced_prefix=guided.forced_prefix, seconds=timed.seconds)

"""Drafters with weights beside a model that several GPUs share: each card has the drafter with a
state of its own. All make the same guesses, from the same features."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from drafters.kind import PlacedDrafter
from specdec.core.types import Array, Proposal, Sequence, Step
from targets.cuda.cards import CardsTarget, OnCards, launching, on_card
from targets.cuda.exchange import silent
from targets.cuda.host_drafter import HEAD, HostHead
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.snapshots import CardsSnapshots
from targets.cuda.target import CudaTarget
from targets.cuda.verifier import sampler_needed

Result = TypeVar("Result")


class CardsDrafter:
    """A `Drafter` of each card. In the host loop the first one's guesses are verified."""

    def __init__(self, ranks: Seqs[CudaTarget], each: Seqs[Any]) -> None:
        """each: in the order of the ranks."""
        self.ranks, self.each = tuple(ranks), tuple(each)

    def reset(self, seq: Sequence) -> None:
        self.on_each(self.ranks, lambda own, _: own.reset(seq))

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        self.on_each(self._steps(step), lambda own, read: own.prefill(seq, start, stop, read))

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        return on_card(self.ranks[0], partial(self.each[0].propose, seqs, k))

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        self.on_each(self._steps(step), lambda own, seen: own.observe(seqs, seen, accepted))

    def on_each(self, beside: Seqs[Any], work: Callable[[Any, Any], Result]) -> list[Result]:
        """work: takes a card's drafter, and what is beside it."""
        cards = zip(self.ranks, self.each, beside, strict=True)
        return [on_card(rank, partial(work, own, other)) for rank, own, other in cards]

    def _steps(self, step: Step) -> list[Step]:
        """A step of all cards as each card's own."""
        if step.features is None:
            return [step] * len(self.each)
        return [replace(step, features=own) for own in step.features]


class DividedHeads(CardsDrafter):
    """Heads of which each card computes a part: they wait for each other's sums, so that a draft is
    enqueued on all cards before any is read."""

    def __init__(self, ranks: Seqs[CudaTarget], each: Seqs[HostHead[Any]]) -> None:
        super().__init__(ranks, each)
        self._loaded: set[tuple[int, int, bool]] = set()

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        shape = len(seqs), k, sampler_needed(seqs)
        if shape not in self._loaded:  # the driver loads kernels when they are first launched
            with catching_oom(HEAD), silent():
                self._enqueued(seqs, k)
            self._loaded.add(shape)
        with launching():
            rows = self._enqueued(seqs, k)
        return on_card(self.ranks[0], partial(self.each[0].read, rows[0]))

    def _enqueued(self, seqs: Seqs[Sequence], k: int) -> list[Any]:
        return self.on_each(self.ranks, lambda own, _: own.enqueued(seqs, k))


def place_on_each(
    target: CudaTarget | CardsTarget,
    place: Callable[[CudaTarget], PlacedDrafter],
    together: type[CardsDrafter] = CardsDrafter,
) -> PlacedDrafter:
    """What `place` makes beside a target on one card: beside it, or on each of several cards.
    together: of what class the host's drafter is on several."""
    if isinstance(target, CudaTarget):
        return place(target)
    ranks = target.ranks
    each = [on_card(rank, partial(place, rank)) for rank in ranks]

    def make(k: int) -> CardsDrafter:
        pairs = zip(ranks, each, strict=True)
        return together(ranks, [on_card(rank, partial(own.make, k)) for rank, own in pairs])

    def on_device(drafter: CardsDrafter) -> OnCards:
        return OnCards(drafter.on_each(each, lambda own, placed: placed.on_device(own)))

    def snapshots(drafter: CardsDrafter, unit: int) -> CardsSnapshots | None:
        own = drafter.on_each(each, lambda own, placed: placed.snapshots(own, unit))
        return None if None in own else CardsSnapshots(ranks, own)

    return PlacedDrafter(make, on_device, snapshots)

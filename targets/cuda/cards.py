"""One model on several cards, driven by one thread: a `Target` of which each rank is a `CudaTarget`
with its part of the layers (ranks.py).

Cards wait for each other within a call. So a call is enqueued on every card before the host waits
for any, and nothing that waits for a card lies between. All cards compute the same choice; the
first one's is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence as Seqs
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from specdec.core.errors import UserError
from specdec.core.pages import PagePlan, Pages
from specdec.core.script import Script
from specdec.core.types import MAX_DRAFT, Array, Round, Sequence, Step
from targets.arch import Arch
from targets.cuda.device_drafter import DeviceDrafter
from targets.cuda.device_loop import CapturedCycle, device_loop, rounds
from targets.cuda.graphs import ForwardOutput, no_collection
from targets.cuda.ops import Rows
from targets.cuda.out_of_memory import catching_oom, ran_out
from targets.cuda.plan import ARITHMETIC
from targets.cuda.target import CudaTarget
from targets.cuda.verifier import read_step

Result = TypeVar("Result")
END: Any = object()
"""Behind the last part."""


class CardsTarget:
    """The same model on `ranks`, one a card. Everything that a rank has for itself, such as its
    sampling parameters, is written on each."""

    backend, max_draft = "cuda", MAX_DRAFT
    vision = None
    """A card's part of the layers is not what long prompts are multiplied with, and pictures are
    read so: they are taken on one card alone."""

    def __init__(self, arch: Arch, ranks: Seqs[CudaTarget]) -> None:
        self.arch, self.ranks = arch, tuple(ranks)
        first = self.ranks[0]
        self.plan, self.slots, self.max_len = first.plan, first.slots, first.max_len
        self.prefill_chunk, self.vocab = first.prefill_chunk, first.vocab
        self.suppress, self.device = first.suppress, first.device
        self.dtype, self.kv_dtype = first.dtype, first.kv_dtype
        plan = self.plan.pages
        self.pages = None if plan is None else CardsPages(plan, self.ranks)

    @property
    def identity(self) -> str:
        """Their number doesn't matter for prompts of up to `plan.first` tokens, and does for longer
        ones."""
        return f"{self.plan} {self.arch} arithmetic {ARITHMETIC} on {len(self.ranks)} cards"

    def prefill(self, seq: Sequence, start: int, stop: int) -> Step:
        *_, step = self.prefill_parts(seq, start, stop)
        assert step is not None
        return step

    def prefill_parts(self, seq: Sequence, start: int, stop: int) -> Iterator[Step | None]:
        if start == 0:
            self.seat(seq)
        with catching_oom(f"a chunk of {stop - start} tokens"):
            self.reserve(seq.slot, stop)
            rooms = self._on_each(lambda rank: rank.prepare_prefill(start, stop))
        pairs = zip(self.ranks, rooms, strict=True)
        parts = [rank.enqueued_parts(seq, start, stop, room) for rank, room in pairs]
        for reads in self._in_turns(parts):
            yield reads[0] and self._with_features(self._read(reads))

    def together(self, lengths: Seqs[int]) -> list[int]:
        return self.ranks[0].together(lengths)

    def prefill_all(self, seqs: Seqs[Sequence]) -> list[Step]:
        if len(seqs) == 1:
            return [self.prefill(seqs[0], 0, seqs[0].prompt_len)]
        for seq in seqs:
            self.seat(seq)
        with catching_oom(f"{len(seqs)} prompts at once"):
            for seq in seqs:
                self.reserve(seq.slot, seq.prompt_len)
            self._on_each(lambda rank: rank.prepare_all(seqs))
        with launching():
            reads = self._on_each(lambda rank: rank.enqueue_all(seqs))
        with catching_oom(f"{len(seqs)} prompts at once"):
            read = self._read(reads)
            return [self._with_features(steps) for steps in zip(*read, strict=True)]

    def verify(self, seqs: Seqs[Sequence], draft: Array) -> Step:
        if draft.shape[1] > self.max_draft:
            raise UserError(f"K is {draft.shape[1]} but at most {self.max_draft} is possible")
        with catching_oom(f"a batch of {len(seqs)}"):
            for seq in seqs:
                self.reserve(seq.slot, len(seq.tokens))
            self._on_each(lambda rank: rank.prepare_verify(seqs, draft))
        *_, results = self._in_turns([r.enqueued_verify(seqs, draft) for r in self.ranks])
        with catching_oom(f"a batch of {len(seqs)}"):
            return self._with_features(self._read([partial(read_step, own) for own in results]))

    def forward(self, rows: Rows, needs_sampler: bool) -> ForwardOutput:
        """As `CudaTarget.forward`, of the first card."""
        feed = [_moved(rows, rank) for rank in self.ranks]  # a copy would wait for both cards
        batch, tokens = rows.tokens.shape
        self._on_each(lambda rank: rank.prepare_forward(batch, tokens, needs_sampler))
        pairs = zip(self.ranks, feed, strict=True)
        with launching():
            return [on_card(r, partial(r.forward, own, needs_sampler)) for r, own in pairs][0]

    def reserve(self, slot: int, tokens: int) -> None:
        """As `CudaTarget.reserve`. Nothing is mapped while cards wait for each other."""
        self._on_each(lambda rank: rank.reserve(slot, tokens))

    def release(self, slots: Iterable[int]) -> None:
        """As `CudaTarget.release`."""
        for rank in self.ranks:
            rank.release(slots)

    def seat(self, seq: Sequence) -> None:
        """As `CudaTarget.seat`."""
        self._on_each(lambda rank: rank.seat(seq))

    def choose(self, logits: torch.Tensor, rows: Rows, needs_sampler: bool) -> torch.Tensor:
        """As `CudaTarget.choose`; every card would choose the same."""
        return self.ranks[0].choose(logits, rows, needs_sampler)

    def _on_each(self, work: Callable[[CudaTarget], Result]) -> list[Result]:
        """Enqueue on each card in turn."""
        return [on_card(rank, partial(work, rank)) for rank in self.ranks]

    def _read(self, reads: Seqs[Callable[[], Result]]) -> list[Result]:
        """Results of the first card, and of the others where drafters take features from them."""
        readers = self.ranks if self.plan.features else self.ranks[:1]
        return [on_card(rank, read) for rank, read in zip(readers, reads, strict=False)]

    def _with_features(self, steps: Seqs[Step]) -> Step:
        """The first card's step, with a tuple of every card's features."""
        features = tuple(step.features for step in steps) if self.plan.features else None
        return replace(steps[0], features=features)

    def _in_turns(self, parts: list[Iterator[Any]]) -> Iterator[list[Any]]:
        """Each card's next part, once it is enqueued on all."""
        while True:
            pairs = zip(self.ranks, parts, strict=True)
            with launching():
                results = [on_card(rank, partial(next, part, END)) for rank, part in pairs]
            if END in results:
                return
            yield results


class CardsPages(Pages):
    """The pages of every card: each slot holds as many on one as on another."""

    def __init__(self, plan: PagePlan, ranks: Seqs[CudaTarget]) -> None:
        super().__init__(plan, ranks[0].slots)
        self._ranks, self.held = ranks, _pages(ranks[0]).held

    def reserve(self, slot: int, tokens: int) -> bool:
        return all(
            on_card(rank, partial(_pages(rank).reserve, slot, tokens)) for rank in self._ranks
        )

    def release(self, slot: int) -> None:
        for rank in self._ranks:
            _pages(rank).release(slot)


def _pages(rank: CudaTarget) -> Pages:
    assert rank.pages is not None
    return rank.pages


class OnCards:
    """A device drafter of each card, in the order of the ranks."""

    def __init__(self, each: Seqs[DeviceDrafter]) -> None:
        self.each = tuple(each)


def step_of(target: CudaTarget | CardsTarget, make: Callable[[CudaTarget], Any]) -> Any:
    """A device drafter beside this target: one, or one for each card."""
    if isinstance(target, CudaTarget):
        return make(target)
    return OnCards([on_card(rank, partial(make, rank)) for rank in target.ranks])


class CardsCycle:
    """A `Cycle` of which each card runs the same captured graphs."""

    def __init__(
        self, cards: CardsTarget, drafters: OnCards, k: int, script: Script | None = None
    ) -> None:
        self._ranks = cards.ranks
        self._cycles = [
            on_card(rank, partial(device_loop, rank, drafter, k, script))
            for rank, drafter in zip(cards.ranks, drafters.each, strict=True)
        ]

    def __call__(self, seqs: Seqs[Sequence], single: bool) -> list[Round]:
        prepared = self._on_each(lambda cycle, _: cycle.prepare(seqs))
        with launching():
            forced = self._on_each(lambda cycle, i: cycle.launch(prepared[i]))
        former = self._on_each(lambda cycle, i: cycle.end(prepared[i], forced[i]))
        return on_card(self._ranks[0], partial(rounds, former[0], seqs))

    def _on_each(self, work: Callable[[CapturedCycle, int], Result]) -> list[Result]:
        """With the card's cycle and its number."""
        pairs = enumerate(zip(self._ranks, self._cycles, strict=True))
        return [on_card(rank, partial(work, cycle, i)) for i, (rank, cycle) in pairs]


@contextmanager
def launching() -> Iterator[None]:
    """While a step is launched on one card after the other. Raises RuntimeError where memory ran
    out: a card that has begun waits for the others, so that nothing is given back or goes on."""
    try:
        with no_collection():
            yield
    except (MemoryError, RuntimeError) as problem:
        if not isinstance(problem, MemoryError) and not ran_out(problem):
            raise
        raise RuntimeError(
            "a GPU ran out of memory while another one waited for its part of a step: start with a "
            "smaller --max-len or fewer --slots"
        ) from problem


def on_card(rank: CudaTarget, work: Callable[[], Result]) -> Result:
    """With this rank's card as the current one. Raises RuntimeError where a card waited in vain for
    another one's sums: no launch of this process succeeds from then on."""
    try:
        with torch.cuda.device(rank.device):
            return work()
    except RuntimeError as problem:
        if not _was_trapped(problem):
            raise
        raise RuntimeError(
            "a GPU waited 2 seconds in vain for the sums of another one that shares the model: "
            "restart, and look for a failed GPU or link (nvidia-smi -q, dmesg)"
        ) from problem


def _was_trapped(problem: RuntimeError) -> bool:
    """Only `receive4` of kernels/exchange.cuh traps. The driver and torch have words of their own
    for it."""
    words = str(problem).lower().replace("_", " ")
    return "launch failure" in words or "launch failed" in words


def _moved(rows: Rows, rank: CudaTarget) -> Rows:
    return Rows(*(part.to(rank.device) for part in (rows.tokens, rows.start, rows.slot)))

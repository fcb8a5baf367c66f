"""One model on several cards, driven by one thread: a `Target` of which each rank is a `CudaTarget`
with its part of the layers (ranks.py).

Cards wait for each other within a call. So a call is enqueued on every card before the host waits
for any, and nothing that waits for a card lies between. All cards compute the same choice; the
first one's is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seqs
from typing import Any, TypeVar

import torch

from specdec.core.errors import UserError
from specdec.core.types import MAX_DRAFT, Array, Round, Sequence, Step
from targets.arch import Arch
from targets.cuda.device_drafter import DeviceDrafter
from targets.cuda.device_loop import CapturedCycle, rounds
from targets.cuda.exchange import ExchangeMemory
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.target import CudaTarget, read_step

Result = TypeVar("Result")
END: Any = object()
"""Behind the last part."""


class CardsTarget:
    """The same model on `ranks`, one a card. Everything that a rank has for itself, such as its
    sampling parameters, is written on each."""

    backend, max_draft = "cuda", MAX_DRAFT

    def __init__(self, arch: Arch, ranks: Seqs[CudaTarget], memory: ExchangeMemory) -> None:
        self.arch, self.ranks, self._memory = arch, tuple(ranks), memory
        first = self.ranks[0]
        self.plan, self.slots, self.max_len = first.plan, first.slots, first.max_len
        self.prefill_chunk, self.vocab = first.prefill_chunk, first.vocab
        self.suppress, self.device = first.suppress, first.device
        self.dtype, self.kv_dtype = first.dtype, first.kv_dtype

    @property
    def identity(self) -> str:
        """Their number doesn't matter for prompts of up to `plan.first` tokens, and does for longer
        ones."""
        return f"{self.plan} {self.arch} on {len(self.ranks)} cards"

    def prefill(self, seq: Sequence, start: int, stop: int) -> Step:
        *_, step = self.prefill_parts(seq, start, stop)
        assert step is not None
        return step

    def prefill_parts(self, seq: Sequence, start: int, stop: int) -> Iterator[Step | None]:
        with catching_oom(f"a chunk of {stop - start} tokens"):
            self._on_each(lambda rank: rank.prepare_prefill(start, stop))
        parts = [rank.enqueued_parts(seq, start, stop) for rank in self.ranks]
        for reads in self._in_turns(parts):
            with torch.cuda.device(self.device):
                yield reads[0] and reads[0]()

    def together(self, lengths: Seqs[int]) -> list[int]:
        return self.ranks[0].together(lengths)

    def prefill_all(self, seqs: Seqs[Sequence]) -> list[Step]:
        if len(seqs) == 1:
            return [self.prefill(seqs[0], 0, seqs[0].prompt_len)]
        with catching_oom(f"{len(seqs)} prompts at once"):
            self._on_each(lambda rank: rank.prepare_all(seqs))
            reads = self._on_each(lambda rank: rank.enqueue_all(seqs))
            with torch.cuda.device(self.device):
                return reads[0]()

    def verify(self, seqs: Seqs[Sequence], draft: Array) -> Step:
        if draft.shape[1] > self.max_draft:
            raise UserError(f"K is {draft.shape[1]} but at most {self.max_draft} is possible")
        with catching_oom(f"a batch of {len(seqs)}"):
            self._on_each(lambda rank: rank.prepare_verify(seqs, draft))
            *_, results = self._in_turns([r.enqueued_verify(seqs, draft) for r in self.ranks])
            with torch.cuda.device(self.device):
                return read_step(results[0])

    def _on_each(self, work: Callable[[CudaTarget], Result]) -> list[Result]:
        """Enqueue on each card in turn."""
        return [_on(rank, lambda rank=rank: work(rank)) for rank in self.ranks]

    def _in_turns(self, parts: list[Iterator[Any]]) -> Iterator[list[Any]]:
        """Each card's next part, once it is enqueued on all."""
        while True:
            pairs = zip(self.ranks, parts, strict=True)
            results = [_on(rank, lambda part=part: next(part, END)) for rank, part in pairs]
            if END in results:
                return
            yield results


class CardsCycle:
    """A `Cycle` of which each card runs the same captured graphs."""

    def __init__(self, cards: CardsTarget, drafters: Seqs[DeviceDrafter], k: int) -> None:
        """drafters: one of each card."""
        self._ranks = cards.ranks
        self._cycles = [
            _on(rank, lambda rank=rank, drafter=drafter: CapturedCycle(rank, drafter, k, None))
            for rank, drafter in zip(cards.ranks, drafters, strict=True)
        ]

    def __call__(self, seqs: Seqs[Sequence], single: bool) -> list[Round]:
        ranks, cycles = self._ranks, self._cycles
        prepared = [_on(r, lambda c=c: c.prepare(seqs)) for r, c in zip(ranks, cycles, strict=True)]
        launches = [*zip(ranks, cycles, prepared, strict=True)]
        forced = [_on(rank, lambda c=c, p=p: c.launch(p)) for rank, c, p in launches]
        ends = zip(launches, forced, strict=True)
        former = [_on(rank, lambda c=c, p=p, f=f: c.end(p, f)) for (rank, c, p), f in ends]
        return rounds(former[0], seqs)


def _on(rank: CudaTarget, work: Callable[[], Result]) -> Result:
    """On this rank's card."""
    with torch.cuda.device(rank.device):
        return work()

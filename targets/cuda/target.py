"""The CUDA target behind `specdec.core.protocols.Target`: it verifies, and reads prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seqs
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from specdec.core.constraint import mask_rows
from specdec.core.pictures import PlacedPicture, SoftRows, sees_up_to, soft_rows, within
from specdec.core.types import NO_GUESS, Array, LogprobRows, Sequence, Step
from targets.arch import Arch
from targets.cuda import sampling
from targets.cuda.cache import remember
from targets.cuda.experts import are_sorted, kind_of, most_pairs
from targets.cuda.graphs import TOGETHER, idle_rows, padded, padded_together
from targets.cuda.model import Hidden
from targets.cuda.ops import Ops, Rows
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.params import Weights
from targets.cuda.plan import CALLS, Plan
from targets.cuda.prefill import PrefillChunk, prefill
from targets.cuda.verifier import CudaVerifier, logprobs_wanted, sampler_needed
from targets.vision.rows import Encoder, SoftTokens, rows_of


class CudaTarget(CudaVerifier):
    """One model on one device, which also reads prompts: short ones by decoding's kernels, long
    ones by the library's matmuls.

    Graphs pad short prompts; calls with pictures always have a graph's size, beside which none was
    tried.
    """

    def __init__(
        self,
        plan: Plan,
        arch: Arch,
        weights: Weights,
        ops: Ops,
        suppress: tuple[int, ...] = (),
        graphs: bool = False,
        encoder: Encoder | None = None,
    ) -> None:
        """graphs: as of `CudaVerifier`. encoder: of pictures; None: it takes none."""
        super().__init__(plan, arch, weights, ops, suppress, graphs)
        self.prefill_chunk = plan.chunk
        self.soft_tokens = None if encoder is None else SoftTokens(encoder)
        self.vision = None if encoder is None else encoder.spec

    def prefill(self, seq: Sequence, start: int, stop: int) -> Step:
        *_, step = self.prefill_parts(seq, start, stop)
        assert step is not None
        return step

    @torch.inference_mode()
    def prefill_parts(self, seq: Sequence, start: int, stop: int) -> Iterator[Step | None]:
        with catching_oom(f"a chunk of {stop - start} tokens"):
            if start == 0:
                self.seat(seq)
            for read in self.enqueued_parts(seq, start, stop):
                yield read and read()

    @torch.inference_mode()
    def enqueued_parts(
        self, seq: Sequence, start: int, stop: int, room: torch.Tensor | None = None
    ) -> Iterator[Callable[[], Step] | None]:
        """`prefill_parts` of a seated sequence on the device; the last part's step is read by what
        is returned. room: what `prepare_prefill` took."""
        self.reserve(seq.slot, stop)
        placed, soft = within(start, stop, seq.pictures), []
        for part in rows_of(self.soft_tokens, placed, seq.reuse):
            if part is None:
                yield None
            else:
                soft.append(part)
        pictures = list(zip(placed, soft, strict=True))
        own = soft_rows(start, pictures)
        rows = self._rows([seq.tokens[start:stop]], [start], [seq.slot])
        remember(self.cache.tokens, rows.tokens, rows.start, rows.slot)
        ends = stop == seq.prompt_len
        chunk = rows, start, seq.slot, ends
        made = self._pictures(*chunk, pictures) if pictures else self._chunk(*chunk, room)
        for out in made:
            yield out and partial(self._read, seq, stop, rows, out, own)

    @catching_oom("the choice after a prompt")
    def _read(self, seq: Sequence, stop: int, rows: Rows, out: Hidden, soft: SoftRows) -> Step:
        """The step of a chunk that ends before `stop`."""
        features = None if out.features is None else out.features[None]
        if out.logits is None or stop != seq.prompt_len:  # no choice follows: nothing to wait for
            return Step(np.full((1, 1), NO_GUESS, np.int32), features, pictures=soft)
        last = Rows(rows.tokens[:, -1:], rows.start + (rows.tokens.shape[1] - 1), rows.slot)
        chosen, details = self._first_choices([seq], out.logits, last)
        return Step(chosen, features, details, pictures=soft)

    def _first_choices(
        self, seqs: Seqs[Sequence], logits: torch.Tensor, last: Rows
    ) -> tuple[Array, LogprobRows | None]:
        """What follows each prompt [B, 1]. logits [B, V] after the rows `last` [B, 1]."""
        logits = logits[:, None]
        masks = mask_rows(seqs, np.empty((len(seqs), 0), np.int32), self.vocab)
        chosen = self.choose(logits, last, sampler_needed(seqs), self.on_device(masks))
        details = self._details(logits, chosen, last) if logprobs_wanted(seqs) else None
        return chosen.cpu().numpy(), details and sampling.on_host(details)

    def together(self, lengths: Seqs[int]) -> list[int]:
        size = self._padded_together(lengths[0])
        if size is None:
            return [0]
        alike = [i for i, n in enumerate(lengths) if self._padded_together(n) == size]
        return alike[: max(1, self._rows_together(size) // size)]

    def _padded_together(self, tokens: int) -> int | None:
        """None for a prompt that is read alone."""
        size = padded_together(tokens)
        return size if size and size <= self.plan.first_rows else None

    def _rows_together(self, size: int) -> int:
        """Most rows of prompts of `size` tokens that one call reads: a power of two."""
        moe, kind = self.arch.moe, kind_of(self.plan.dtype)
        if moe is None or are_sorted(size, kind):
            return TOGETHER
        listed = most_pairs(self.arch, moe, kind) // moe.top_k
        return min(TOGETHER, 1 << (listed.bit_length() - 1))

    def prefill_all(self, seqs: Seqs[Sequence]) -> list[Step]:
        if len(seqs) == 1:
            return [self.prefill(seqs[0], 0, seqs[0].prompt_len)]
        with catching_oom(f"{len(seqs)} prompts at once"):
            for seq in seqs:
                self.seat(seq)
            return self.enqueue_all(seqs)()

    @torch.inference_mode()
    def enqueue_all(self, seqs: Seqs[Sequence]) -> Callable[[], list[Step]]:
        """`prefill_all` of two seated prompts or more on the device; -> what reads the steps."""
        for seq in seqs:
            self.reserve(seq.slot, seq.prompt_len)
        lengths = [seq.prompt_len for seq in seqs]
        size = self._padded_together(max(lengths))
        assert size is not None, "`together` chose them"
        texts = [
            [*seq.tokens[:n], *[NO_GUESS] * (size - n)]
            for seq, n in zip(seqs, lengths, strict=True)
        ]
        rows = self._rows(texts, [0] * len(seqs), [seq.slot for seq in seqs])
        remember(self.cache.tokens, rows.tokens, rows.start, rows.slot)
        ends = torch.tensor([n - 1 for n in lengths], device=self.device)
        only = ends + size * torch.arange(len(seqs), device=self.device)
        out = self._graphs.prefill_all(rows, only) if self._graphs else self.short(rows, only)
        return partial(self._read_all, seqs, out, rows, ends)

    @torch.inference_mode()
    def _read_all(
        self, seqs: Seqs[Sequence], out: Hidden, rows: Rows, ends: torch.Tensor
    ) -> list[Step]:
        """The steps of prompts that end with the tokens numbered `ends` of their rows."""
        assert out.logits is not None
        lengths, size = [seq.prompt_len for seq in seqs], rows.tokens.shape[1]
        last = Rows(rows.tokens.gather(1, ends[:, None]), ends.int(), rows.slot)
        chosen, details = self._first_choices(seqs, out.logits, last)
        features = None if out.features is None else out.features.unflatten(0, (-1, size)).clone()
        return [
            Step(
                chosen[b : b + 1],
                None if features is None else features[b : b + 1, : lengths[b]],
                details and details.each(lambda part, b=b: part[b : b + 1]),
            )
            for b in range(len(seqs))
        ]

    def _chunk(
        self, rows: Rows, start: int, slot: int, ends: bool, room: torch.Tensor | None
    ) -> Iterator[Hidden | None]:
        """A chunk in parts. ends: the prompt ends here, so that logits are needed."""
        plan, tokens = self.plan, rows.tokens.shape[1]
        if start == 0 and tokens <= plan.first:
            yield from self._in_calls(rows, plan.first, room)
        elif tokens <= CALLS * plan.short or not self.ops.multiplies_whole:
            yield from self._in_calls(rows, plan.short, room)
        else:
            common = self.weights, self.arch, self.cache, PrefillChunk(rows.tokens[0], start, slot)
            yield from prefill(*common, self.ops, plan.features, ends)

    def _pictures(
        self,
        rows: Rows,
        start: int,
        slot: int,
        ends: bool,
        pictures: list[tuple[PlacedPicture, torch.Tensor]],
    ) -> Iterator[Hidden | None]:
        """A chunk with pictures: one call of decoding's kernels, or, where rings hold no such call,
        the library."""
        plan, tokens = self.plan, rows.tokens.shape[1]
        if tokens <= min(plan.chunk, plan.first if start == 0 else plan.short):
            return self._in_calls(self._seeing(rows, start, pictures), tokens)
        spans = tuple((placed.start - start, placed.stop - start) for placed, _ in pictures)
        seen = spans if self.arch.pictures_both_ways else ()
        chunk = PrefillChunk(rows.tokens[0], start, slot, spans=seen)
        common = self.weights, self.arch, self.cache, chunk, self.ops
        return prefill(*common, plan.features, ends, soft_rows(start, pictures))

    def _seeing(
        self, rows: Rows, start: int, pictures: list[tuple[PlacedPicture, torch.Tensor]]
    ) -> Rows:
        """A chunk [1, T] with what it has of its pictures."""
        tokens, placed = rows.tokens.shape[1], [each for each, _ in pictures]
        soft = pictures[0][1].new_zeros((tokens, self.arch.hidden))
        for each, own in pictures:
            soft[each.start - start : each.stop - start] = own
        if not self.arch.pictures_both_ways:
            return replace(rows, soft=soft)
        seen = sees_up_to(start, start + tokens, placed)
        reach = torch.tensor([seen], dtype=torch.int32, device=self.device)
        return replace(rows, soft=soft, reach=reach)

    def _in_calls(
        self, rows: Rows, size: int, room: torch.Tensor | None = None
    ) -> Iterator[Hidden | None]:
        """A chunk in parts; one with pictures is one. size: tokens of a call."""
        logits, features = None, self._room(rows.tokens.shape[1]) if room is None else room
        for number, tokens in enumerate(rows.tokens.split(size, 1)):
            if number:
                yield None
            out = self._call(replace(rows, tokens=tokens, start=rows.start + number * size))
            logits = out.logits
            if features is not None and out.features is not None:
                # a graph's own are the next one's too
                features[number * size :][: len(tokens[0])] = out.features
        assert logits is not None
        yield Hidden(logits, features)

    def _room(self, tokens: int) -> torch.Tensor | None:
        """For the features of so many tokens, if any are taken."""
        width = len(self.plan.features) * self.arch.hidden
        return torch.empty((tokens, width), device=self.device) if width else None

    def _call(self, rows: Rows) -> Hidden:
        """A call [1, T] of decoding's kernels -> logits of its last row; features of all."""
        if self._graphs:
            return self._graphs.prefill(rows)
        if rows.soft is None:
            return self.short(rows)
        tokens = rows.tokens.shape[1]
        logits, features = self.short(padded(rows), torch.tensor([tokens - 1], device=self.device))
        return Hidden(logits, None if features is None else features[:tokens])

    def prepare_prefill(self, start: int, stop: int) -> torch.Tensor | None:
        """Capture what `enqueued_parts` replays, and take room for its features: nothing may be
        captured, or allocated by the driver, while other cards wait for this one."""
        size = self.plan.first if start == 0 and stop <= self.plan.first else self.plan.short
        for first in range(start, stop, size):
            self._capture_prefill(1, min(size, stop - first))
        return self._room(stop - start)

    def prepare_all(self, seqs: Seqs[Sequence]) -> None:
        """The same for `enqueue_all`."""
        size = self._padded_together(max(seq.prompt_len for seq in seqs))
        assert size is not None, "`together` chose them"
        self._capture_prefill(len(seqs), size)

    def _capture_prefill(self, batch: int, tokens: int) -> None:
        if self._graphs:
            self._graphs.prefill_graph(idle_rows(batch, tokens, self.device))

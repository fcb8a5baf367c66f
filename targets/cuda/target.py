"""The CUDA target: weights, cache and operations behind `specdec.core.protocols.Target`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seqs
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from specdec.core.constraint import constrained, mask_rows
from specdec.core.errors import UserError
from specdec.core.pages import PagePlan
from specdec.core.pictures import PlacedPicture, SoftRows, sees_up_to, soft_rows, within
from specdec.core.types import MAX_DRAFT, NO_GUESS, Array, LogprobRows, Sequence, Step
from targets.arch import Arch
from targets.cuda import sampling
from targets.cuda.cache import make_cache, make_pages, remember, slack_of
from targets.cuda.exchange import silent
from targets.cuda.experts import are_sorted, kind_of, most_pairs
from targets.cuda.graphs import (
    TOGETHER,
    Chosen,
    ForwardOutput,
    GraphPool,
    Graphs,
    first_rows,
    idle_rows,
    padded,
    padded_together,
)
from targets.cuda.model import Hidden, decode
from targets.cuda.ops import Choosing, Ops, Rows
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.params import Weights, rounding
from targets.cuda.prefill import PrefillChunk, prefill
from targets.cuda.reference import Reference
from targets.cuda.sampling import blank_table
from targets.sampling_params import Rules, set_row
from targets.vision.rows import Encoder, SoftTokens, rows_of

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
ARITHMETIC = 2
"""Goes up where the same plan and weights give other bits than before, as receipts name them: 2 has
more lanes of keys in long texts' global layers with one or two K/V heads."""
CALLS = 3
"""Calls of decoding's kernels that are quicker than the library's matmuls, which read weights that
are put in order first, by more launches than the host has time for."""
FINE = 64
"""FP8 weights meet inputs of 16 bits in prefill chunks of up to so many tokens. More are bound by
arithmetic, and their inputs are rounded to 8 bits, as a long chunk's are."""

Masks = Callable[[], torch.Tensor | None]
"""Makes the masks of a step while the device computes its forward."""


@dataclass(frozen=True)
class Plan:
    """What a target is made for. dtype is one of reader.DTYPES, kv_dtype of KV_DTYPES."""

    slots: int
    max_len: int
    chunk: int
    """Tokens per prefill call; chunks are cut at its absolute multiples."""
    short: int
    """Tokens that one call of decoding's kernels prefills behind others; chunks of up to CALLS
    times as many run so, longer ones on the library."""
    first: int
    """Tokens that one call of decoding's kernels prefills where nothing is before them."""
    dtype: str
    kv_dtype: str
    features: tuple[int, ...]
    device: str
    own: Mapping[str, str] = field(default_factory=dict)
    """dtypes of weights, by name, that a file of 4 bits keeps otherwise."""
    correlation: float = 0.0
    """For random weights: correlation of rows' router logits (`targets.routing`)."""
    pages: PagePlan | None = field(default=None, repr=False)
    """None: each slot has room for the longest text. It changes no bit, so `identity` leaves it
    out."""

    @property
    def slack(self) -> int:
        """Extra cache entries."""
        return slack_of(self.chunk, self.short)

    @property
    def first_rows(self) -> int:
        """Rows of the longest call at a text's beginning."""
        return first_rows(self.first, self.chunk, self.max_len)

    @property
    def positions(self) -> int:
        """Positions that a call may compute, past its sequence's end included."""
        return max(self.max_len + self.slack, self.first_rows)


class CudaTarget:
    """One model on one device, with `plan.slots` sequences of up to `plan.max_len`.

    A row's result is the same at any width and beside any neighbours, so calls are fed what there
    is: the live sequences, K + 1 tokens each. Only graphs pad: the batch, and short prompts; calls
    with pictures always have a graph's size, beside which none was tried.
    """

    backend, max_draft = "cuda", MAX_DRAFT

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
        """graphs: replay captured CUDA graphs instead of launching kernel by kernel. encoder: of
        pictures; None: it takes none."""
        self.plan, self.arch, self.weights, self.ops = plan, arch, weights, ops
        self.slots, self.max_len, self.prefill_chunk = plan.slots, plan.max_len, plan.chunk
        self.vocab, self.dtype, self.kv_dtype = arch.vocab, plan.dtype, plan.kv_dtype
        self.suppress, self.device = suppress, torch.device(plan.device)
        self.soft_tokens = None if encoder is None else SoftTokens(encoder)
        self.vision = None if encoder is None else encoder.spec
        kv = KV_DTYPES[plan.kv_dtype]
        sizes = plan.slots, plan.max_len, plan.slack
        self.pages = make_pages(plan.pages, plan.slots, self.device)
        self.cache = make_cache(arch, *sizes, kv, plan.device, plan.first_rows, self.pages)
        self._rounding = rounding(weights) if plan.dtype == "fp8" else weights
        self._unbiased = torch.zeros(arch.vocab, device=self.device)
        self._unbiased[list(suppress)] = -torch.inf
        self.bias = self._unbiased.repeat(plan.slots, 1)
        self._biased: set[int] = set()
        self._loaded: set[tuple[int, int, bool]] = set()
        self.sampling_params = blank_table(plan.slots, plan.device)
        self.pool = GraphPool(self.device) if self.device.type == "cuda" else None
        self._graphs = Graphs(self.step, self.short, self.pool) if graphs and self.pool else None

    def share_pool(self, other: CudaTarget) -> None:
        """What is captured from now on lies where the other's graphs do: no result of either may
        then be read after any graph's next replay."""
        self.pool = other.pool
        if self._graphs and other.pool:
            self._graphs.pool = other.pool

    @property
    def capturable(self) -> bool:
        """Whether its operations can be captured in graphs: references read results on the host."""
        return not isinstance(self.ops, Reference)

    def prefill(self, seq: Sequence, start: int, stop: int) -> Step:
        *_, step = self.prefill_parts(seq, start, stop)
        assert step is not None
        return step

    @torch.inference_mode()
    def prefill_parts(self, seq: Sequence, start: int, stop: int) -> Iterator[Step | None]:
        for read in self.enqueued_parts(seq, start, stop):
            yield read and read()

    @torch.inference_mode()
    def enqueued_parts(
        self, seq: Sequence, start: int, stop: int
    ) -> Iterator[Callable[[], Step] | None]:
        """`prefill_parts` on the device; the last part's step is read by what is returned."""
        if start == 0:
            self.seat(seq)
        self.reserve(seq.slot, stop)
        with catching_oom(f"a chunk of {stop - start} tokens"):
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
            made = self._pictures(*chunk, pictures) if pictures else self._chunk(*chunk)
            for out in made:
                yield out and partial(self._read, seq, stop, rows, out, own)

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
            return self.enqueue_all(seqs)()

    @torch.inference_mode()
    def enqueue_all(self, seqs: Seqs[Sequence]) -> Callable[[], list[Step]]:
        """`prefill_all` of two prompts or more on the device; -> what reads the steps."""
        for seq in seqs:
            self.seat(seq)
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

    def _chunk(self, rows: Rows, start: int, slot: int, ends: bool) -> Iterator[Hidden | None]:
        """A chunk in parts. ends: the prompt ends here, so that logits are needed."""
        plan, tokens = self.plan, rows.tokens.shape[1]
        if start == 0 and tokens <= plan.first:
            yield from self._in_calls(rows, plan.first)
        elif tokens <= CALLS * plan.short or not self.ops.multiplies_whole:
            yield from self._in_calls(rows, plan.short)
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

    def _in_calls(self, rows: Rows, size: int) -> Iterator[Hidden | None]:
        """A chunk in parts; one with pictures is one. size: tokens of a call."""
        logits, features = None, []
        for number, tokens in enumerate(rows.tokens.split(size, 1)):
            if number:
                yield None
            out = self._call(replace(rows, tokens=tokens, start=rows.start + number * size))
            logits = out.logits
            if out.features is not None:
                features.append(out.features.clone())  # a graph's own are the next one's too
        assert logits is not None
        yield Hidden(logits, torch.cat(features) if features else None)

    def _call(self, rows: Rows) -> Hidden:
        """A call [1, T] of decoding's kernels -> logits of its last row; features of all."""
        if self._graphs:
            return self._graphs.prefill(rows)
        if rows.soft is None:
            return self.short(rows)
        tokens = rows.tokens.shape[1]
        logits, features = self.short(padded(rows), torch.tensor([tokens - 1], device=self.device))
        return Hidden(logits, None if features is None else features[:tokens])

    def prepare_prefill(self, start: int, stop: int) -> None:
        """Capture what `enqueued_parts` replays: nothing may be captured, or allocated by the
        driver, while other cards wait for this one."""
        size = self.plan.first if start == 0 and stop <= self.plan.first else self.plan.short
        for first in range(start, stop, size):
            self._capture_prefill(1, min(size, stop - first))

    def prepare_all(self, seqs: Seqs[Sequence]) -> None:
        """The same for `enqueue_all`."""
        size = self._padded_together(max(seq.prompt_len for seq in seqs))
        assert size is not None, "`together` chose them"
        self._capture_prefill(len(seqs), size)

    def prepare_verify(self, seqs: Seqs[Sequence], draft: Array) -> None:
        """The same for `enqueued_verify`; what is not captured runs once for nothing, as the driver
        loads kernels when they are first launched."""
        shape, needs_sampler = (len(seqs), draft.shape[1] + 1), sampler_needed(seqs)
        if constrained(seqs) or not self._graphs:
            self.prepare_forward(*shape, needs_sampler)
            return
        rows = idle_rows(*shape, self.device)
        self._graphs.step_graph(rows, needs_sampler, logprobs_wanted(seqs))

    def prepare_forward(self, batch: int, tokens: int, needs_sampler: bool) -> None:
        """The same for `forward`."""
        shape = batch, tokens, needs_sampler
        if shape not in self._loaded:
            with silent():
                self.forward(idle_rows(batch, tokens, self.device), needs_sampler)
            self._loaded.add(shape)

    def _capture_prefill(self, batch: int, tokens: int) -> None:
        if self._graphs:
            self._graphs.prefill_graph(idle_rows(batch, tokens, self.device))

    def verify(self, seqs: Seqs[Sequence], draft: Array) -> Step:
        if draft.shape[1] > self.max_draft:
            raise UserError(f"K is {draft.shape[1]} but at most {self.max_draft} is possible")
        with catching_oom(f"a batch of {len(seqs)}"):
            *_, out = self.enqueued_verify(seqs, draft)
            assert out is not None
            return read_step(out)

    def enqueued_verify(self, seqs: Seqs[Sequence], draft: Array) -> Iterator[Chosen | None]:
        """`verify` on the device: None once the forward is enqueued whose choice waits for masks,
        and at last the result."""
        needs_sampler, logprobs = sampler_needed(seqs), logprobs_wanted(seqs)
        rows = self.feed(seqs, draft)
        if not constrained(seqs):
            yield (self._graphs or self).step(rows, needs_sampler, logprobs)
            return
        logits, features = self.logits(rows)
        yield None
        masks = self.on_device(mask_rows(seqs, draft, self.vocab))
        chosen = self.choose(logits, rows, needs_sampler, masks)
        yield Chosen(chosen, self._details(logits, chosen, rows) if logprobs else None, features)

    def feed(self, seqs: Seqs[Sequence], draft: Array) -> Rows:
        """Each sequence's last token and its draft [B, k], as `forward` takes them."""
        draft = np.asarray(draft)
        for seq in seqs:
            self.reserve(seq.slot, len(seq.tokens))
        tokens = [[seq.tokens[-1], *row] for seq, row in zip(seqs, draft, strict=True)]
        starts = [len(seq.tokens) - 1 for seq in seqs]
        return self._rows(tokens, starts, [seq.slot for seq in seqs])

    def draft_rows(self, seqs: Seqs[Sequence], k: int) -> Rows:
        """Each sequence's last token, and k places for guesses. The token is written to the history
        here, although it is fed only with the guesses: penalties on these count it."""
        rows = self.feed(seqs, np.full((len(seqs), k), NO_GUESS, np.int32))
        remember(self.cache.tokens, rows.tokens[:, :1], rows.start, rows.slot)
        return rows

    @torch.inference_mode()
    def step(
        self, rows: Rows, needs_sampler: bool, logprobs: bool, masks: Masks | None = None
    ) -> Chosen:
        """Feed the rows and choose; return what a cycle needs."""
        bare = masks is None and not logprobs  # logits serve the choice alone
        logits, features = self.logits(rows, Choosing(self.rules, needs_sampler) if bare else None)
        allowed = None if masks is None else masks()
        chosen = self.choose(logits, rows, needs_sampler, allowed)
        details = self._details(logits, chosen, rows) if logprobs else None
        return Chosen(chosen, details, features)

    @torch.inference_mode()
    def forward(self, rows: Rows, needs_sampler: bool) -> ForwardOutput:
        """Feed the rows and choose. Works on the device alone and never waits for it (with the
        kernels, that is), so that it can be captured as a graph."""
        logits, features = self.logits(rows)
        return ForwardOutput(self.choose(logits, rows, needs_sampler), logits, features)

    @torch.inference_mode()
    def logits(
        self, rows: Rows, choosing: Choosing | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feed the rows -> logits [B, T, V] and features [B, T, F] or None, on the device alone.
        choosing: as in `model.decode`."""
        common = self.weights, self.arch, self.cache, rows, self.ops
        out = decode(*common, self.plan.features, choosing=choosing, remembers=True)
        assert out.logits is not None, "of all rows"
        shape = (*rows.tokens.shape, -1)
        return out.logits.view(shape), None if out.features is None else out.features.view(shape)

    @torch.inference_mode()
    def short(self, rows: Rows, only: torch.Tensor | None = None) -> Hidden:
        """A prefill call [B, T] like a verify; logits of rows `only` [B], or of one's last."""
        tokens = rows.tokens.shape[1]
        if only is None:
            only = torch.tensor([tokens - 1], device=self.device)
        weights = self._rounding if tokens > FINE else self.weights
        common = weights, self.arch, self.cache, rows, self.ops
        return decode(*common, self.plan.features, only)

    @torch.inference_mode()
    def choose(
        self,
        logits: torch.Tensor,
        rows: Rows,
        needs_sampler: bool,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """logits [B, T, V] -> [B, T] int32. `needs_sampler` False: every row is a bare argmax.
        masks [B, T, words] int32: what may be chosen."""
        return self.ops.choose(logits, self.rules, rows, needs_sampler, masks)

    def _details(self, logits: torch.Tensor, chosen: torch.Tensor, rows: Rows) -> LogprobRows:
        """Of what `choose` chose for these rows."""
        return sampling.logprobs(logits, chosen, self.rules, rows.slot)

    @property
    def rules(self) -> Rules:
        """By what its slots choose."""
        return Rules(self.bias, self.sampling_params, self.cache.tokens)

    def on_device(self, masks: np.ndarray | None) -> torch.Tensor | None:
        """Masks of the host, in the dtype that torch has."""
        return None if masks is None else torch.from_numpy(masks.view(np.int32)).to(self.device)

    @property
    def identity(self) -> str:
        """What fixes the bits that it computes, beside its weights."""
        return f"{self.plan} {self.arch} arithmetic {ARITHMETIC}"

    def reserve(self, slot: int, tokens: int) -> None:
        """Have room for the slot's text of so many tokens. The engine has done so before; other
        callers, which feed slots by themselves, get theirs here. Raises MemoryError."""
        if self.pages is not None and not self.pages.reserve(slot, tokens):
            raise MemoryError(f"no pages are left for a text of {tokens} tokens: use fewer at once")

    def release(self, slots: Iterable[int]) -> None:
        """These slots' texts are gone."""
        if self.pages is not None:
            for slot in slots:
                self.pages.release(slot)

    def seat(self, seq: Sequence) -> None:
        """Take over a new owner's sampling parameters for its slot. Raises UserError for token
        ids that this model does not have."""
        seq.check_ids(self.vocab)
        params, slot = seq.sampling, seq.slot
        set_row(self.sampling_params, slot, params, seq.prompt_len)
        if params.logit_bias or slot in self._biased:
            row = self._unbiased.clone()
            for token, bias in params.logit_bias:
                row[token] += bias
            self.bias[slot] = row
            self._biased = self._biased | {slot} if params.logit_bias else self._biased - {slot}

    def _rows(self, tokens: list[list[int]], start: list[int], slot: list[int]) -> Rows:
        packed = (torch.from_numpy(np.array(a, np.int32)) for a in (tokens, start, slot))
        return Rows(*(a.to(self.device) for a in packed))


def sampler_needed(seqs: Seqs[Sequence]) -> bool:
    """Whether any row's choice is more than an argmax."""
    return any(seq.sampling.needs_sampler for seq in seqs)


def logprobs_wanted(seqs: Seqs[Sequence]) -> bool:
    return any(seq.sampling.logprobs is not None for seq in seqs)


def read_step(out: Chosen) -> Step:
    """Wait for a step's results."""
    details = out.details and sampling.on_host(out.details)
    return Step(out.chosen.cpu().numpy(), out.features, details)

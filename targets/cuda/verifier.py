"""Verifying: the weights, the cache and the choice of a batch's rows on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence as Seqs

import numpy as np
import torch

from specdec.core.constraint import constrained, mask_rows
from specdec.core.errors import UserError
from specdec.core.types import MAX_DRAFT, NO_GUESS, Array, LogprobRows, Sequence, Step
from targets.arch import Arch
from targets.cuda import sampling
from targets.cuda.cache import make_cache, make_pages, remember
from targets.cuda.exchange import silent
from targets.cuda.graphs import Chosen, ForwardOutput, GraphPool, Graphs, idle_rows
from targets.cuda.model import Hidden, decode
from targets.cuda.ops import Choosing, Ops, Rows
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.params import Weights, rounding
from targets.cuda.plan import ARITHMETIC, FINE, KV_DTYPES, Plan
from targets.cuda.reference import Reference
from targets.cuda.sampling import blank_table
from targets.sampling_params import Rules, set_row

Masks = Callable[[], torch.Tensor | None]
"""Makes the masks of a step while the device computes its forward."""


class CudaVerifier:
    """A model's weights and cache on one device, with `plan.slots` sequences of up to
    `plan.max_len`: what a cycle needs of a target.

    A row's result is the same at any width and beside any neighbours, so calls are fed what there
    is: the live sequences, K + 1 tokens each. Only graphs pad the batch.
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
    ) -> None:
        """graphs: replay captured CUDA graphs instead of launching kernel by kernel."""
        self.plan, self.arch, self.weights, self.ops = plan, arch, weights, ops
        self.slots, self.max_len = plan.slots, plan.max_len
        self.vocab, self.dtype, self.kv_dtype = arch.vocab, plan.dtype, plan.kv_dtype
        self.suppress, self.device = suppress, torch.device(plan.device)
        kv = KV_DTYPES[plan.kv_dtype]
        sizes = plan.slots, plan.max_len, plan.slack
        self.pages = make_pages(plan.pages, plan.slots, self.device)
        self.cache = make_cache(arch, *sizes, kv, plan.device, plan.first_rows, self.pages)
        self._rounding = rounding(weights) if plan.dtype == "fp8" else weights
        self._unbiased = np.zeros(arch.vocab, np.float32)
        self._unbiased[list(suppress)] = -np.inf
        self.bias = torch.from_numpy(self._unbiased).to(self.device).repeat(plan.slots, 1)
        self._biased: set[int] = set()
        self._loaded: set[tuple[int, int, bool]] = set()
        self.sampling_params = blank_table(plan.slots, plan.device)
        self.pool = GraphPool(self.device) if self.device.type == "cuda" else None
        self._graphs = Graphs(self.step, self.short, self.pool) if graphs and self.pool else None

    def share_pool(self, other: CudaVerifier) -> None:
        """What is captured from now on lies where the other's graphs do: no result of either may
        then be read after any graph's next replay."""
        self.pool = other.pool
        if self._graphs and other.pool:
            self._graphs.pool = other.pool

    @property
    def capturable(self) -> bool:
        """Whether its operations can be captured in graphs: references read results on the host."""
        return not isinstance(self.ops, Reference)

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

    @catching_oom("a request's sampling parameters")
    def seat(self, seq: Sequence) -> None:
        """Take over a new owner's sampling parameters for its slot. Raises UserError for token
        ids that this model does not have."""
        seq.check_ids(self.vocab)
        params, slot = seq.sampling, seq.slot
        set_row(self.sampling_params, slot, params, seq.prompt_len)
        if params.logit_bias or slot in self._biased:
            self.bias[slot] = torch.from_numpy(_biased(self._unbiased, params.logit_bias))
            self._biased = self._biased | {slot} if params.logit_bias else self._biased - {slot}

    def _rows(self, tokens: list[list[int]], start: list[int], slot: list[int]) -> Rows:
        packed = (torch.from_numpy(np.array(a, np.int32)) for a in (tokens, start, slot))
        return Rows(*(a.to(self.device) for a in packed))


def _biased(unbiased: np.ndarray, biases: Seqs[tuple[int, float]]) -> np.ndarray:
    """On the host: there may be as many as there are words."""
    row, pairs = unbiased.copy(), np.array(biases, np.float64).reshape(-1, 2)
    np.add.at(row, pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.float32))
    return row


def sampler_needed(seqs: Seqs[Sequence]) -> bool:
    """Whether any row's choice is more than an argmax."""
    return any(seq.sampling.needs_sampler for seq in seqs)


def logprobs_wanted(seqs: Seqs[Sequence]) -> bool:
    return any(seq.sampling.logprobs is not None for seq in seqs)


def read_step(out: Chosen) -> Step:
    """Wait for a step's results."""
    details = out.details and sampling.on_host(out.details)
    return Step(out.chosen.cpu().numpy(), out.features, details)

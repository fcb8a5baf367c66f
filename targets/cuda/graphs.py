"""Captured forwards: one CUDA graph per batch bucket, width and kind of choice.

A graph launches some 550 kernels in one go, and it keeps the early starts between them. Rows are
exact at any batch and width, so a call is simply padded to its bucket with idle rows.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import torch

from specdec.core.types import NO_GUESS, LogprobRows
from targets.cuda.exchange import silent
from targets.cuda.launch import keep_stacks_small
from targets.cuda.model import Hidden
from targets.cuda.ops import Rows

MOST_ROWS = 512
"""Largest batch that is captured."""
BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, *range(192, MOST_ROWS + 1, 64))
"""Batches that are captured. Up to 16 rows a step reads the weights and little else: twice the rows
cost next to nothing. From there on they are computed for, block of 64 tokens by block, so buckets
lie closer together. Not closer still: a server captures each, once per kind of choice, before its
first request."""
TOKENS = (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024)
"""Prefill calls of decoding's kernels are padded to these: what lies beyond their end is never
read."""


Result = TypeVar("Result")


TOGETHER = 1024
"""Tokens, padding included, of several prompts that one call prefills."""
TOKENS_TOGETHER = (16, 64, 128, 256, 512)
"""What each of them is padded to: there is a graph for each of these and each power of two."""


def padded_together(tokens: int) -> int | None:
    """The same where several prompts are prefilled at once; None for a long one."""
    return next((size for size in TOKENS_TOGETHER if tokens <= size), None)


def padded_tokens(tokens: int) -> int:
    """Tokens that a prefill call is padded to."""
    return next(size for size in TOKENS if tokens <= size)


def padding_of(tokens: int) -> int:
    """Most rows by which calls of up to so many tokens are padded."""
    sizes = [0, *(size for size in TOKENS if size <= tokens)]
    return max(after - before for before, after in pairwise(sizes))


def first_rows(first: int, chunk: int, max_len: int) -> int:
    """Rows of the longest call at a text's beginning. first: as in `Plan`."""
    longest = min(first, chunk, max_len)
    return padded_tokens(longest) if longest else 0


def prompt_graphs(slots: int, first: int) -> list[tuple[int, int]]:
    """The graphs that read a prompt, or several, by their number and what each is padded to. first:
    as `first_rows`."""
    counts = [1 << i for i in range(1, (slots - 1).bit_length() + 1)]
    together = [(n, size) for size in TOKENS_TOGETHER for n in counts if n * size <= TOGETHER]
    return [(n, size) for n, size in [(1, size) for size in TOKENS] + together if size <= first]


def bucket_of(rows: int) -> int:
    """Rows that a batch is padded to; beyond the largest nothing is captured."""
    return next((bucket for bucket in BUCKETS if rows <= bucket), rows)


class ForwardOutput(NamedTuple):
    """chosen [B, T] int32; logits [B, T, V] float32, soft-capped; features [B, T, F] or None."""

    chosen: torch.Tensor
    logits: torch.Tensor
    features: torch.Tensor | None


class Chosen(NamedTuple):
    """A step's results: chosen [B, T] int32; log-probabilities if they were requested; features.
    Not the logits: a graph's results stay in memory, and every graph has its own."""

    chosen: torch.Tensor
    details: LogprobRows | None
    features: torch.Tensor | None


class GraphPool:
    """Memory that graphs share: no two of them run at the same time.

    An empty graph holds it. torch counts the graphs of a pool: once its last one is gone, and part
    of the memory is not, it refuses to capture there.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._holder = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            number = torch.cuda.current_device()
            keep_stacks_small(number)  # a graph that was captured before would fail
            side = _side_stream(number)
            with _quiet(), torch.cuda.graph(self._holder, self.handle, side):
                pass


class Captured(Generic[Result]):
    """A function of device tensors as a graph; its result's tensors are the same at each replay."""

    def __init__(self, function: Callable[[], Result], pool: GraphPool) -> None:
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), silent():
            function()  # warm: nothing may be allocated by libraries or compiled in a capture
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # torch's own stream for captures is the first GPU's
        with _quiet(), torch.cuda.graph(self._graph, pool.handle, side), no_collection():
            self.result = function()

    def replay(self) -> Result:
        self._graph.replay()
        return self.result


class CapturedParts(Generic[Result]):
    """A function of device tensors as several graphs: it is given `cut`, which ends one and begins
    the next. The host may work between two, and put in place what the next one reads."""

    def __init__(self, function: Callable[[Callable[[], None]], Result], pool: GraphPool) -> None:
        side, self._pool = _side_stream(torch.cuda.current_device()), pool
        self.parts: list[torch.cuda.CUDAGraph] = []
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            with silent():
                function(lambda: None)  # warm, as in `Captured`
            torch.cuda.synchronize()
            with _quiet(), no_collection():
                self._begin()
                self.result = function(self._cut)
                self.parts[-1].capture_end()
        torch.cuda.current_stream().wait_stream(side)

    def _begin(self) -> None:
        self.parts.append(torch.cuda.CUDAGraph())
        self.parts[-1].capture_begin(pool=self._pool.handle)

    def _cut(self) -> None:
        self.parts[-1].capture_end()
        self._begin()


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all of a GPU: torch keeps freed memory for the stream that it was taken on."""
    return torch.cuda.Stream(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's warning of an empty graph: it comes with the error of a capture that fails
    before its first kernel."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """Freeing what an older engine left behind talks to the device, which a capture forbids,
    and waits for a card that may itself wait for another one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Graphs:
    """The target's steps and short chunks, captured when a shape is first met."""

    def __init__(
        self,
        step: Callable[[Rows, bool, bool], Chosen],
        short: Callable[[Rows, torch.Tensor], Hidden],
        pool: GraphPool,
    ) -> None:
        self._step, self._short, self.pool = step, short, pool
        self._steps: dict[tuple[int, int, bool, bool], tuple[Rows, Captured[Chosen]]] = {}
        self._prefills: dict[
            tuple[int, int, bool, bool], tuple[Rows, torch.Tensor, Captured[Hidden]]
        ] = {}

    def step(self, rows: Rows, needs_sampler: bool, logprobs: bool) -> Chosen:
        """As `CudaTarget.step`; the result is valid until the next call."""
        batch = len(rows.tokens)
        feed, graph = self.step_graph(rows, needs_sampler, logprobs)
        _fill(feed, rows)
        out = graph.replay()
        kept = None if out.features is None else out.features[:batch]
        details = out.details and out.details.each(lambda part: part[:batch])
        return Chosen(out.chosen[:batch], details, kept)

    def step_graph(
        self, rows: Rows, needs_sampler: bool, logprobs: bool
    ) -> tuple[Rows, Captured[Chosen]]:
        """What it feeds, and the graph."""
        batch, tokens = rows.tokens.shape
        bucket = bucket_of(batch)
        key = bucket, tokens, needs_sampler, logprobs
        if key not in self._steps:
            idle = idle_rows(bucket, tokens, rows.tokens.device)
            captured = Captured(lambda: self._step(idle, needs_sampler, logprobs), self.pool)
            self._steps[key] = idle, captured
        return self._steps[key]

    def prefill(self, rows: Rows) -> Hidden:
        """As `CudaTarget.short` of a chunk [1, T]; the result is valid until the next call."""
        tokens = rows.tokens.shape[1]
        only = rows.start.new_full((1,), tokens - 1)
        logits, features = self._prefill(rows, only)
        return Hidden(logits, None if features is None else features[:tokens])

    def prefill_all(self, rows: Rows, only: torch.Tensor) -> Hidden:
        """The same of prompts [B, T], T one of TOKENS_TOGETHER: logits [B, V] of the rows `only`
        [B], one of each; features [B * T, F]."""
        batch, tokens = rows.tokens.shape
        logits, features = self._prefill(rows, only)
        assert logits is not None
        return Hidden(logits[:batch], None if features is None else features[: batch * tokens])

    def _prefill(self, rows: Rows, only: torch.Tensor) -> Hidden:
        feed, fed, graph = self.prefill_graph(rows)
        _fill(feed, rows)
        fed[: len(only)] = only
        return graph.replay()

    def prefill_graph(self, rows: Rows) -> tuple[Rows, torch.Tensor, Captured[Hidden]]:
        """What it feeds, the rows whose logits it computes, and the graph: padded to one of TOKENS,
        and to a power of two prompts; with pictures, if these rows have some."""
        batch = 1 << (len(rows.tokens) - 1).bit_length()
        tokens = padded_tokens(rows.tokens.shape[1])
        key = batch, tokens, rows.soft is not None, rows.reach is not None
        if key not in self._prefills:
            idle = _idle_like(rows, batch, tokens)
            firsts = torch.arange(0, idle.tokens.numel(), tokens, device=rows.tokens.device)
            captured = Captured(lambda: self._short(idle, firsts), self.pool)
            self._prefills[key] = idle, firsts, captured
        return self._prefills[key]


def idle_rows(batch: int, tokens: int, device: torch.device) -> Rows:
    """Rows that store nothing: what a graph is captured with, and padded with."""

    def make(value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    return Rows(make(NO_GUESS, batch, tokens), make(0, batch), make(-1, batch))


def padded(rows: Rows) -> Rows:
    """A chunk [1, T] as a graph is fed with it."""
    feed = _idle_like(rows, 1, padded_tokens(rows.tokens.shape[1]))
    _fill(feed, rows)
    return feed


def _idle_like(rows: Rows, batch: int, tokens: int) -> Rows:
    """`idle_rows`, with room for what these have of pictures."""
    idle = idle_rows(batch, tokens, rows.tokens.device)
    if rows.soft is None:
        return idle
    soft = rows.soft.new_zeros((batch * tokens, rows.soft.shape[1]))
    reach = None if rows.reach is None else torch.zeros_like(idle.tokens)
    return replace(idle, soft=soft, reach=reach)


def _fill(feed: Rows, rows: Rows) -> None:
    batch, tokens = rows.tokens.shape
    feed.tokens[:batch, :tokens] = rows.tokens
    feed.tokens[:batch, tokens:] = NO_GUESS
    feed.start[:batch] = rows.start
    feed.slot[:batch] = rows.slot
    feed.slot[batch:] = -1
    if feed.soft is not None and rows.soft is not None:  # of one sequence
        feed.soft[:tokens] = rows.soft
    if feed.reach is not None and rows.reach is not None:
        places = torch.arange(feed.tokens.shape[1], device=feed.tokens.device)
        feed.reach[:] = feed.start[:, None] + places  # padding sees itself, and is no NaN
        feed.reach[:batch, :tokens] = rows.reach

"""What a long prefill chunk is made of between its layers' structure (`prefill.py`) and the
arithmetic: `prefill_reference.PrefillReference` in plain torch, `prefill_kernels.PrefillKernels` on
a Hopper GPU.

Shape legend: T tokens of the chunk, H hidden, S keys, K kv heads, D head_dim, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from targets.cuda.ops import NOTHING, AttentionLayer, Closing, Dense, Opening, Rows

Pair = tuple[Tensor, Tensor]
"""k, v [S, K, D]: all that a chunk's queries may see in one layer; S may be padded."""


@dataclass(frozen=True)
class PrefillChunk:
    """tokens [T] int32 on the device, at positions start .. start + T - 1 of `slot`. whole: the
    start of the chunk that this is the end of, from whose keys on it attends. spans: rows first
    .. stop - 1 that see each other on sliding layers (pictures), in order and apart."""

    tokens: Tensor
    start: int
    slot: int
    whole: int | None = None
    spans: tuple[tuple[int, int], ...] = ()

    def oldest(self, window: int | None) -> int:
        """The first position that the (whole) chunk's first query sees."""
        start = self.start if self.whole is None else self.whole
        return 0 if window is None else max(0, start - window + 1)

    def end(self, tokens: int) -> PrefillChunk:
        """Its last tokens, that many at most."""
        skipped = max(0, len(self.tokens) - tokens)
        left = ((max(0, first - skipped), stop - skipped) for first, stop in self.spans)
        spans = tuple(span for span in left if span[1] > 0)
        tokens_left, start = self.tokens[skipped:], self.start + skipped
        return PrefillChunk(tokens_left, start, self.slot, self.start, spans)

    def pieces(self, window: int | None) -> list[tuple[int, int, bool]]:
        """Its rows first .. stop - 1 in pieces, and whether the rows of a piece see each other: all
        in one that don't, but on sliding layers with pictures."""
        found, last = [], 0
        for first, stop in self.spans if window is not None else ():
            if first > last:
                found.append((last, first, False))
            found.append((first, stop, True))
            last = stop
        if last < len(self.tokens):
            found.append((last, len(self.tokens), False))
        return found

    def as_rows(self) -> Rows:
        """As a call of one sequence."""
        start, slot = (self.tokens.new_full((1,), value) for value in (self.start, self.slot))
        return Rows(self.tokens[None], start, slot)


class PrefillInput(NamedTuple):
    """A linear layer's input: values [T, k], bf16, e4m3 with a scale [T], or for 4-bit weights
    float16 of value / 32."""

    values: Tensor
    scale: Tensor | None

    def part(self, rows: slice) -> PrefillInput:
        return PrefillInput(self.values[rows], None if self.scale is None else self.scale[rows])

    def rows(self, index: Tensor) -> PrefillInput:
        """Rows by number, as bytes: torch can't index e4m3 everywhere."""
        flat = self.values.view(torch.uint8)[index].view(self.values.dtype)
        return PrefillInput(flat, None if self.scale is None else self.scale[index])


class Steps(Protocol):
    def add_norm(self, h: Tensor, opening: Opening, closing: Closing = NOTHING) -> PrefillInput:
        """`Ops.norm` of h [T, H] float32."""
        ...

    def matmul(self, x: PrefillInput, weight: Dense) -> Tensor:
        """x times weight values [n, k] (times scale [n]) -> [T, n]."""
        ...

    def grouped(self, x: PrefillInput, ends: Tensor, weight: Dense) -> Tensor:
        """Rows sorted by expert, each times its own expert's weight: values [E, n, k], scale
        [E, n], ends [E] int32: where each expert's rows end -> [rows, n]."""
        ...

    def gate_up(
        self, x: PrefillInput, parts: Iterator[tuple[slice, Dense]], width: int, kind: str
    ) -> PrefillInput:
        """`gated` of x times a weight of `width` features. parts: its `Ops.dense_parts`."""
        ...

    def gated(self, gate_up: Tensor, kind: str) -> PrefillInput:
        """gelu_tanh(gate) * up of [T, 2 * width]."""
        ...

    def exchange(self, qkv: Tensor, layer: AttentionLayer) -> Pair:
        """Norm and rotate the chunk's new keys and values, round them as the cache does, store
        them (of a ring's no more than it holds), and return them behind what the cache had for
        the first query."""
        ...

    def attend(self, qkv: Tensor, layer: AttentionLayer, pair: Pair, kind: str) -> PrefillInput:
        """Norm and rotate the queries; attend to the pair, the chunk's own keys being its last."""
        ...

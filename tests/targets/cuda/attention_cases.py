"""Layers of attention with a filled cache, for kernels on a card and emulated ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from targets.arch import Arch, LayerSpec, released
from targets.cuda import attention
from targets.cuda.cache import make_cache, read
from targets.cuda.formulas import inverse_frequencies, rotate
from targets.cuda.inputs import Input
from targets.cuda.ops import AttentionLayer, Rows
from tests.targets.cuda.card import randn, rows_of

POSITIONS = 1536

Attend = Callable[[torch.Tensor, AttentionLayer, Rows, str], Input]
"""`Ops.attention`."""


def one_layer_of(layer: LayerSpec) -> Arch:
    return replace(released("gemma-4-31b"), layers=(layer,))


def make_alone(patch: pytest.MonkeyPatch, most: int) -> None:
    """Up to so many vectors of a CTA `split` makes itself."""
    for limit in ("UNPREPARED_VECTORS", "UNPREPARED_VECTORS_WIDE", "UNPREPARED_VECTORS_WIDE_MANY"):
        patch.setattr(attention, limit, most)


class Case:
    """A layer with a filled cache of a sequence per start, and random norms."""

    def __init__(
        self,
        layer: LayerSpec,
        kv: torch.dtype,
        starts: list[int],
        attend: Attend,
        device: str,
        positions: int = POSITIONS,
    ) -> None:
        """attend: of kernels for `one_layer_of(layer)` and so many positions."""
        self.layer, self.starts, self._attend, self._device = layer, starts, attend, device
        self.picture: tuple[int, int] | None = None
        """Tokens first .. stop - 1 of each sequence of a call see each other."""
        arch = one_layer_of(layer)
        self._eps = arch.eps
        cache = make_cache(arch, len(starts), positions, 128, kv, device).layers[0]
        assert cache is not None
        self.cache = cache
        self.fill()
        self.q_norm, self.k_norm = (1 + 0.1 * self._drawn(layer.head_dim, seed=s) for s in (2, 3))

    def _drawn(self, *shape: int, seed: int) -> torch.Tensor:
        return randn(*shape, seed=seed, device=self._device)

    def fill(self) -> None:
        for seed, part in enumerate((self.cache.k, self.cache.v)):
            part.copy_(self._drawn(*part.shape, seed=seed).to(part.dtype))

    def qkv(self, tokens: int) -> torch.Tensor:
        vectors = self.layer.heads + self.layer.kv_heads * (1 if self.layer.k_eq_v else 2)
        size = len(self.starts) * tokens, vectors * self.layer.head_dim
        return 2 * self._drawn(*size, seed=tokens)

    def rows(self, tokens: int, start: list[int], slot: list[int]) -> Rows:
        def ints(v):
            return torch.tensor(v, dtype=torch.int32, device=self._device)

        rows = Rows(ints([[0] * tokens] * len(start)), ints(start), ints(slot))
        if self.picture is None or tokens < self.picture[1]:
            return rows
        return replace(
            rows, reach=ints([[s + self.reach(t) for t in range(tokens)] for s in start])
        )

    def reach(self, token: int) -> int:
        """The last token of its sequence that a token of a call sees."""
        if self.picture is None or not self.picture[0] <= token < self.picture[1]:
            return token
        return self.picture[1] - 1

    def call(self, qkv: torch.Tensor, rows: Rows) -> torch.Tensor:
        layer = AttentionLayer(self.layer, self.cache, self.q_norm, self.k_norm)
        x = self._attend(qkv, layer, rows, "fp8")
        return rows_of(x, self.layer.heads * self.layer.head_dim, "fp8")

    def all_together(self, tokens: int) -> torch.Tensor:
        slots = list(range(len(self.starts)))
        return self.call(self.qkv(tokens), self.rows(tokens, self.starts, slots))

    def alone(self, row: int, tokens: int) -> torch.Tensor:
        """A row of a call of so many tokens each, as a call of its own."""
        slot = row // tokens
        one = self.rows(1, [self.starts[slot] + row % tokens], [slot])
        return self.call(self.qkv(tokens)[row : row + 1], one)

    def stored(self) -> list[torch.Tensor]:
        return [part.clone().view(torch.uint8) for part in (self.cache.k, self.cache.v)]

    def exact(self, tokens: int) -> torch.Tensor:
        """float64 over what the cache holds, but for the angles, which are float32 in both
        targets: far out they are rounded by hundredths."""
        layer = self.layer
        inverse = inverse_frequencies(layer.rope, layer.head_dim, self._device)
        out = []
        for row, values in enumerate(self.qkv(tokens).double()):
            slot, position = row // tokens, self.starts[row // tokens] + row % tokens
            oldest = max(0, position - layer.window + 1) if layer.window else 0
            newest = self.starts[slot] + self.reach(row % tokens)
            newest = self.starts[slot] + tokens - 1 if layer.both_ways else newest
            k, v = read(self.cache, slot, oldest, newest + 1)
            q = values[: layer.heads * layer.head_dim].view(layer.kv_heads, -1, layer.head_dim)
            q = q * (q.square().mean(-1, keepdim=True) + self._eps).rsqrt() * self.q_norm.double()
            angles = (position * inverse).double()
            for queries, own_k, own_v in zip(rotate(q, angles), k, v, strict=True):
                shares = (queries @ own_k.double().T).softmax(-1)
                out.append((shares @ own_v.double()).flatten())
        return torch.cat(out).view(-1, layer.heads * layer.head_dim)

"""On the card: attention's rows are bitwise the rows alone, whichever kernels serve them, and near
what float64 says."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from targets.arch import LayerSpec, Rope, released
from targets.cuda import attention
from targets.cuda.cache import LayerCache, make_cache, read
from targets.cuda.formulas import inverse_frequencies, rotate
from targets.cuda.kernels import Kernels
from targets.cuda.ops import AttentionLayer, Rows
from tests.card import KINDS, Differences, error, randn, rows_of

pytestmark = pytest.mark.gpu

SLIDING = LayerSpec(1024, 32, 16, 256, Rope(1e4, 128), False, None, 256, None)
GLOBAL = LayerSpec(None, 32, 4, 512, Rope(1e6, 64), True, None, 256, None)
LONE = LayerSpec(None, 16, 1, 512, Rope(1e6, 64), True, None, 256, None)
UNEQUAL = LayerSpec(512, 8, 2, 256, Rope(1e4, 128), False, None, 256, None)
ODD = LayerSpec(20, 4, 2, 16, Rope(1e4, 8), False, None, 256, None)
LAYERS = [SLIDING, GLOBAL, LONE, UNEQUAL, ODD]
STARTS = [0, 1, 63, 119, 120, 121, 126, 127, 128, 129, 255, 256, 511, 1020, 1023, 1151, 1152, 1405]
"""Around edges of chunks, of windows, and where rings wrap."""
ATTENTION = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 2e-3}
"""Queries and shares have 8 bits beside a bf16 cache, 11 beside an FP8 one."""


def attention_rows(tokens: int, start: list[int], slot: list[int]) -> Rows:
    cuda = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")  # noqa: E731
    shape = (len(start), tokens)
    return Rows(torch.zeros(shape, dtype=torch.int32, device="cuda"), cuda(start), cuda(slot))


class Case:
    """A layer with a filled cache of a sequence per start, and random norms."""

    def __init__(self, layer: LayerSpec, kv: torch.dtype) -> None:
        self.layer, self.arch = layer, replace(released("gemma-4-31b"), layers=(layer,))
        self.ops = Kernels(self.arch, 1536, kv, KINDS)
        cache = make_cache(self.arch, len(STARTS), 1536, 128, kv, "cuda").layers[0]
        assert cache is not None
        self.cache = cache
        self.fill()
        self.q_norm, self.k_norm = (1 + 0.1 * randn(layer.head_dim, seed=s) for s in (2, 3))

    def fill(self) -> None:
        for seed, part in enumerate((self.cache.k, self.cache.v)):
            part.copy_(randn(*part.shape, seed=seed).to(part.dtype))

    def qkv(self, tokens: int) -> torch.Tensor:
        vectors = self.layer.heads + self.layer.kv_heads * (1 if self.layer.k_eq_v else 2)
        return 2 * randn(len(STARTS) * tokens, vectors * self.layer.head_dim, seed=tokens)

    def call(self, qkv: torch.Tensor, rows: Rows) -> torch.Tensor:
        layer = AttentionLayer(self.layer, self.cache, self.q_norm, self.k_norm)
        x = self.ops.attention(qkv, layer, rows, "fp8")
        return rows_of(x, self.layer.heads * self.layer.head_dim, "fp8")

    def all_together(self, tokens: int) -> torch.Tensor:
        return self.call(self.qkv(tokens), attention_rows(tokens, STARTS, list(range(len(STARTS)))))

    def stored(self) -> list[torch.Tensor]:
        return [part.clone().view(torch.uint8) for part in (self.cache.k, self.cache.v)]


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layer", LAYERS)
def test_attention(layer, kv):
    """A row of a call is the row alone, up to a short prefill chunk; and near float64."""
    case = Case(layer, kv)
    for tokens in (*range(1, 9), 17, 40):
        together = case.all_together(tokens)
        kept, same, qkv = case.stored(), Differences(), case.qkv(tokens)
        for row in range(len(qkv)):
            slot, start = row // tokens, STARTS[row // tokens] + row % tokens
            alone = case.call(qkv[row : row + 1], attention_rows(1, [start], [slot]))
            same.check(alone, together[row : row + 1])
        for ours, theirs in zip(case.stored(), kept, strict=True):
            same.check(ours, theirs)  # stored alike
        assert same.none(), (tokens, int(same.count))
        if tokens in (1, 8):
            exact = attend_exactly(qkv, case.q_norm, layer, case.cache, tokens, case.arch.eps)
            assert error(together, exact) <= ATTENTION[kv]


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layer", LAYERS)
def test_attention_walks_as_it_splits(layer, kv, monkeypatch):
    """Whichever kernels serve a call: the same bits, in its output and in the cache."""
    case, same = Case(layer, kv), Differences()
    for tokens in (1, 3, 5, 8, 16, 17, 128):
        monkeypatch.setattr(attention, "WALK_FROM", 1)
        walked, kept = case.all_together(tokens), case.stored()
        for most, tiles in product((0, 48), ((1,), attention.TILES, (4,))):
            case.fill()
            with monkeypatch.context() as patch:  # the next walk has tiles of its own choice
                patch.setattr(attention, "WALK_FROM", 10**9)
                for limit in ("ALONE_VECTORS", "ALONE_WIDE", "MOST_WIDE"):
                    patch.setattr(attention, limit, most)
                patch.setattr(attention, "TILES", tiles)
                same.check(case.all_together(tokens), walked)
            for ours, theirs in zip(case.stored(), kept, strict=True):
                same.check(ours, theirs)
    assert same.none(), int(same.count)


@pytest.mark.parametrize("walk_from", [1, 10**9])
def test_attention_leaves_rows_that_sit_out_alone(walk_from, monkeypatch):
    monkeypatch.setattr(attention, "WALK_FROM", walk_from)
    case, same = Case(SLIDING, torch.bfloat16), Differences()
    whole, kept = case.all_together(2), case.stored()
    slots = [slot if slot % 3 else -1 for slot in range(len(STARTS))]
    given = case.call(case.qkv(2), attention_rows(2, STARTS, slots))
    for slot in slots:
        if slot >= 0:
            same.check(given[2 * slot : 2 * slot + 2], whole[2 * slot : 2 * slot + 2])
    for ours, theirs in zip(case.stored(), kept, strict=True):
        same.check(ours, theirs)
    assert same.none(), int(same.count)


def attend_exactly(qkv, q_norm, layer: LayerSpec, cache: LayerCache, tokens, eps) -> torch.Tensor:
    """float64 over what the cache holds; slot b starts at STARTS[b]."""
    inverse = inverse_frequencies(layer.rope, layer.head_dim, "cuda").double()
    out = []
    for row, values in enumerate(qkv.double()):
        slot, position = row // tokens, STARTS[row // tokens] + row % tokens
        oldest = max(0, position - layer.window + 1) if layer.window else 0
        k, v = (part.double() for part in read(cache, slot, oldest, position + 1))
        q = values[: layer.heads * layer.head_dim].view(layer.kv_heads, -1, layer.head_dim)
        q = q * (q.square().mean(-1, keepdim=True) + eps).rsqrt() * q_norm.double()
        shares = (rotate(q, position * inverse) @ k.transpose(1, 2)).softmax(-1)
        out.append((shares @ v).flatten())
    return torch.stack(out)

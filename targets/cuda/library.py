"""The compute-bound pieces of a long prefill chunk, done by torch's own kernels.

Shape legend: T tokens of the chunk, S keys, N query heads, K kv heads, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from targets.cuda.params import quantise_fp8

FLASH_HEAD_DIM = 256
"""The widest head that torch's flash attention takes; it masks windows and shares KV heads."""


def matmul(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x [T, k] times weight values [n, k] (times scale [n]) -> [T, n]. FP8 weights meet inputs of
    FP8 on a GPU, with a scale per token found on the spot; elsewhere they are widened."""
    if scale is None:
        return x.to(values.dtype) @ values.T
    if not x.is_cuda:
        return (x.float() @ values.float().T) * scale
    narrow, per_token = quantise_fp8(x)
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        narrow,
        values.T,
        scale_a=per_token[:, None],
        scale_b=scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """q [T, N, D], k and v [S, K, D], of which the last T are the queries' own -> [T, N * D].

    Scores never exist all at once on a GPU: the kernels go through the keys in tiles.
    """
    if q.is_cuda and q.dtype == torch.bfloat16 and q.shape[-1] <= FLASH_HEAD_DIM:
        return _flash(q, k, v, window).flatten(1)
    block = len(q) if window is None else window
    parts = []
    for first in range(0, len(q), block):
        part = q[first : first + block]
        stop = len(k) - len(q) + first + len(part)
        start = 0 if window is None else max(0, stop - len(part) - window + 1)
        parts.append(_masked(part, k[start:stop], v[start:stop], window))
    return torch.cat(parts).flatten(1)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    ends_q, ends_k = (torch.tensor([0, len(x)], device=q.device).int() for x in (q, k))
    out = varlen_attn(
        q,
        k,
        v,
        ends_q,
        ends_k,
        len(q),
        len(k),
        scale=1.0,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(out, torch.Tensor)
    return out


def _masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    ahead = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    ahead = ahead - torch.arange(len(k), device=q.device)  # how far a query is past a key
    seen = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
    heads = q.shape[1] // k.shape[1]
    # shared KV heads are repeated: the kernel with masks and wide heads can't share them
    wide = [x.repeat_interleave(heads, 1).transpose(0, 1)[None] for x in (k, v)]
    # on a GPU nothing else will do: torch's fallback would hold a score for every pair
    kinds = [SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(kinds if q.is_cuda else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], *wide, attn_mask=seen, scale=1.0
        )
    return out[0].transpose(0, 1)

"""The compute-bound pieces of a long prefill chunk, done by torch's own kernels.

Shape legend: T tokens of the chunk, S keys, N query heads, K kv heads, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from targets.cuda.cache import FP8_MAX

FLASH_HEAD_DIM = 256
"""The widest head that torch's flash attention takes; it masks windows and shares KV heads."""
WIDE_BLOCK = 256
"""Queries at once where scores exist: 270 MB of them for 32 heads at 8192 keys."""


def matmul(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x [T, k] times weight values [n, k] (times scale [n]) -> [T, n]. FP8 weights meet inputs of
    FP8 on a GPU, with a scale per token found on the spot; elsewhere they are widened."""
    if scale is None:
        return x.to(values.dtype) @ values.T
    if not x.is_cuda:
        return (x.float() @ values.float().T) * scale
    narrow, per_token = _per_token(x)
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        narrow,
        values.T,
        scale_a=per_token[:, None],
        scale_b=scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and its scale [T] for each row of x [T, k] bf16. A row's factor is itself bf16, so that
    no pass over x is wider than x; the scale undoes just that factor."""
    largest = torch.linalg.vector_norm(x, torch.inf, dim=-1).float().clamp(min=1e-12)
    factor = (FP8_MAX / largest).bfloat16()
    return (x * factor[:, None]).to(torch.float8_e4m3fn), factor.float().reciprocal()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """q [T, N, D], k and v [S, K, D], of which the last T are the queries' own -> [T, N * D].

    Scores never exist all at once on a GPU: flash attention goes through the keys in tiles, and
    heads that are too wide for it through the queries in blocks.
    """
    if q.is_cuda and q.dtype == torch.bfloat16:
        if q.shape[-1] <= FLASH_HEAD_DIM:
            return _flash(q, k, v, window).flatten(1)
        if window is None:
            return _wide(q, k, v).flatten(1)
    block = len(q) if window is None else window
    parts = []
    for first in range(0, len(q), block):
        part = q[first : first + block]
        stop = len(k) - len(q) + first + len(part)
        start = 0 if window is None else max(0, stop - len(part) - window + 1)
        parts.append(_masked(part, k[start:stop], v[start:stop], window))
    return torch.cat(parts).flatten(1)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """The operator itself: torch's own fronts to it have no windows, or not in every version."""
    return torch.ops.aten._flash_attention_forward(
        *(x[None] for x in (q, k, v)),
        None,
        None,
        len(q),
        len(k),
        0.0,  # dropout
        True,  # causal, the last query beside the last key
        False,
        scale=1.0,
        window_size_left=None if window is None else window - 1,
        window_size_right=0,
    )[0][0]


def _wide(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain matmuls, which for heads of 512 are twice as fast as the kernel that takes them."""
    tokens, keys, kv_heads = len(q), len(k), k.shape[1]
    across, values = k.permute(1, 2, 0), v.transpose(0, 1)
    out = torch.empty_like(q)
    for first in range(0, tokens, WIDE_BLOCK):
        part = q[first : first + WIDE_BLOCK].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        rows = part.shape[2]
        seen = keys - tokens + first + rows
        scores = torch.bmm(part.flatten(1, 2), across[..., :seen], out_dtype=torch.float32)
        later = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
        scores.unflatten(1, (-1, rows))[..., seen - rows :].masked_fill_(later, -torch.inf)
        mixed = torch.bmm(scores.softmax(-1).to(q.dtype), values[:, :seen])
        mixed = mixed.unflatten(1, (-1, rows)).permute(2, 0, 1, 3).flatten(1, 2)
        out[first : first + rows] = mixed
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

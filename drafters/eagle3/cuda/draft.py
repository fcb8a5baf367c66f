"""Drafting with an EAGLE-3 head on device tensors: the host loop launches it, the captured cycle
captures it. `../jax/draft.py` is its JAX counterpart and explains the method.

Entry p of the draft cache is made from (x[p + 1], the target's features at p) and predicts x[p +
2]. A cycle begins by writing the accepted tokens' entries again, from the pending features of the
target: of all that it verified, in one call, so that no shape depends on what was accepted.
Rejected entries lie behind the text, and the guesses overwrite them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.eagle3.cuda.head import PIECE, HeadModel
from drafters.eagle3.cuda.ops import Pending
from specdec.core.pictures import SoftRows
from targets.cuda.ops import Rows
from targets.sampling_params import Rules, SamplingTable


@dataclass(frozen=True)
class Drafting:
    """rules: the requests' sampling parameters, as guesses are to follow them."""

    head: HeadModel
    pending: Pending
    sampling_params: SamplingTable


@torch.inference_mode()
def propose(inputs: Drafting, rows: Rows, needs_sampler: bool) -> None:
    """Fill rows.tokens [B, k + 1] behind the last tokens with guesses. needs_sampler False: every
    guess is a bare argmax."""
    head, target, k = inputs.head, inputs.head.target, rows.tokens.shape[1] - 1
    if k == 0:
        return
    layout = head.ops.prepare_rows(inputs.pending, rows, k, head.longest)
    rules = Rules(target.bias, inputs.sampling_params, target.cache.tokens)
    h = head.fuse(inputs.pending.features, rows.slot)
    mixed = head.mix(layout.pending, h, own=False)
    h, mixed = head.ops.ends(h, mixed, layout.last)
    for j in range(k):
        if j > 0:
            fed = Rows(rows.tokens[:, j : j + 1], layout.starts[j - 1], layout.slots[j])
            mixed = head.mix(fed, h, own=True)
        at = Rows(rows.tokens, layout.starts[j], layout.slots[j])
        head.ops.guess(head.logits(h, mixed), head.known, rules, at, j, needs_sampler)


@torch.inference_mode()
def read(
    inputs: Drafting,
    slot: int,
    start: int,
    features: Tensor,
    tokens: list[int],
    soft: SoftRows = (),
) -> None:
    """A chunk of a prompt: features [1, T, F] from position `start` on, and the token that follows
    each. The last is pending too, to draft from. soft: rows of pictures in place of those tokens'
    embeddings."""
    device, head = features.device, inputs.head
    ids = torch.tensor(tokens, dtype=torch.int32, device=device)
    first = torch.zeros(1, dtype=torch.int32, device=device)
    for at, end, rows in _pieces(len(tokens), soft):
        part, table = ids[None, at:end].contiguous(), None
        if rows is not None:  # a table of their own, by their numbers
            part = torch.arange(end - at, dtype=torch.int32, device=device)[None]
            table = head.table_of(rows)
        h = head.fuse(features[:, at:end].contiguous(), first)
        head.store(Rows(part, first + (start + at), first + slot), h, table)
    pending = inputs.pending
    pending.features[slot, 0], pending.chosen[slot, 0] = features[0, -1], ids[-1]
    pending.count[slot] = 1


def read_pictures(
    inputs: Drafting,
    slot: int,
    start: int,
    features: Tensor,
    tokens: list[int],
    soft: SoftRows,
) -> None:
    """`read` of a chunk [1, T, F] with pictures, and of the entry before it: where the chunk begins
    with a picture, that entry could not be made before. Its features are pending. tokens: from the
    chunk's own first one on, T + 1 of them, by which `soft` is numbered."""
    if start == 0:
        behind = tuple((first - 1, rows) for first, rows in soft)
        read(inputs, slot, start, features, tokens[1:], behind)
        return
    before = inputs.pending.features[slot, :1][None]
    read(inputs, slot, start - 1, torch.cat([before, features], 1), tokens, soft)


def _pieces(count: int, soft: SoftRows) -> Iterator[tuple[int, int, Tensor | None]]:
    """First token, end and rows [end - first, H] of the parts in which tokens are read, each of a
    text (None) or of a picture."""
    at = 0
    for first, rows in soft:
        yield from ((n, min(first, n + PIECE), None) for n in range(at, first, PIECE))
        at = first + len(rows)
        for n in range(max(first, 0), at, PIECE):  # nothing comes before a prompt's first token
            end = min(at, n + PIECE)
            yield n, end, rows[n - first : end - first]
    yield from ((n, min(count, n + PIECE), None) for n in range(at, count, PIECE))

"""What a block drafter needs of a GPU, before anything is loaded."""

from __future__ import annotations

from math import prod

from drafters.dflash.cuda.body import entries
from drafters.dflash.spec import BlockSpec, tensors
from targets.cuda.footprint import TargetShape
from targets.cuda.graphs import bucket_of

NARROW = 2
"""Bytes of a table's value, and of a key's or value's number, in bfloat16."""
WIDE = 4
"""The same in float32."""
LINEAR = {"float32": WIDE, "bfloat16": NARROW}
"""Bytes of a linear layer's value by the target's dtype; one byte beside narrower ones."""
LOGIT_COPIES = 3
"""float32 [rows, drafts, words] at once: logits, the soft-capped ones, and the sampler's work."""


def need_bytes(spec: BlockSpec, shape: TargetShape) -> int:
    """What a head adds to a target's need: weights, keys and values of each slot, what a block's
    attention gathers of them, logits, and the states that a verify and a prefill chunk bring
    along."""
    size = WIDE if shape.dtype == "float32" else NARROW
    weights = sum(
        (LINEAR.get(shape.dtype, 1) if _is_linear(name) else size) * prod(dims)
        for name, dims in tensors(spec).items()
    )
    body, rows = spec.body, bucket_of(shape.slots)
    held = [entries(layer, shape.max_len) + 1 for layer in body.layers]
    entry = 2 * body.kv_heads * body.head_dim
    kept = entry * (shape.slots + 1) * sum(held)
    gathered = 2 * entry * rows * max(held)
    scored = rows * body.heads * spec.slots * max(held) * 2
    states = rows * shape.width + shape.chunk
    logits = LOGIT_COPIES * rows * spec.drafts * spec.draft_vocab
    return weights + size * (kept + gathered) + WIDE * (spec.features * states + logits + scored)


def _is_linear(name: str) -> bool:
    return name == "lm_head" or name.endswith("_proj")

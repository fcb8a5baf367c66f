"""What a block drafter needs of a GPU, before anything is loaded."""

from __future__ import annotations

from math import prod

from drafters.dflash.cuda.body import SLACK
from drafters.dflash.cuda.placing import arch_of
from drafters.dflash.spec import BlockSpec, tensors
from targets.cuda.attention import partial_bytes
from targets.cuda.cache import entries, padded_head
from targets.cuda.footprint import TargetShape, graphs_rows
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
    """What a head adds to a target's need: weights, keys and values of each slot, partial sums of a
    block's attention, logits, and the states that a verify, a prefill chunk and graphs of prompts
    bring along."""
    size = WIDE if shape.dtype == "float32" else NARROW
    weights = sum(
        (LINEAR.get(shape.dtype, 1) if _is_linear(name) else size) * prod(dims)
        for name, dims in tensors(spec).items()
    )
    body, rows = spec.body, bucket_of(shape.slots)
    layers = arch_of(spec).layers
    held = [entries(layer, shape.max_len, SLACK) for layer in layers]
    kept = 2 * body.kv_heads * padded_head(body.head_dim) * shape.slots * sum(held)
    pairs = zip(layers, held, strict=True)
    partial = max(partial_bytes(layer, rows * spec.slots, own) for layer, own in pairs)
    states = rows * shape.width + shape.chunk + graphs_rows(shape)
    logits = LOGIT_COPIES * rows * spec.drafts * spec.draft_vocab
    return weights + size * kept + partial + WIDE * (spec.features * states + logits)


def _is_linear(name: str) -> bool:
    return name == "lm_head" or name.endswith("_proj")

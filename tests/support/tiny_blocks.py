"""A block drafter of a few thousand weights for the tiny target of training's tests."""

from __future__ import annotations

import numpy as np

from drafters.dflash.spec import BlockHead, BlockSpec, tensors
from tests.support.eagle3_worker import STOPS, target
from training.recipe import BlockShape, block_for

SHAPE = BlockShape(
    ffw=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    layers=2,
    slots=4,
    rank=8,
    window=9,
    max_position=512,
    draft_vocab=200,
)


def spec_of(shape: BlockShape = SHAPE) -> BlockSpec:
    return block_for(target()[1], shape, STOPS)


def random_block(spec: BlockSpec) -> BlockHead:
    random, weights = np.random.default_rng(2), {}
    for name, shape in tensors(spec).items():
        noise = random.standard_normal(shape).astype(np.float32)
        weights[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    whole = spec.draft_vocab == spec.vocab
    ids = None if whole else np.sort(random.choice(spec.vocab, spec.draft_vocab, replace=False))
    return BlockHead(spec, weights, ids)

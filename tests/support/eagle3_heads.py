"""Random EAGLE-3 heads for the tiny models and for mini, and targets that feed them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np

from drafters.eagle3.jax import head as eagle3
from drafters.eagle3.spec import Head, HeadSpec, tensors
from targets.cuda.load import CudaOptions, load_target as load_cuda
from targets.jax.load import JaxOptions, load_target
from tests.support.eagle3_oracle import STEPS, TOKENS

SPEC = HeadSpec(
    hidden=48,
    ffw=40,
    heads=4,
    kv_heads=2,
    head_dim=12,
    vocab=320,
    draft_vocab=200,
    layers=(0, 2, 4),
    max_position=256,
)
MINI = replace(SPEC, hidden=256, vocab=4096, draft_vocab=500, layers=(1, 5, 8))
BASE = ["generate", "def f(", "--max-tokens", "8", "--slots", "1", "--max-len", "64", "--k", "3"]
EAGLE3 = [*BASE, "--drafter", "eagle3", "--draft-model"]
"""Arguments of `specdec generate` for drafting with a head; its folder follows."""


def random_head(spec: HeadSpec = SPEC) -> Head:
    random, weights = np.random.default_rng(0), {}
    for name, shape in tensors(spec).items():
        noise = random.standard_normal(shape).astype(np.float32)
        weights[name] = 1 + 0.2 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    return Head(spec, weights, np.sort(random.choice(spec.vocab, spec.draft_vocab, replace=False)))


@cache
def jax_target_of(path, slots=2, max_len=96):
    options = JaxOptions(slots=slots, max_len=max_len, k=7, chunk=8, features=SPEC.layers)
    return load_target(path, options)


@cache
def cuda_target_of(path, slots=2, max_len=96, **options):
    fields = {"chunk": 16, "short": 8, "features": SPEC.layers, "max_len": max_len} | options
    return load_cuda(path, CudaOptions(slots=slots, k=4, device="cpu", **fields))


def unrolled_logits(head, embedded, features, documents) -> list[np.ndarray]:
    weights, _ = eagle3.place(head, jnp.float32)
    hidden, kept, rows = (
        eagle3.fuse(weights, head.spec, features[None]),
        eagle3.Unrolled((), ()),
        [],
    )
    for n in range(STEPS):
        fed = jnp.asarray(embedded[None, n : n + TOKENS])
        kept, out = eagle3.unroll(weights, head.spec, kept, fed, hidden, documents[None])
        rows.append(np.asarray(eagle3.logits(weights, head.spec, out)[0]))
        hidden = eagle3.feedback(weights, head.spec, out)
    return rows

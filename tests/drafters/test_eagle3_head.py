"""The EAGLE-3 head follows the formulas, unrolled for training and cached for drafting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from drafters.eagle3.jax import head as eagle3
from tests.support.eagle3_heads import unrolled_logits
from tests.support.eagle3_oracle import FLAGS, STEPS, TOKENS, Oracle, inputs, random_head

pytestmark = pytest.mark.usefixtures("cheap_programs")

TOLERANCE = 1e-5


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_unrolled_steps_equal_the_formulas(flags) -> None:
    head, (embedded, features) = random_head(**flags), inputs()
    rows = unrolled_logits(head, embedded, features, np.zeros(TOKENS, np.int32))
    oracle = Oracle(head)
    steps = 1 if head.spec.window else STEPS  # peers unroll step 0's whole window, drafts don't
    for anchor in (0, 4, TOKENS - 1):
        expected = oracle.chain(torch.tensor(embedded), torch.tensor(features), anchor, steps)
        found = np.stack([row[anchor] for row in rows[:steps]])
        assert np.abs(found - expected.numpy()).max() < TOLERANCE


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_cached_steps_equal_the_formulas(flags) -> None:
    """Two rows of different lengths, the longer one prefilled in two calls over stale entries."""
    head, (embedded, features) = random_head(**flags), inputs()
    weights, _ = eagle3.place(head, jnp.float32)
    decode = jax.jit(lambda *a: eagle3.decode(weights, head.spec, *a))
    cache = eagle3.make_cache(head.spec, 2, TOKENS + STEPS, jnp.float32)
    cache = jax.tree.map(lambda leaf: leaf + 7, cache)  # stale: must never be seen
    fused = eagle3.fuse(weights, head.spec, jnp.asarray(features))
    anchors = [9, 3]
    for start in (0, 5):
        at = np.arange(start, start + 5)
        positions = jnp.asarray(np.stack([np.where(at <= a, at, -1) for a in anchors]))
        fed = jnp.stack([jnp.asarray(embedded)[at]] * 2), jnp.stack([fused[at]] * 2)
        cache, out = decode(cache, *fed, positions)
        if start == 0:
            short = out[1, 3]
    hidden = jnp.stack([out[0, 4], short])[:, None]
    found = [eagle3.logits(weights, head.spec, hidden)[:, 0]]
    for n in range(1, STEPS):
        positions = jnp.asarray([[a + n] for a in anchors])
        fed = jnp.asarray(np.stack([embedded[a + n] for a in anchors]))[:, None]
        hidden = eagle3.feedback(weights, head.spec, hidden)
        cache, hidden = decode(cache, fed, hidden, positions)
        found.append(eagle3.logits(weights, head.spec, hidden)[:, 0])
    for row, anchor in enumerate(anchors):
        oracle = Oracle(head).chain(torch.tensor(embedded), torch.tensor(features), anchor, STEPS)
        own = np.stack([np.asarray(step[row]) for step in found])
        assert np.abs(own - oracle.numpy()).max() < TOLERANCE


def test_packed_documents_do_not_see_each_other() -> None:
    """A document's logits after another equal its own alone, whatever the other holds."""
    head, (embedded, features) = random_head(), inputs()
    documents = np.repeat([0, 1], [6, 4]).astype(np.int32)
    packed = unrolled_logits(head, embedded, features, documents)
    other = inputs(seed=1)
    changed = np.concatenate([other[0][:6], embedded[6:]])
    changed = unrolled_logits(
        head, changed, np.concatenate([other[1][:6], features[6:]]), documents
    )
    for own, theirs in zip(packed, changed, strict=True):
        assert np.array_equal(own[6:], theirs[6:])

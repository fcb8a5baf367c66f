"""Against transformers, at every position: logits and hidden states of every variant."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from targets.checkpoint import Checkpoint
from targets.jax import cache as kv, kv_exchange, model
from targets.jax.params import load_params
from targets.model_folder import read_arch
from targets.stored import dequantise
from tests.support.tiny import IDS, LENGTH, VARIANTS, oracle, write_tiny

MAIN = ("31b", "26b-a4b", "e4b")
"""Dense, with experts, with per-layer inputs and shared K/V; the others are built of the same."""
EACH = [pytest.param(v, marks=() if v in MAIN else pytest.mark.slow) for v in VARIANTS]

pytestmark = pytest.mark.usefixtures("cheap_programs")

TOLERANCE = 5e-4


def load(path):
    arch = read_arch(path)
    return arch, load_params(Checkpoint(path, arch), arch, jnp.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_sequence(tiny, references, variant):
    arch, params = load(tiny[variant])
    every = tuple(range(len(arch.layers)))
    run = jax.jit(lambda p, ids: model.sequence_hidden(p, arch, ids, every))
    hidden = run(params, IDS)
    logits, states = references[variant]
    assert np.abs(model.head(params, arch, hidden.last) - logits).max() <= TOLERANCE
    assert np.abs(hidden.last - states[-1]).max() <= TOLERANCE
    layers = np.split(np.asarray(hidden.features), len(every), -1)
    for ours, theirs in zip(layers[:-1], states[1:-1], strict=True):
        assert np.abs(ours - theirs).max() <= TOLERANCE


def through_cache(arch, params, ids, chunks, slack=16):
    """Logits [B, T, V] of rows fed in these chunks, through rings and global caches."""
    cache = kv.make_cache(arch, len(ids), 64, slack, jnp.float32)

    @partial(jax.jit, donate_argnums=0)
    def feed(cache, params, tokens, start):
        span = kv.Span(0, start, jnp.full(len(ids), tokens.shape[1]))
        cache, hidden = model.decode(params, arch, cache, tokens, span, ())
        return cache, model.head(params, arch, hidden.last)

    pieces, position = [], 0
    for size in chunks:
        part = ids[:, position : position + size]
        cache, logits = feed(cache, params, part, jnp.full(len(ids), position))
        pieces.append(np.asarray(logits))
        position += size
    return np.concatenate(pieces, 1)


@pytest.mark.parametrize("variant", EACH)
def test_chunks_and_single_tokens_equal_the_whole(tiny, references, variant):
    arch, params = load(tiny[variant])
    logits, _ = references[variant]
    for chunks in ([16, 16, 8], [1] * LENGTH):
        assert np.abs(through_cache(arch, params, IDS, chunks) - logits).max() <= TOLERANCE


@pytest.mark.parametrize("at_once", [kv_exchange.AT_ONCE, 1])
@pytest.mark.parametrize("variant", EACH)
def test_a_row_of_a_mixed_batch_is_its_own_run(tiny, references, variant, at_once, monkeypatch):
    """Rows at different positions: each row's logits are those of the whole sequence, whether
    attention takes all rows at once or one by one."""
    monkeypatch.setattr(kv_exchange, "AT_ONCE", at_once)
    arch, params = load(tiny[variant])
    logits, _ = references[variant]
    cache = kv.make_cache(arch, 3, 64, 16, jnp.float32)
    starts = np.array([0, 0, 0])
    rows = [IDS[0], IDS[1], IDS[0]]
    counts = [[8, 3, 0], [8, 8, 5], [0, 8, 8], [8, 2, 8]]
    run = jax.jit(lambda p, c, t, s: model.decode(p, arch, c, t, s, ()))
    for count in counts:
        tokens = np.zeros((3, 8), np.int32)
        for r, n in enumerate(count):
            tokens[r, :n] = rows[r][starts[r] : starts[r] + n]
        span = kv.Span(0, jnp.asarray(starts), jnp.asarray(count))
        cache, hidden = run(params, cache, tokens, span)
        out = np.asarray(model.head(params, arch, hidden.last))
        for r, n in enumerate(count):
            expected = logits[r % 2, starts[r] : starts[r] + n]
            assert np.abs(out[r, :n] - expected).max(initial=0) <= TOLERANCE
        starts += count


@pytest.mark.parametrize("variant", ["31b", "26b-a4b"])
@pytest.mark.parametrize("storage", ["fp8", "int8"])
def test_quantised_files_equal_their_dequantised_tensors(tmp_path, variant, storage):
    """Weight-only arithmetic: exactly what transformers computes on values * scale."""
    write_tiny(tmp_path, variant, storage)
    arch, params = load(tmp_path)
    checkpoint = Checkpoint(tmp_path, arch)
    wide = {name: dequantise(checkpoint.read(name)) for name in checkpoint.specs}
    with torch.no_grad():
        logits = oracle(variant, wide)(torch.tensor(IDS)).logits.numpy()
    ours = jax.jit(lambda p: model.sequence_logits(p, arch, IDS))(params)
    assert np.abs(ours - logits).max() <= TOLERANCE


def test_int8_on_load_equals_int8_files(tmp_path):
    write_tiny(tmp_path / "file", "31b", "int8")
    write_tiny(tmp_path / "wide", "31b")
    arch, stored = load(tmp_path / "file")
    loaded = load_params(Checkpoint(tmp_path / "wide", arch), arch, jnp.float32, "int8")
    for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(loaded), strict=True):
        assert a.dtype == b.dtype and (np.asarray(a) == np.asarray(b)).all()


@pytest.mark.parametrize("variant", EACH)
def test_gradients_flow_through_the_same_forward(tiny, variant):
    arch, params = load(tiny[variant])
    ids = IDS[:, :20]

    @jax.jit
    def gradient(params):
        def loss(params):
            log_p = jax.nn.log_softmax(model.sequence_logits(params, arch, ids[:, :-1]))
            return -jnp.take_along_axis(log_p, ids[:, 1:, None], -1).mean()

        return jax.grad(loss)(params)

    for leaf in jax.tree.leaves(gradient(params)):
        assert np.isfinite(leaf).all()
    assert float(jnp.abs(gradient(params).top["embed_tokens"]).max()) > 0

"""The CUDA target's references against transformers, at every position, and against JAX."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from targets.arch import read_arch
from targets.checkpoint import Checkpoint
from targets.cuda.cache import make_cache
from targets.cuda.layers import Reference
from targets.cuda.model import decode
from targets.cuda.ops import Rows
from targets.cuda.params import load_params
from tests.tiny import VARIANTS, VOCAB, oracle, random_tensors

TOLERANCE = 5e-4
LENGTH = 40
IDS = np.random.default_rng(1).integers(0, VOCAB, (2, LENGTH))


class Runner:
    """One checkpoint on the references, with a cache of three slots."""

    def __init__(self, path, dtype="float32", cache_dtype=torch.float32):
        self.arch = read_arch(path)
        self.ops = Reference(self.arch)
        checkpoint = Checkpoint(path, self.arch)
        self.weights = load_params(checkpoint, self.arch, dtype, "cpu", self.ops.pack)
        self.cache = make_cache(self.arch, 3, 64, 32, cache_dtype, "cpu")

    def feed(self, tokens, start, slot, features=()):
        """Logits [B, T, V] and features [B, T, F] of tokens [B, T] at start [B] in slot [B]."""
        rows = Rows(
            *(torch.tensor(np.asarray(a), dtype=torch.int32) for a in (tokens, start, slot))
        )
        out = decode(self.weights, self.arch, self.cache, rows, self.ops, features)
        split = lambda x: x.view(*rows.tokens.shape, -1).numpy()  # noqa: E731
        return split(out.logits), None if out.features is None else split(out.features)


@pytest.fixture(scope="module")
def references():
    """transformers' logits [2, LENGTH, V] and hidden states, per variant."""
    made = {}
    for variant in VARIANTS:
        with torch.no_grad():
            out = oracle(variant, random_tensors(variant))(
                torch.tensor(IDS), output_hidden_states=True
            )
        made[variant] = out.logits.numpy(), [h.numpy() for h in out.hidden_states]
    return made


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_every_layer(tiny, references, variant):
    runner = Runner(tiny[variant])
    every = tuple(range(len(runner.arch.layers)))
    logits, states = references[variant]
    ours, features = runner.feed(IDS[:, :32], [0, 0], [0, 1], every)
    assert np.abs(ours - logits[:, :32]).max() <= TOLERANCE
    layers = np.split(features, len(every), -1)
    for layer, theirs in zip(layers[:-1], states[1:-1], strict=True):
        assert np.abs(layer - theirs[:, :32]).max() <= TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_and_single_tokens_equal_the_whole(tiny, references, variant):
    runner = Runner(tiny[variant])
    pieces = {}
    for chunks in ((16, 16, 8), (1,) * LENGTH):
        position, parts = 0, []
        for size in chunks:
            part = IDS[:, position : position + size]
            parts.append(runner.feed(part, [position] * 2, [2, 0])[0])
            position += size
        pieces[chunks] = np.concatenate(parts, 1)
    wide, single = pieces.values()
    assert np.abs(wide - references[variant][0]).max() <= TOLERANCE
    assert (wide == single).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_of_a_mixed_batch_is_its_own_run(tiny, references, variant):
    """Rows at different positions, some idle: bitwise each row fed alone."""
    together, alone = Runner(tiny[variant]), Runner(tiny[variant])
    starts = np.zeros(3, int)
    for live in ([0, 1], [0, 1, 2], [1, 2], [2, 0], [0, 1, 2]):
        slots = np.full(3, -1)
        slots[: len(live)] = live
        tokens = np.stack([IDS[s % 2, starts[s] : starts[s] + 5] for s in slots])
        ours, _ = together.feed(tokens, starts[slots] * (slots >= 0), slots)
        for b, slot in enumerate(live):
            lone, _ = alone.feed(tokens[b : b + 1], [starts[slot]], [slot])
            assert (ours[b] == lone[0]).all()
            expected = references[variant][0][slot % 2, starts[slot] : starts[slot] + 5]
            assert np.abs(ours[b] - expected).max() <= TOLERANCE
        starts[live] += 5
    for ours, theirs in zip(together.cache.layers, alone.cache.layers, strict=True):
        assert ours is None or ((ours.k == theirs.k).all() and (ours.v == theirs.v).all())

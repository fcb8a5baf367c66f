"""Caches read in blocks as far as they are filled, and keys and values in int8."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from drafters.lookup.jax import TracedLookup
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.config import ModelConfig
from specdec.core.cycle import host_cycle
from specdec.core.types import Sequence
from targets import mini
from targets.arch import parse_arch
from targets.backend import TargetRequest
from targets.jax import kv_exchange, layers, snapshots as snapshots_module
from targets.jax.backend import JaxBackend
from targets.jax.cache import Rounded, make_cache, round_entries
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.load import JaxOptions, load_target, random_target
from targets.jax.programs import Feed
from targets.jax.roofline import cache_bytes
from targets.jax.snapshots import SlotSnapshots
from targets.model_folder import read_arch
from targets.tokenizer import load_tokenizer
from tests.support.lossless import WIDE, check_host, decode, draft_of, prompts_for
from tests.support.tiny import config_of

pytestmark = pytest.mark.usefixtures("cheap_programs")

ROWS = 3
TOKENS = 4
HEADS = 4
KV_HEADS = 2
DIM = 8
SIZE = 40
PIECE = 16
PROSE = (
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
    "    return a\n\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n"
)


@pytest.fixture
def short_blocks(monkeypatch, traced_anew):
    """Tiny caches of 288 entries have five blocks, the last of which reaches back."""
    monkeypatch.setattr(kv_exchange, "BLOCK", 64)


def logits_of(target, text):
    """[len(text) - 24, V] after a prompt of 24 tokens, a width at a time."""
    target.prefill(Sequence(text[:24], slot=0), 0, 24)
    found, width = [], target.plan.width
    for start in range(24, len(text) - width + 1, width):
        tokens = np.array([text[start : start + width]], np.int32)
        feed = Feed(tokens, np.array([start], np.int32), np.array([width], np.int32))
        found.append(target.logits(feed)[0])
    return np.concatenate(found)


one_pass = jax.jit(layers.attend)


@jax.jit
def in_blocks(q, k, v, visible, count):
    def block(i):
        begin = jnp.minimum(i * PIECE, SIZE - PIECE)

        def cut(x, axis):
            return jax.lax.dynamic_slice_in_dim(x, begin, PIECE, axis)

        fresh = begin + jnp.arange(PIECE) >= i * PIECE
        return (cut(k, 1),), cut(v, 1), cut(visible, 2) & fresh

    return layers.attend_blocks((q,), block, count)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, SIZE - TOKENS), min_size=ROWS, max_size=ROWS),
    seed=st.integers(0, 99),
)
def test_blocks_are_one_pass_and_more_of_them_change_no_bit(lengths, seed):
    random = np.random.default_rng(seed)
    q = random.normal(size=(ROWS, TOKENS, HEADS, DIM)).astype(np.float32)
    k, v = random.normal(size=(2, ROWS, SIZE, KV_HEADS, DIM)).astype(np.float32)
    place = np.array(lengths)[:, None] + np.arange(TOKENS)
    visible = np.arange(SIZE) <= place[..., None]
    needed = -(-(max(lengths) + TOKENS) // PIECE)
    found = np.asarray(in_blocks(q, k, v, visible, needed))
    np.testing.assert_allclose(found, one_pass(q, k, v, visible), rtol=2e-5, atol=2e-6)
    assert (found == np.asarray(in_blocks(q, k, v, visible, -(-SIZE // PIECE)))).all()


@pytest.mark.usefixtures("traced_anew")
@pytest.mark.parametrize("variant", ["31b", "e4b"])
def test_a_forward_in_blocks_says_what_one_pass_says(tiny, variant, monkeypatch):
    text = prompts_for(320)[1] * 6
    options = JaxOptions(slots=1, max_len=256, k=WIDE, chunk=24)
    whole = logits_of(load_target(tiny[variant], options), text)
    monkeypatch.setattr(kv_exchange, "BLOCK", 64)
    jax.clear_caches()  # else its programs would be those of one pass
    blocks = logits_of(load_target(tiny[variant], options), text)
    np.testing.assert_allclose(blocks, whole, rtol=1e-4, atol=1e-4)


def test_no_drafter_changes_a_token_of_rows_in_blocks(tiny, short_blocks):
    """Rows of 1 to 40 prompt tokens: some fill one block, some two, and none may notice."""

    @cache
    def target_of(path, slots):
        return load_target(path, JaxOptions(slots=slots, max_len=256, k=WIDE, chunk=8))

    told = "model", "ngram", "right", "wild"
    check_host(tiny["31b"], "nucleus", 4, [4], 60, target_of, draft_of, told)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_an_entry_is_off_by_half_a_step_at_most(seed, dtype):
    new = jnp.asarray(np.random.default_rng(seed).normal(size=(3, 2, 16)), dtype)
    values, scale = round_entries(new.at[1].set(0))
    wide = np.asarray(new.at[1].set(0), np.float32)
    error = np.abs(np.asarray(values, np.float32) * np.asarray(scale)[..., None] - wide)
    assert (error <= 0.5001 * np.asarray(scale)[..., None]).all()
    assert (np.abs(np.asarray(values)[[0, 2]]).max(-1) == 127).all()
    assert not np.asarray(values)[1].any()


def test_int8_halves_what_bfloat16_keeps(tiny):
    arch = read_arch(tiny["31b"])
    held = make_cache(arch, 2, 64, 8, jnp.int8)
    layer = next(layer for layer in held.layers[0] if layer is not None)
    assert isinstance(layer.k, Rounded) and layer.k.values.dtype == jnp.int8
    assert layer.k.scale.shape == (*layer.k.values.shape[:2], *layer.k.values.shape[3:1:-1])
    one = [cache_bytes(arch, kind, 1, 10) for kind in (jnp.int8, jnp.bfloat16)]
    dims = {layer.head_dim for layer in arch.layers}
    assert min(dims) == 16 and one[0] / one[1] == pytest.approx(0.5, abs=4 / (2 * min(dims)))


def test_int8_says_nearly_the_same():
    """The error that docs/design/tpu.md states, on a trained model."""
    path, cut = mini.path("mini"), TargetRequest(k=WIDE)
    text = load_tokenizer(path).encode(PROSE)
    narrow, wide = (
        jax.nn.log_softmax(
            logits_of(
                JaxBackend().load(path, ModelConfig(slots=1, max_len=2048, kv_dtype=kind), cut),
                text,
            )
        )
        for kind in ("int8", None)
    )
    divergence = np.asarray((jnp.exp(wide) * (wide - narrow)).sum(-1))
    assert 0 < divergence.mean() < 1e-4 and divergence.max() < 1e-3
    assert (wide.argmax(-1) == narrow.argmax(-1)).all()


def test_int8_is_lossless_within_itself(tiny, short_blocks):
    options = JaxOptions(slots=2, max_len=256, k=WIDE, chunk=8, kv_dtype="int8")
    target, none, ngram = load_target(tiny["31b"], options), NoDrafter(), NgramDrafter(1, 3)
    run = partial(decode, target, mode="everything", tokens=70)
    plain, _ = run(none, host_cycle(target, none, 0))
    found, acceptance = run(ngram, host_cycle(target, ngram, 4))
    assert found == plain and acceptance.drafted
    found, again = run(none, device_loop(target, TextDrafter(TracedLookup(1, 3)), 4, 4))
    assert found == plain and again == acceptance


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_chunk_is_put_and_taken_in_place(kv_dtype):
    """Whatever the context: a copy of the cache for each chunk made reuse slow at large ones."""
    arch = parse_arch(config_of("31b"))
    target = random_target(arch, JaxOptions(slots=2, max_len=512, kv_dtype=kv_dtype))
    snapshots = SlotSnapshots(target)
    seq = Sequence([2] * (snapshots.unit + 2))
    seq.slot = 1
    chunk = snapshots.take_chunk(seq, 0, snapshots.unit).arrays()
    layers = snapshots_module._of(target.cache, snapshots._global)
    put = jax.jit(snapshots_module._put_chunk, donate_argnums=0)
    compiled = put.lower(layers, np.int32(1), np.int32(0), chunk).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096
    taken = snapshots._take_chunk.lower(layers, np.int32(1), np.int32(0)).compile()
    assert taken.memory_analysis().temp_size_in_bytes < 4096

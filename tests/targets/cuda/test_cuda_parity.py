"""The CUDA target's references against transformers, at every position, and against JAX."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from specdec.core.errors import UserError
from specdec.core.types import Sampling, Sequence
from targets import mini
from targets.checkpoint import Checkpoint
from targets.cuda.cache import read
from targets.cuda.formulas import as_e4m3, rms
from targets.cuda.load import CudaOptions, load_target
from targets.cuda.ops import Opening, Rows
from targets.cuda.params import load_params
from targets.cuda.plan import FINE
from targets.cuda.reference import Reference
from targets.cuda.score import window_nll
from targets.cuda.selfcheck import self_check
from targets.jax.load import JaxOptions, load_target as load_jax
from targets.model_folder import read_arch
from tests.support.tiny import IDS, LENGTH, VARIANTS, VOCAB
from tests.targets.cuda_runner import Runner

TOLERANCE = 5e-4


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


@pytest.mark.parametrize("width", [48, 96, 256, 2816])
def test_norms_and_roundings_of_rows_are_those_of_each_row(width):
    """Bit for bit, wherever a row lies: the references take these of all rows at once."""
    random = torch.Generator().manual_seed(width)
    weight = torch.randn(width, generator=random)
    for function in (
        lambda x: rms(x, weight, 1e-6),
        lambda x: rms(x, None, 1e-6),
        as_e4m3,
        lambda x: as_e4m3(x, 8),
    ):
        for rows, at in ((1, 0), (2, 1), (7, 3), (64, 0), (129, 5)):
            flat = 9 * torch.randn(at + rows * width, generator=random)
            x = flat[at:].view(rows, width)
            assert torch.equal(function(x), torch.cat([function(row[None].clone()) for row in x]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_long_prefill_chunks_equal_short_ones(tiny, references, variant):
    """The library's path against the forward of decoding: logits, features, and what the cache
    holds, with rings that wrap within a chunk and with none."""
    text = np.random.default_rng(4).integers(0, VOCAB, 400).tolist()
    layers = tuple(range(len(read_arch(tiny[variant]).layers)))
    base = dict(slots=2, max_len=512, device="cpu", features=layers)
    long = load_target(tiny[variant], CudaOptions(**base, chunk=160, short=0))
    short = load_target(tiny[variant], CudaOptions(**base, chunk=32))
    seq = Sequence(text, slot=1)
    steps = {}
    for target in (long, short):
        chunk = target.prefill_chunk
        cuts = [(a, min(a + chunk, 400)) for a in range(0, 400, chunk)]
        parts = [target.prefill(seq, *cut) for cut in cuts]
        steps[target] = parts[-1].chosen, np.concatenate([p.features for p in parts], 1)
    assert steps[long][0] == steps[short][0]
    scale = np.abs(steps[short][1]).max()
    assert np.abs(steps[long][1] - steps[short][1]).max() <= TOLERANCE * scale
    assert (long.cache.tokens[:, :400] == short.cache.tokens[:, :400]).all()
    for layer, ours, theirs in zip(
        long.arch.layers, long.cache.layers, short.cache.layers, strict=True
    ):
        if ours is not None:
            seen = 400 - (layer.window or 400), 400
            for a, b in zip(read(ours, 1, *seen), read(theirs, 1, *seen), strict=True):
                assert (a - b).abs().max() <= TOLERANCE * scale and a.abs().max() > 0


@pytest.mark.parametrize("variant", ["31b", "26b-a4b", "e4b"])
def test_a_first_call_says_what_calls_of_eight_say(tiny, variant):
    """Bit for bit, where rings are no longer than that call, and only its last row runs through
    layers that store nothing."""
    text = np.random.default_rng(7).integers(0, VOCAB, 101).tolist()
    made = []
    for first, features in ((128, ()), (128, (0,)), (8, ())):
        options = CudaOptions(2, 256, device="cpu", chunk=128, short=8, first=first)
        target = load_target(tiny[variant], replace(options, features=features))
        seq = Sequence(text, Sampling(logprobs=3), slot=1)
        cuts = [(0, 101)] if first == 128 else [(a, min(a + 24, 101)) for a in range(0, 101, 24)]
        step = [target.prefill(seq, *cut) for cut in cuts][-1]
        texts = [
            read(layer, 1, 101 - min(101, spec.window or 101), 101)
            for spec, layer in zip(target.arch.layers, target.cache.layers, strict=True)
            if layer is not None
        ]
        made.append((step.chosen, astuple(step.logprobs), texts))
    for chosen, logprobs, texts in made[:-1]:
        assert chosen == made[-1][0]
        assert all((a == b).all() for a, b in zip(logprobs, made[-1][1], strict=True))
        for ours, theirs in zip(texts, made[-1][2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("variant", ["31b", "26b-a4b", "e4b"])
def test_rows_end_where_nothing_is_stored_any_more(tiny, variant):
    """The library's path: a chunk of which no layer is recorded says what one says of which all
    are, and its K/V are the same. Checksums show what tolerances forgive: they are not compared."""
    text = np.random.default_rng(8).integers(0, VOCAB, 150).tolist()
    made = []
    for features in ((), tuple(range(len(read_arch(tiny[variant]).layers)))):
        options = CudaOptions(1, 256, device="cpu", chunk=100, short=0, features=features)
        target = load_target(tiny[variant], options)
        seq = Sequence(text, Sampling(logprobs=3), slot=0)
        step = [target.prefill(seq, *cut) for cut in ((0, 100), (100, 150))][-1]
        made.append((step.chosen, astuple(step.logprobs)[:3], target.cache.layers))
    (chosen, logprobs, layers), (other, logprobs_too, layers_too) = made
    assert chosen == other
    assert all(np.abs(a - b).max() < 1e-4 for a, b in zip(logprobs, logprobs_too, strict=True))
    for ours, theirs in zip(layers, layers_too, strict=True):
        assert ours is None or (torch.equal(ours.k, theirs.k) and torch.equal(ours.v, theirs.v))


def test_a_chunk_in_pieces_is_its_pieces(tiny):
    """Bit for bit: what is a little longer than one call of decoding's kernels takes several."""
    text, layers = np.random.default_rng(6).integers(0, VOCAB, 23).tolist(), (0, 2)
    base = dict(slots=1, max_len=64, device="cpu", features=layers)
    made = []
    for chunk in (32, 8):
        target = load_target(tiny["31b"], CudaOptions(**base, chunk=chunk, short=8))
        cuts = [(a, min(a + chunk, 23)) for a in range(0, 23, chunk)]
        parts = [target.prefill(Sequence(text, slot=0), *cut) for cut in cuts]
        kept = [(layer.k, layer.v) for layer in target.cache.layers if layer is not None]
        made.append((parts[-1].chosen, np.concatenate([p.features for p in parts], 1), kept))
    (chosen, features, kept), (other, features_too, kept_too) = made
    assert chosen == other and (features == features_too).all()
    for ours, theirs in zip(kept, kept_too, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("variant", ["31b", "26b-a4b"])
def test_fp8_rounds_the_inputs_of_many_tokens(tiny, variant):
    """A chunk of more than FINE tokens is what fp8-w8a8 makes of it, a shorter one is not."""
    text = np.random.default_rng(5).integers(0, VOCAB, FINE + 1)
    options = dict(slots=1, max_len=96, device="cpu")
    fine, rounded = (
        load_target(tiny[variant], CudaOptions(dtype=dtype, **options))
        for dtype in ("fp8", "fp8-w8a8")
    )
    for tokens, alike in ((FINE + 1, True), (FINE, False)):
        rows = Rows(torch.from_numpy(text[None, :tokens]).int(), *torch.zeros(2, 1).int())
        ours, theirs = (target.short(rows).logits for target in (fine, rounded))
        assert torch.equal(ours, theirs) == alike


def test_rows_that_sit_out_pick_no_expert(tiny):
    """Nor do drafts that don't exist; the other rows don't notice."""
    arch = read_arch(tiny["26b-a4b"])
    ops, moe = Reference(arch), arch.layers[0].moe
    weights = load_params(Checkpoint(tiny["26b-a4b"], arch), arch, "float32", "cpu", ops)
    w = weights.layers[0].moe
    assert moe is not None and w is not None
    h = torch.randn((6, arch.hidden), generator=torch.Generator().manual_seed(0))

    def call(ids, slot):
        rows = Rows(torch.tensor(ids), torch.zeros(2), torch.tensor(slot))
        x = ops.norm(h, Opening(w.router_scale, w.router.kind))
        chosen = ops.route(x, w.router, w.per_expert, rows, moe)
        return chosen[0], ops.experts(h, chosen, w.gate_up, w.down)

    numbers, whole = call([[5, 6, 7], [8, 9, 10]], [0, 1])
    some, parts = call([[5, 6, -1], [8, 9, 10]], [0, -1])
    assert torch.equal(some[:2], numbers[:2]) and torch.equal(parts[:2], whole[:2])
    assert (some[2:] == -1).all() and not parts[2:].any() and whole.any(1).all()


def test_mini_agrees_with_jax():
    """The two targets in float32 give the same text with the embedded model."""
    path = mini.path("mini")
    ours = load_target(path, CudaOptions(slots=1, max_len=256, device="cpu"))
    theirs = load_jax(path, JaxOptions(slots=4, k=7, dtype="float32"))  # as commands compile it
    text = np.random.default_rng(0).integers(3, ours.vocab, 150).tolist()
    steps = []
    for target in (ours, theirs):
        seq = Sequence(list(text), slot=0)
        chunk = target.prefill_chunk
        for start in range(0, 150, chunk):
            step = target.prefill(seq, start, min(start + chunk, 150))
        for _ in range(8):
            seq.tokens.append(int(step.chosen[0, 0]))
            step = target.verify([seq], np.zeros((1, 0), np.int32))
        steps.append(seq.tokens)
    assert steps[0] == steps[1]


def test_self_check_passes_and_fails(tiny, monkeypatch):
    target = load_target(tiny["e2b"], CudaOptions(slots=3, max_len=64, device="cpu"))
    checks = self_check(target)
    assert len(checks) == 6 and all(check.passed and check.total for check in checks)
    honest = target.ops.linear
    monkeypatch.setattr(target.ops, "linear", lambda x, w: honest(x, w) + len(x) * 1e-3)
    assert not all(check.passed for check in self_check(target))


def test_scores_equal_transformers(tiny, references):
    target = load_target(tiny["31b"], CudaOptions(slots=1, max_len=64, device="cpu"))
    ours = window_nll(target, IDS[0].tolist())
    log_p = torch.tensor(references["31b"][0][0]).log_softmax(-1).numpy()
    assert np.abs(ours + log_p[np.arange(LENGTH - 1), IDS[0, 1:]]).max() <= TOLERANCE
    with pytest.raises(UserError, match="--window"):
        window_nll(target, [1] * 66)

"""The drafters' kernels without a GPU: what surrounds a draft's steps equals its twin in torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drafters.assistant.cuda.kernels import AssistantKernels
from drafters.assistant.cuda.ops import AssistantReference, States
from drafters.assistant.cuda.ordered import OrderedHead
from drafters.assistant.spec import released_size
from drafters.eagle3.cuda.head import arch_of
from drafters.eagle3.cuda.kernels import DraftKernels
from drafters.eagle3.cuda.ops import DraftReference, PairNorms, Pending
from drafters.eagle3.spec import HeadSpec
from drafters.lookup.cuda import DeviceLookup
from drafters.lookup.host import LookupTwin
from specdec.core.types import NO_GUESS, Sequence
from targets import mini
from targets.arch import Arch
from targets.cuda.device_drafter import CapturedBatch
from targets.cuda.formulas import rms
from targets.cuda.ops import Rows
from targets.model_folder import read_arch
from tests.targets.cuda.card import error, rows_of
from tests.targets.cuda.emulation.emulated import Kernels, Launcher, just_written
from tests.targets.cuda.emulation.emulated_weights import randn

HIDDEN = 256
VOCAB = 512
BATCH = 3
SLOTS = 9
HEAD = HeadSpec(
    hidden=HIDDEN,
    ffw=320,
    heads=14,
    kv_heads=2,
    head_dim=128,
    vocab=VOCAB,
    draft_vocab=100,
    layers=(1, 5, 8),
    max_position=4096,
)
NEAR = 2**-11
"""Of f16, which inputs of 8-bit weights are."""


class Assistants(AssistantKernels, Kernels):
    """Emulated."""


class Heads(DraftKernels, Kernels):
    """Emulated."""


@cache
def assistant() -> Arch:
    spec = released_size(read_arch(mini.path("mini")))
    return replace(spec.arch, hidden=128)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def whole(high: int, *shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(high)
    return torch.randint(0, high, shape, generator=draw).int()


def tables(*every) -> list:
    values = randn(VOCAB, HIDDEN, seed=1).bfloat16()
    return [ops.pack(values, None, "bf16", "plain") for ops in every]


def test_what_surrounds_an_assistants_step():
    ours = Assistants(assistant(), 256, torch.bfloat16, "fp8")
    twin = AssistantReference(assistant())
    table, plain = tables(ours, twin)
    tokens, slot = whole(VOCAB, BATCH, 3)[:, 1] - 1, ints(2, -1, 0)
    norm = 1 + 0.1 * randn(HIDDEN, seed=2)
    of_slots, of_rows = randn(SLOTS, HIDDEN, seed=3), randn(BATCH, HIDDEN, seed=4)
    for states in (States(of_slots, slot, norm), States(of_rows)):
        just_written(tokens, states.rows)
        x = ours.beside(table, tokens, states, "fp8")
        exact = twin.beside(plain, tokens, states, "float32")
        assert error(rows_of(x, 2 * HIDDEN, "fp8"), exact) < NEAR
    rows = Rows(torch.zeros(BATCH, 5).int(), ints(55, 56, 57), slot)
    just_written(rows.start, rows.slot)
    ours_laid, twins = (ops.prepare_rows(rows, 4, 60) for ops in (ours, twin))
    assert all(map(torch.equal, ours_laid, twins))
    features, accepted, kept = randn(BATCH, 5, HIDDEN, seed=5), ints(0, 1, 4), []
    for ops in (ours, twin):
        states = randn(SLOTS, HIDDEN, seed=3)
        just_written(features, accepted)
        ops.keep(states, rows, features, accepted)
        kept.append(states[:-1])  # the spare row holds anything
    assert torch.equal(*kept)


@pytest.mark.parametrize(
    ("clusters", "words", "width", "read", "softcap"), [(40, 34, 40, 8, 30.0), (7, 9, 40, 3, None)]
)
def test_an_ordered_head_scores_the_words_of_the_best_clusters(
    clusters, words, width, read, softcap
):
    rows, vocab = 2, clusters * words - 4
    ids = torch.from_numpy(np.random.default_rng(0).permutation(clusters * words)).int()
    ids = ids.view(clusters, words)
    centroids = randn(clusters, width, seed=0).bfloat16()
    table = randn(clusters, words, width, seed=1).bfloat16()
    head = OrderedHead(centroids, table, ids, read, vocab, softcap)
    ops = Assistants(assistant(), 256, torch.bfloat16, "fp8")
    h, norm = randn(rows, width, seed=2), 1 + 0.1 * randn(width, seed=3)
    just_written(h)
    logits = ops.ordered(h, norm, head)
    y = rms(h, norm, ops.arch.eps).double()
    best = (y @ centroids.double().T).sort(descending=True).indices[:, :read]
    for row, got in enumerate(logits):
        scores = (table[best[row]].double() @ y[row]).flatten()
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        word = ids[best[row]].flatten().long()
        there = word < vocab
        expected = torch.full((vocab,), -torch.inf, dtype=torch.double)
        expected[word[there]] = scores[there]
        assert torch.equal(torch.isfinite(got), torch.isfinite(expected))
        finite = torch.isfinite(got)
        assert error(got[finite], expected[finite]) < 2**-16


def test_inputs_of_a_head():
    ours = Heads(arch_of(HEAD), 256, {"fp8", "bf16"})
    twin = DraftReference(arch_of(HEAD))
    features, slot = randn(4, 5, 3 * HIDDEN, seed=1), ints(2, -1, 0)
    for parts, weight in ((1, None), (3, randn(3 * HIDDEN, seed=2))):
        x = ours.features(features, slot, weight, parts, "fp8")
        exact = twin.features(features, slot, weight, parts, "float32")
        assert error(rows_of(x, 3 * HIDDEN, "fp8"), exact) < NEAR
    (table, plain), tokens = tables(ours, twin), whole(VOCAB, BATCH, 3)[:, 1] - 1
    weights = [1 + 0.1 * randn(HIDDEN, seed=i) for i in range(3)]
    for feedback, residual in ((None, False), (weights[2], False), (weights[2], True)):
        norms = PairNorms(weights[0], weights[1], feedback, residual)
        got, theirs = (randn(BATCH, HIDDEN, seed=7) for _ in range(2))
        just_written(tokens, got)
        x = ours.pair(table, tokens, got, norms, "fp8")
        exact = twin.pair(plain, tokens, theirs, norms, "float32")
        assert error(rows_of(x, 2 * HIDDEN, "fp8"), exact) < NEAR
        torch.testing.assert_close(got, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 23, 128])
def test_rows_of_a_picture_are_a_table_of_their_own(count):
    ours, twin = Heads(arch_of(HEAD), 256, {"fp8", "bf16"}), DraftReference(arch_of(HEAD))
    values, tokens = randn(count, HIDDEN, seed=1).bfloat16(), torch.arange(count).int()
    norms = PairNorms(*(1 + 0.1 * randn(HIDDEN, seed=i) for i in range(2)), None, False)
    found = []
    for ops in (ours, twin):
        h = randn(count, HIDDEN, seed=7)
        just_written(tokens, h)
        table = ops.pack(values, None, "bf16", "plain")
        found.append(ops.pair(table, tokens, h, norms, "fp8" if ops is ours else "float32"))
    assert error(rows_of(found[0], 2 * HIDDEN, "fp8"), found[1]) < NEAR


def test_bookkeeping_of_a_head():
    ours = Heads(arch_of(HEAD), 256, {"fp8", "bf16"})
    twin = DraftReference(arch_of(HEAD))
    slots, width, k = 50, 5, 4
    pending = Pending(
        randn(slots + 1, width, 8, seed=1), whole(99, slots + 1, width), whole(5, slots + 1) + 1
    )
    slot = ints(7, -1, 3)
    rows = Rows(whole(98, BATCH, k + 1), whole(80, BATCH) + 10, slot)
    just_written(pending.chosen, pending.count, rows.start)
    got, theirs = (ops.prepare_rows(pending, rows, k, 60) for ops in (ours, twin))
    for name in ("tokens", "start", "slot"):
        assert torch.equal(getattr(got.pending, name), getattr(theirs.pending, name))
    assert all(map(torch.equal, got[1:], theirs[1:]))
    h, mixed = randn(BATCH * width, 8, seed=4), randn(BATCH * width, 8, seed=5)
    just_written(h, mixed, got.last)
    assert all(map(torch.equal, ours.ends(h, mixed, got.last), twin.ends(h, mixed, got.last)))
    kept = []
    told = randn(BATCH, width, 8, seed=2), whole(97, BATCH, width), slot.clamp(min=0) % width
    for ops in (ours, twin):
        kept.append(Pending(*(part.clone() for part in pending)))
        just_written(*told)
        ops.keep(kept[-1], rows, *told)
    for a, b in zip(*kept, strict=True):
        assert torch.equal(a[:-1], b[:-1])  # the spare row holds anything


@pytest.mark.parametrize("lengths", [(1, 3), (2, 32)])
def test_lookup_guesses_as_its_twin_does(lengths):
    random, k = np.random.default_rng(0), 6
    long = random.integers(0, 9, 70).tolist()
    texts = [[1], [2] * 5, [3] * 150, long, long + long[:40], random.integers(0, 3, 1100).tolist()]
    history = torch.ones((len(texts), 2048), dtype=torch.int32)
    for slot, text in enumerate(texts):
        history[slot, : len(text)] = torch.tensor(text)
    tokens = torch.full((len(texts), k + 1), NO_GUESS, dtype=torch.int32)
    start = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32)
    rows = Rows(tokens, start, torch.arange(len(texts), dtype=torch.int32))
    batch = CapturedBatch(rows, needs_sampler=False, logprobs=False)
    target = SimpleNamespace(cache=SimpleNamespace(tokens=history), vision=None)
    device = SimpleNamespace(target=target, lengths=lengths, _launch=Launcher())
    just_written(history, start)
    found = DeviceLookup.propose(device, batch, k).tokens.tolist()
    twin, seqs = LookupTwin(*lengths), [Sequence(t, slot=slot) for slot, t in enumerate(texts)]
    for seq in seqs:
        twin.reset(seq)
    assert found == twin.propose(seqs, k).tokens.tolist()

"""On the card: an assistant's kernels agree with their torch twins; in either loop the assistant
changes no token and makes the same guesses.

To time a draft step at 31B's size: specdec bench --random gemma-4-31b --backend cuda --dtype fp8
--drafter assistant --k 7, and again with --k 3. The difference of the cycles is four draft steps
and four more verified rows; measure the latter with --drafter none at the same widths.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from drafters.assistant.cuda.drafter import AssistantDraftHead
from drafters.assistant.cuda.kernels import AssistantKernels
from drafters.assistant.cuda.model import AssistantModel, place
from drafters.assistant.cuda.ops import AssistantReference, States
from drafters.assistant.cuda.ordered import OrderedHead
from drafters.assistant.spec import Clusters, random_assistant, released_size
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sequence
from targets import mini
from targets.arch import released
from targets.cuda.device_loop import device_loop
from targets.cuda.formulas import rms
from targets.cuda.host_drafter import DeviceHead, HostHead
from targets.cuda.load import CudaOptions, random_target
from targets.cuda.ops import Rows
from targets.model_folder import read_arch
from tests.support.modes import MODES
from tests.targets.cuda.card import error, randn, rows_of
from tests.targets.cuda.gpu.card_targets import table_of, target_of

pytestmark = pytest.mark.gpu

ARCH = read_arch(mini.path("mini"))
LAST = (len(ARCH.layers) - 1,)
KINDS = [("fp8", "fp8"), ("bfloat16", "bfloat16")]
LENGTHS = (3, 40, 170, 1, 26, 64, 129, 400, 9, 17)
TOKENS = 24


@cache
def assistant_of(clusters=None, drafts=None):
    """For mini, of a width of its own; a head of each kind."""
    spec = released_size(ARCH)
    arch = replace(
        spec.arch, hidden=128, layers=tuple(replace(layer, ffw=256) for layer in spec.arch.layers)
    )
    spec = replace(spec, arch=arch, clusters=clusters)
    ids = None if drafts is None else np.arange(drafts) * ARCH.vocab // drafts
    return random_assistant(spec)._replace(target_ids=ids)


HEADS = {
    "dense": {},
    "pruned": {"drafts": 1000},
    "ordered": {"clusters": Clusters(64, 8)},
}


def where(*values):
    return torch.tensor(values, device="cuda", dtype=torch.int32)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_what_surrounds_a_step_equals_its_twin(kind, batch):
    arch = assistant_of().spec.arch
    ours, twin = AssistantKernels(arch, 256, torch.bfloat16, kind), AssistantReference(arch)
    limit = {"fp8": 2**-11, "bf16": 2**-8}[kind]
    table = randn(4096, 256).bfloat16()
    tables = [ops.pack(table, None, "bf16", "plain") for ops in (ours, twin)]
    tokens = torch.randint(-1, 4096, (batch, 3), device="cuda").int()[:, 1]
    slot, norm = where(*[2, -1, 0, 5, 4, -1, 7, 1, 3][:batch]), 1 + 0.1 * randn(256)
    for states in (States(randn(9, 256), slot, norm), States(randn(batch, 256))):
        x = ours.beside(tables[0], tokens, states, kind)
        exact = twin.beside(tables[1], tokens, states, "float32")
        assert error(rows_of(x, 512, kind), exact) < limit
    rows = Rows(torch.zeros(batch, 5, device="cuda").int(), where(*range(55, 55 + batch)), slot)
    for got, theirs in zip(*(ops.prepare_rows(rows, 4, 60) for ops in (ours, twin)), strict=True):
        assert torch.equal(got, theirs)
    features, kept = randn(batch, 5, 256), []
    accepted = torch.arange(batch, device="cuda").int() % 5
    for ops in (ours, twin):
        states = randn(9, 256, seed=3)
        ops.keep(states, rows, features, accepted)
        kept.append(states[:-1])  # the spare row holds anything
    assert torch.equal(*kept)


@pytest.mark.parametrize(
    ("clusters", "words", "width", "read", "softcap"),
    [
        (2048, 128, 256, 32, None),
        (64, 64, 128, 8, 30.0),
        (7, 9, 40, 3, None),
        (300, 5, 72, 300, None),
        (600, 3, 8, 1, 5.0),
    ],
)
def test_an_ordered_head_scores_the_words_of_the_best_clusters(
    clusters, words, width, read, softcap
):
    """Of clusters with equal scores the first; a row's result is the same alone and among
    others."""
    rows, vocab, limit = 5, clusters * words - 4, 2**-16
    ids = torch.randperm(clusters * words, device="cuda").int().view(clusters, words)
    distinct = randn(-(-clusters // 4), width).bfloat16()
    centroids = distinct.repeat(4, 1)[:clusters].contiguous()
    table = randn(clusters, words, width, seed=1).bfloat16()
    head = OrderedHead(centroids, table, ids, read, vocab, softcap)
    ops = AssistantKernels(assistant_of().spec.arch, 256, torch.bfloat16, "fp8")
    h, norm = randn(rows, width, seed=2), 1 + 0.1 * randn(width, seed=3)
    logits = ops.ordered(h, norm, head)
    y = rms(h, norm, ops.arch.eps).double()
    fits = (y @ distinct.double().T).repeat(1, 4)[:, :clusters]
    best = fits.sort(stable=True, dim=-1, descending=True).indices[:, :read]
    for row, got in enumerate(logits):
        assert torch.equal(ops.ordered(h[row : row + 1], norm, head)[0], got)
        scores = (table[best[row]].double() @ y[row]).flatten()
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        word = ids[best[row]].flatten().long()
        there = word < vocab
        expected = torch.full((vocab,), -torch.inf, device="cuda", dtype=torch.double)
        expected[word[there]] = scores[there]
        assert torch.equal(torch.isfinite(got), torch.isfinite(expected))
        assert error(got[word[there]], scores[there]) < limit


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("head", HEADS)
def test_a_step_on_kernels_is_near_its_twin(kind, head, ahead):
    """From the target's own cache, at several lengths of text, and rows alone or together."""
    target = target_of(kind, 8, features=LAST)
    given = assistant_of(**HEADS[head])
    model, lengths = AssistantModel(given, target, ahead), (3, 40, 170, 1, 26, 64, 129, 400)
    random = np.random.default_rng(3)
    for slot, length in enumerate(lengths):
        target.prefill(Sequence(random.integers(3, 4096, length).tolist(), slot=slot), 0, length)
    last = where(*(length - 1 for length in lengths))
    tokens, rows = where(*random.integers(3, 4096, 8).tolist()), randn(9, ARCH.hidden)
    norm = target.weights.norm

    def step(first, stop):
        slots = where(*range(first, stop))
        seen = Rows(tokens[first:stop, None].contiguous(), last[first:stop], slots)
        logits, x = model.step(tokens[first:stop], States(rows, slots, norm), seen)
        return [part.clone() for part in (logits, model.handed(x))]

    together = step(0, 8)
    for row in range(8):
        for alone, both in zip(step(row, row + 1), together, strict=True):
            assert torch.equal(alone[0], both[row])
    twin = AssistantReference(given.spec.arch)
    plain = twin.pack(table_of(target), None, "bf16", "plain")
    model.ops, model.weights = twin, place(given, kind[0], twin, target)
    honest = target.weights
    try:  # the references read the very cache that the kernels wrote
        target.weights = replace(honest, embedding=plain)
        exact = step(0, 8)
    finally:
        target.weights = honest
    known = torch.isfinite(together[0]) & torch.isfinite(exact[0])
    assert known.sum() > 0.9 * torch.isfinite(exact[0]).sum()  # clusters near a tie may differ
    assert error(together[1], exact[1].double()) < 0.03
    assert error(together[0][known], exact[0][known].double()) < 0.03


def decode(target, drafter, cycle, mode):
    random = np.random.default_rng(3)
    prompts = [random.integers(3, 4096, n).tolist() for n in LENGTHS]
    seqs = [Sequence(p, MODES[mode](i), max_tokens=TOKENS) for i, p in enumerate(prompts)]
    engine = Engine(target, drafter, cycle)
    engine.run_to_end(seqs)
    return [seq.tokens for seq in seqs], engine.acceptance


@cache
def plain(kind, mode):
    """One slot, no features, launched kernel by kernel."""
    lone = target_of(kind, 1, False, ())
    return decode(lone, NoDrafter(), host_cycle(lone, NoDrafter(), 0), mode)[0]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("kind", [*KINDS, ("fp8-w8a8", "bfloat16")], ids="-".join)
def test_every_token_is_plain_decodings_and_loops_agree(kind, slots, head):
    if kind[0] == "fp8-w8a8" and head != "dense":
        pytest.skip("the target's arithmetic has no part in a head")
    target = target_of(kind, slots, features=LAST)
    model = AssistantModel(assistant_of(**HEADS[head]), target, 1)
    modes = MODES if kind == KINDS[0] else ("nucleus",)
    for k in (1, 4, 7):
        drafter = HostHead(AssistantDraftHead(model))
        device = device_loop(target, DeviceHead(drafter), k)
        for mode in modes:
            text, drafted = decode(target, drafter, device, mode)
            assert text == plain(kind, mode), (k, mode, "captured")
            assert drafted.drafted > 0
            if k != 4:
                continue
            text, again = decode(target, drafter, host_cycle(target, drafter, k), mode)
            assert text == plain(kind, mode), (k, mode, "host loop")
            assert drafted == again, (k, mode)  # the same guesses


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_assistant_of_e4bs_size_changes_no_token(ahead):
    """Its window of 512 is one key longer where queries stand behind the last key."""
    arch = released("gemma-4-e4b")
    options = CudaOptions(2, 640, k=3, dtype="fp8", features=(len(arch.layers) - 1,))
    target = random_target(arch, options)
    model = AssistantModel(random_assistant(released_size(arch)), target, ahead)
    drafter = HostHead(AssistantDraftHead(model))
    texts = []
    for guide, cycle in (
        (NoDrafter(), host_cycle(target, NoDrafter(), 0)),
        (drafter, host_cycle(target, drafter, 3)),
        (drafter, device_loop(target, DeviceHead(drafter), 3)),
    ):
        seqs = [Sequence([*range(5, 5 + n)], max_tokens=9) for n in (600, 20)]
        Engine(target, guide, cycle).run_to_end(seqs)
        texts.append([seq.tokens for seq in seqs])
    assert texts[1:] == texts[:1] * 2

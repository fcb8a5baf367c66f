"""On the card: the kernels of an EAGLE-3 head agree with their torch twins, with a row at any
place."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from drafters.eagle3.cuda.head import HeadModel, arch_of, place
from drafters.eagle3.cuda.kernels import DraftKernels
from drafters.eagle3.cuda.ops import DraftLayout, DraftReference, PairNorms, Pending
from drafters.eagle3.spec import random_head
from specdec.core.types import NO_GUESS, Sampling
from targets.cuda.guessing import DraftVocabulary
from targets.cuda.ops import Closing, Opening, Rows
from targets.cuda.sampling import blank_table
from targets.sampling_params import Rules, set_row
from tests.support.modes import MODES
from tests.targets.cuda.card import as_input, error, randn, rows_of
from tests.targets.cuda.gpu.card_targets import SPEC, table_of, target_of

pytestmark = pytest.mark.gpu


@cache
def both_ops(kind):
    arch = arch_of(replace(SPEC, heads=14, head_dim=128))
    return DraftKernels(arch, 256, {kind, "bf16"}), DraftReference(arch)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_inputs_of_a_head_equal_their_twins(kind, batch):
    ours, twin = both_ops(kind)
    limit = {"fp8": 2**-11, "bf16": 2**-8}[kind]
    features, slot = randn(4, 5, 3 * 256), torch.tensor([2, -1, 0] * 3, device="cuda").int()[:batch]
    for parts, weight in ((1, None), (1, randn(768)), (3, randn(768))):
        x = ours.features(features, slot, weight, parts, kind)
        exact = twin.features(features, slot, weight, parts, "float32")
        assert error(rows_of(x, 768, kind), exact) < limit
    values = randn(4096, 256).bfloat16()
    tables = [ops.pack(values, None, "bf16", "plain") for ops in (ours, twin)]
    tokens = torch.randint(-1, 4096, (batch, 3), device="cuda").int()[:, 1]
    weights = [1 + 0.1 * randn(256, seed=i) for i in range(3)]
    for feedback, residual in ((None, False), (weights[2], False), (weights[2], True)):
        norms = PairNorms(weights[0], weights[1], feedback, residual)
        h = randn(batch, 256, seed=7)
        got, theirs = h.clone(), h.clone()
        x = ours.pair(tables[0], tokens, got, norms, kind)
        exact = twin.pair(tables[1], tokens, theirs, norms, "float32")
        assert error(rows_of(x, 512, kind), exact) < limit
        torch.testing.assert_close(got, theirs, atol=1e-5, rtol=1e-5)


def parts_of(layout: DraftLayout) -> tuple[torch.Tensor, ...]:
    fed = layout.pending
    return fed.tokens, fed.start, fed.slot, *layout[1:]


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_bookkeeping_equals_its_twin(batch):
    ours, twin = both_ops("fp8")

    def whole(high, *shape):
        return torch.randint(0, high, shape, device="cuda").int()

    slots, width, k = 50, 5, 4
    pending = Pending(
        randn(slots + 1, width, 8), whole(99, slots + 1, width), whole(5, slots + 1) + 1
    )
    slot = torch.randperm(slots, device="cuda")[:batch].int()
    slot[batch // 2] = -1
    rows = Rows(whole(99, batch, k + 1), whole(80, batch) + 10, slot)
    got, theirs = (ops.prepare_rows(pending, rows, k, 60) for ops in (ours, twin))
    for a, b in zip(parts_of(got), parts_of(theirs), strict=True):
        assert torch.equal(a, b)
    for heard in (width, 2):  # of a cycle of fewer guesses too
        kept = []
        told = randn(batch, heard, 8, seed=2), whole(99, batch, heard), slot.clamp(min=0) % heard
        for ops in (ours, twin):
            kept.append(Pending(*(part.clone() for part in pending)))
            ops.keep(kept[-1], rows, *told)
        for got, theirs in zip(*kept, strict=True):
            assert torch.equal(got[:-1], theirs[:-1])  # the spare row holds anything


@pytest.mark.parametrize(
    ("drafts", "vocab"), [(820, 4096), (32000, 262144), (60000, 262144), (262144, 262144)]
)
@pytest.mark.parametrize("mode", [*MODES, "argmax"])
def test_guesses_equal_their_twins(mode, drafts, vocab):
    """With more draft words than a cluster holds, and with all words; with a row that sits out, and
    one with every word barred."""
    ours, twin = both_ops("fp8")
    batch, slots, width, j = 6, 9, 5, 2
    random = np.random.default_rng(1)
    ids = torch.from_numpy(np.sort(random.choice(vocab, drafts, replace=False)))
    inverse = torch.full((vocab,), -1)
    inverse[ids] = torch.arange(drafts)
    known = DraftVocabulary(ids.int().cuda(), inverse.int().cuda()) if drafts < vocab else None
    sampling_params = blank_table(slots, "cuda")
    for slot in range(slots):
        set_row(sampling_params, slot, MODES[mode](slot) if mode in MODES else Sampling(), 7)
    history = ids[torch.from_numpy(random.integers(0, 40, (slots + 1, 64)))].int().cuda()
    bias = torch.zeros(slots, vocab, device="cuda")
    bias[:, 7], bias[3] = 2.0, -torch.inf
    slot = torch.tensor([4, 0, -1, 3, 8, 1], device="cuda").int()
    start = torch.tensor([30, 8, 5, 20, 40, 62], device="cuda").int()
    logits, outcomes = 4 * randn(batch, drafts), []
    for ops in (ours, twin):
        at = Rows(torch.zeros(batch, width, device="cuda").int(), start, slot)
        text = history.clone()
        rules = Rules(bias, sampling_params, text[:-1])
        ops.guess(logits, known, rules, at, j, mode != "argmax")
        outcomes.append((at.tokens, text))
    for got, theirs in zip(*outcomes, strict=True):
        assert torch.equal(got, theirs)
    said = outcomes[0][0][:, j + 1]
    assert (said == NO_GUESS).tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_a_head_on_kernels_is_near_its_twin(kind):
    """A draft step of several lengths of text, and its rows alone or together."""
    spec = replace(SPEC, heads=14, head_dim=128)
    head = random_head(spec)
    dtype = {"fp8": "fp8", "bf16": "bfloat16"}[kind]
    target = target_of((dtype, "bfloat16"), 8)
    model = HeadModel(head, target)
    features = randn(1, 100, spec.features)
    ids = torch.randint(0, 4096, (1, 100), device="cuda").int()

    def where(*v):
        return torch.tensor(v, device="cuda").int()

    for slot in range(8):
        h = model.fuse(features, where(0))
        model.store(Rows(ids, where(0), where(slot)), h)
    lengths = where(100, 1, 37, 64, 65, 99, 3, 100)
    h0 = randn(8, 256)

    def step(first, last):
        rows = Rows(
            ids[0, first:last, None].contiguous(), lengths[first:last], where(*range(first, last))
        )
        h = h0[first:last].clone()
        return model.logits(h, model.mix(rows, h, own=True))

    together = step(0, 8)
    for row in range(8):
        assert torch.equal(step(row, row + 1)[0], together[row])
    twin = DraftReference(arch_of(spec))
    model.ops = twin
    model.weights = place(head, "float32", twin, target.device)
    weights = SimpleNamespace(embedding=twin.pack(table_of(target), None, "bf16", "plain"))
    model.target = SimpleNamespace(weights=weights)
    assert error(together, step(0, 8).double()) < {"fp8": 0.06, "bf16": 0.02}[kind]


def test_silu_and_bare_residuals():
    ours, _ = both_ops("fp8")
    values = randn(640, 256).bfloat16() * 0.06
    weight, x = ours.pack(values, None, "bf16", "gated"), randn(70, 256)
    for m in (1, 9, 70):  # all of the GEMM's sizes
        made = rows_of(ours.gated(as_input(x[:m], "bf16"), weight, "bf16"), 320, "bf16")
        gate, up = (x[:m].bfloat16().double() @ values.double().T).chunk(2, -1)
        assert error(made, F.silu(gate) * up) < 2**-8
    h, branch, norm = randn(5, 256), randn(5, 256, seed=1), randn(256, seed=2)
    got, kept = h.clone(), torch.zeros(5, 3, 256, device="cuda")
    made = ours.norm(got, Opening(norm, "bf16"), Closing(branch), kept[:, 1])
    assert torch.equal(got, h + branch)
    assert torch.equal(kept[:, 1], got) and not kept[:, ::2].any()
    exact = F.rms_norm((h + branch).double(), (256,), norm.double(), SPEC.eps)
    assert error(rows_of(made, 256, "bf16"), exact) < 2**-8

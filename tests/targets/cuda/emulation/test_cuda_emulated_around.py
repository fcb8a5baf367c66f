"""What stands around the large kernels, without a GPU: a cycle's bookkeeping, k groups' sums,
inputs in e4m3, a head's candidates, and weights in plain order again."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specdec.core.types import NO_GUESS, SAT_OUT
from targets.arch import released
from targets.cuda import int8, tiles
from targets.cuda.candidates import ROOM, Candidates
from targets.cuda.gemm import Gemm
from targets.cuda.norms import Norms
from targets.cuda.ops import Closing, Opening, Rows
from targets.cuda.reference import Reference
from targets.cuda.sampler import TURNS, CycleRecord, CycleResult, Sampler
from targets.cuda.untile import Untile
from targets.cuda.w8a8 import W8A8, Parts
from targets.model_folder import read_arch
from tests.support.tiny import write_tiny
from tests.targets.cuda.card import as_input, error, rows_of
from tests.targets.cuda.emulation.emulated import Kernels, Launcher, just_written
from tests.targets.cuda.emulation.emulated_weights import drawn, randn

pytestmark = pytest.mark.usefixtures("eager")
PROCESSORS = 2
CPU = torch.device("cpu")


def tree(parts: torch.Tensor) -> torch.Tensor:
    """parts [G, ...] added as linear layers add them."""
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_cycle_lays_out_accepts_and_commits():
    """Rows: one that goes on, one that meets a stop id, one that is over, one that is padding."""
    k, stride, ours = 3, 20, Sampler(Launcher(), CPU)
    history = torch.zeros((4, stride), dtype=torch.int32)
    length, live, turn = ints(5, 2, 7, 1), ints(1, 1, 0, 1), ints(0)
    history[0, 4], history[1, 1] = 30, 31
    slots, state = ints(0, 1, 2, -1), (length, live)
    rows = ours.prepare_rows(history, state, slots, k, turn)
    assert rows.tokens.tolist() == [[last, *[NO_GUESS] * k] for last in (30, 31, 0, 0)]
    assert (rows.start.tolist(), rows.slot.tolist()) == ([4, 1, 0, 0], [0, 1, -1, -1])
    rows.tokens[:, 1:] = ints([6, 7, 8], [6, 7, 8], [6, 7, 8], [6, 7, 8])
    chosen = ints([6, 7, 9, 1], [5, 7, 8, 2], [6, 7, 8, 1], [0, 0, 0, 0])
    just_written(rows.tokens, chosen)
    accepted = ours.accept(rows, chosen)
    assert accepted.tolist() == [2, 0, 3, 0]
    stops = torch.full((4, 16), NO_GUESS, dtype=torch.int32)
    stops[1, 3] = 5
    words = torch.full((TURNS, 4, CycleRecord.words(k)), 99, dtype=torch.int32)
    records = SimpleNamespace(words=words, turn=turn)
    result = CycleResult(chosen, accepted, ints(1, 2, 3, 4))
    just_written(chosen, accepted)
    ours.commit(history, state, rows, result, (stops, ints(9, 9, 9, 9)), records)
    assert length.tolist() == [8, 3, 7, 1] and live.tolist() == [1, 0, 0, 1]
    assert history[0, 5:8].tolist() == [6, 7, 9] and history[1, 2] == 5 and not history[2].any()
    record = CycleRecord.of(words[int(turn)].numpy())
    assert record.draft.tolist() == [[6, 7, 8]] * 4 and (record.chosen == chosen.numpy()).all()
    assert record.accepted.tolist() == [2, 0, SAT_OUT, SAT_OUT]
    assert record.source.tolist() == [1, 2, 3, 4] and (words[1 - int(turn)] == 99).all()


@pytest.mark.parametrize("epilogue", ["plain", "gated"])
def test_sums_of_k_groups_are_reduced(epilogue, monkeypatch):
    """As wide.cu leaves them, which only a card runs: in the order of its threads."""
    rows, n, k = 37, 72, 288
    weight = drawn((2 * n if epilogue == "gated" else n, k), "fp8", 1)
    linear = Gemm(Launcher(), PROCESSORS, 1.0)
    packed = weight.packed(linear, epilogue)
    plan = tiles.schedule_of(packed, PROCESSORS)
    x, sums = as_input(randn(rows, k, seed=2), "fp8"), []

    def wide(self, x, form, plan, job) -> None:
        size = plan.k_groups, plan.passes * plan.ctas * plan.tiles, -(-x.rows // x.block)
        size = *size, x.block // 8, 32, 4
        memory = (ctypes.c_float * torch.Size(size).numel()).from_address(job.partial)
        partial = torch.frombuffer(memory, dtype=torch.float32).view(size)
        partial.copy_(randn(*size, seed=3))
        just_written(partial)
        sums.append(tree(partial))

    monkeypatch.setattr(Gemm, "_wide", wide)
    assert plan.k_groups > 1
    if epilogue == "gated":
        out = torch.empty((2, tiles.padded_inputs(n, 8) // 32, x.block, 32), dtype=torch.int16)
        blocks = out.shape[1]
        linear.run(x, packed, out, 1, blocks, silu=True, f16=True)
        made = SimpleNamespace(data=out, rows=rows, block=x.block, k_blocks=blocks, k_groups=1)
        ours = rows_of(made, n, "fp8")
    else:
        ours = linear.linear(x, packed)
    tile, block, eight, lane, e = torch.meshgrid(*map(torch.arange, sums[0].shape), indexing="ij")
    row, token = tile * 16 + lane // 4 + e // 2 * 8, block * x.block + eight * 8 + lane % 4 * 2
    whole = torch.zeros((plan.passes * plan.ctas * plan.tiles * 16, 2 * x.block))
    whole[row, token + e % 2] = sums[0]
    if epilogue == "gated":
        halves = whole.view(-1, 2, 8, 2 * x.block).transpose(0, 1).flatten(1, 2)[:, :n, :rows]
        gate, up = (half * packed.scale.view(2, n, 1)[i] for i, half in enumerate(halves))
        expected = (torch.nn.functional.silu(gate) * up).T
        torch.testing.assert_close(ours, expected, rtol=2**-10, atol=2**-10)
    else:
        assert torch.equal(ours, (whole[:n, :rows] * packed.scale[:, None]).T)


@pytest.mark.parametrize("rows", [3, 40])
def test_inputs_are_rounded_to_e4m3(rows):
    values = (randn(rows, 520, seed=1) / tiles.ACTIVATION_SCALE).half()
    values[1] = 0
    # ties round to either side, depending on the factor's last bit
    ours = W8A8(Launcher(), PROCESSORS)
    just_written(values)
    made = ours.quantise(values)
    wide = values.float() * tiles.ACTIVATION_SCALE
    expected = as_input(wide, "w8a8", "row_parallel")
    torch.testing.assert_close(made.scale, expected.scale, rtol=1e-6, atol=1e-13)  # of zeros
    assert error(*(rows_of(x, 520, "w8a8") for x in (made, expected))) <= 2e-3


def test_a_cards_part_is_rounded_as_the_whole_is():
    """The kernel writes a scale for each of eight groups, whatever a part has."""
    rows, k = 5, 512
    values = (randn(rows, k, seed=1) / tiles.ACTIVATION_SCALE).half()
    just_written(values)
    whole = W8A8(Launcher(), PROCESSORS).quantise(values)
    for rank, part in enumerate(values.split(k // 2, 1)):
        own = part.contiguous()
        just_written(own)
        made = W8A8(Launcher(), PROCESSORS, 4).quantise(own)
        assert made.scale is not None and whole.scale is not None
        assert torch.equal(made.scale, whole.scale[4 * rank : 4 * rank + 4])
        at = slice(rank * k // 2, (rank + 1) * k // 2)
        assert torch.equal(rows_of(made, k // 2, "w8a8"), rows_of(whole, k, "w8a8")[:, at])
        assert made.scale.untyped_storage().nbytes() >= tiles.EIGHTHS * rows * 4


def test_candidates_are_scored_as_the_whole_head_scores_them():
    """rescore.cu: the same bits, and nothing of a row that has too many or none."""
    rows, n, k = 4, 200, 352
    linear, x = Gemm(Launcher(), PROCESSORS, 1.0), as_input(randn(rows, k, seed=2), "bf16")
    head, _ = int8.quantise(randn(n, k, seed=1).bfloat16())
    packed = linear.pack_head(head)
    whole = linear.linear(x, packed)
    count = ints(7, 0, ROOM + 1, 30)
    found = torch.full((rows, ROOM), 0x7FFF7FFF, dtype=torch.int32)
    expected = torch.full((rows, n), -torch.inf)
    for row in (0, 3):
        picked = torch.randperm(n, generator=torch.Generator().manual_seed(row))[: int(count[row])]
        found[row, : len(picked)] = picked.int()
        expected[row, picked] = whole[row, picked]
    out = torch.full((rows, n), -torch.inf)
    just_written(found, count, x.data)
    Candidates(Launcher(), linear, PROCESSORS, CPU)._rescore(x, packed, None, (found, count), out)
    assert torch.equal(out, expected)


def test_a_norm_rounds_to_e4m3():
    """A row of the stream with what is added to it."""
    rows, hidden, eps = 3, 256, 1e-6
    h, branch, pre, post = (randn(n, hidden, seed=n) for n in (rows, rows, 1, 2))
    pre, post = 1 + 0.1 * pre[0], 1 + 0.1 * post[0]
    ours, theirs = h.clone(), h.clone()
    just_written(ours, branch)
    x = Norms(Launcher(), eps).norm(ours, Opening(pre, "w8a8"), Closing(branch, post))
    reference = Reference(replace(released("gemma-4-31b"), eps=eps))
    expected = reference.norm(theirs, Opening(pre, "w8a8"), Closing(branch, post))
    torch.testing.assert_close(ours, theirs)
    assert error(rows_of(x, hidden, "w8a8"), expected) <= 2e-3


def test_sums_of_parts_are_added(monkeypatch):
    ours, parts, scale = (
        W8A8(Launcher(), PROCESSORS),
        randn(4, 3, 1028, seed=1),
        randn(1028, seed=2),
    )
    monkeypatch.setattr(ours, "branch", lambda x, weight: Parts(parts, scale))
    x = SimpleNamespace(data=parts, rows=3)
    just_written(parts)
    assert torch.equal(ours.linear(x, SimpleNamespace(n=1028)), tree(parts) * scale)


@pytest.mark.parametrize("kind", ["fp8", "bf16", "int4"])
@pytest.mark.parametrize(
    ("n", "k", "layout"), [(72, 360, "plain"), (144, 512, "row_parallel"), (80, 360, "gated")]
)
def test_weights_are_plain_again(kind, n, k, layout):
    weight = drawn((n, k), kind, 1)
    packed = weight.packed(Gemm(Launcher(), PROCESSORS, 1.0), layout)
    plain, _ = Untile(Launcher(), PROCESSORS).dense(packed)
    values = weight.codes.values().half() if weight.codes is not None else weight.values
    assert torch.equal(plain.float(), values.float())


def test_per_layer_inputs(tmp_path):
    write_tiny(tmp_path, "e2b")
    arch, m = read_arch(tmp_path), 3
    ours, reference = Kernels(arch, 128, torch.bfloat16, {"bf16"}), Reference(arch)
    width = len(arch.layers) * arch.per_layer_input
    mixed, norm = randn(m, width, seed=1), 1 + 0.1 * randn(arch.per_layer_input, seed=2)
    table = randn(arch.per_layer_vocab, width, seed=3).bfloat16()
    rows = Rows(ints([3], [NO_GUESS], [5]), ints(0, 0, 0), ints(0, 1, 2))
    just_written(mixed, rows.tokens)
    out = ours.per_layer_inputs(mixed, table, norm, rows)
    assert error(out, reference.per_layer_inputs(mixed, table, norm, rows)) < 1e-5

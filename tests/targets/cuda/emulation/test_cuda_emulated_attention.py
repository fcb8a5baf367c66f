"""attention_*.cu without a GPU: near float64, and a row's bits whichever kernels serve it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from targets.arch import LayerSpec, Rope
from targets.cuda import attention
from targets.cuda.attention import Attention
from targets.cuda.load import LONGEST
from tests.targets.cuda.attention_cases import POSITIONS, Case, make_alone, one_layer_of
from tests.targets.cuda.card import error
from tests.targets.cuda.emulation.emulated import Launcher, just_written

pytestmark = pytest.mark.usefixtures("eager")
PROCESSORS = 132
SHORT = LayerSpec(40, 2, 1, 48, Rope(1e4, 24), False, None, 256, None)
LONG = LayerSpec(None, 6, 2, 64, Rope(1e4, 32), False, None, 256, None)
BROAD = LayerSpec(1024, 2, 1, 256, Rope(1e4, 128), False, None, 256, None)
WIDE = LayerSpec(None, 4, 1, 512, Rope(1e6, 64), True, None, 256, None)
BLOCK = replace(SHORT, heads=4, k_eq_v=False, raw_values=True, both_ways=True)
"""Of a block drafter: keys behind a query are seen, and values are not normed."""
LAYERS = [pytest.param(layer, id=str(layer.head_dim)) for layer in (SHORT, LONG, BROAD, WIDE)]
KV = [pytest.param(kv, id=str(kv)) for kv in (torch.bfloat16, torch.float8_e4m3fn)]
STARTS = [0, 61, 126, 200]
"""Around edges of chunks and of windows."""
FAR = replace(SHORT, window=None), [4000], 4224
"""A layer, a start and positions: all lanes have two chunks, and the ring of keys turns."""
FARTHEST = replace(SHORT, window=None), [262_141], 262_144
"""2,048 chunks, 32 a lane."""
MANY = replace(SHORT, window=None)
"""64 lanes: the first sixteen have six chunks of 128 each before further ones have any."""
FIRST = 12_288
"""Keys of the first sixteen lanes alone."""
EVEN = 49_152
"""Keys from which on all 64 lanes have as many."""
TWO = replace(MANY, heads=4, kv_heads=2)
"""32 lanes: from twice `FIRST` on all have as many."""
LAST = SHORT, [999_935, 999_997], LONGEST
"""The last positions that a server takes: divisions by a ring's entries are exact up to them."""
PICTURES = (16, (3, 12), torch.bfloat16), (24, (2, 21), torch.float8_e4m3fn)
"""Tokens of a call, those of a picture among them, and the cache's dtype."""
NEAR = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 2e-3}


def case_of(layer: LayerSpec, kv: torch.dtype, starts=STARTS, positions: int = POSITIONS) -> Case:
    kv8, cpu = int(kv == torch.float8_e4m3fn), torch.device("cpu")
    ours = Attention(Launcher(), one_layer_of(layer), positions, kv8, cpu, PROCESSORS)

    def attend(qkv, *given):
        just_written(qkv)
        return ours.run(qkv, *given)

    return Case(layer, kv, starts, attend, "cpu", positions)


def softened(case: Case) -> Case:
    """All keys weigh about as much: by a peaked softmax most lanes would weigh nothing."""
    case.q_norm = 0.1 * case.q_norm
    return case


def same_and_near(case: Case, kv: torch.dtype, tokens: int) -> None:
    """Rows together and each third of them alone, and what is stored."""
    together, kept = case.all_together(tokens), case.stored()
    assert error(together, case.exact(tokens)) <= NEAR[kv], tokens
    for row in range(0, len(together), 3):
        assert torch.equal(case.alone(row, tokens), together[row : row + 1]), (tokens, row)
    assert all(map(torch.equal, case.stored(), kept)), tokens


def fused_equals_split(case: Case, tokens: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """With one kernel for all lanes, with two, and with one that prepares vectors before them.
    Returns what each of them gives."""
    monkeypatch.setattr(attention, "FUSED_FROM_CTAS", 1)
    case.fill()
    fused, kept = case.all_together(tokens), case.stored()
    monkeypatch.setattr(attention, "FUSED_FROM_CTAS", 10**9)
    for most in (48, 0):
        make_alone(monkeypatch, most)
        case.fill()
        assert torch.equal(case.all_together(tokens), fused), (tokens, most)
        assert all(map(torch.equal, case.stored(), kept)), (tokens, most)
    return fused


def test_a_row_is_itself():
    case = case_of(SHORT, torch.bfloat16)
    for tokens in (1, 5):
        same_and_near(case, torch.bfloat16, tokens)


def test_fused_attention_equals_split(monkeypatch):
    fused_equals_split(case_of(SHORT, torch.float8_e4m3fn), 5, monkeypatch)


@pytest.mark.parametrize("window", [40, None])
def test_tokens_of_a_block_see_each_other(window, monkeypatch):
    """At the edge of a chunk too, where the last chunk has new keys alone; and in tiles of rows of
    which the first ones see none of their own in it."""
    kv, starts = torch.bfloat16, [61, 126]
    case = case_of(replace(BLOCK, window=window), kv, starts)
    assert error(case.all_together(16), case.exact(16)) <= NEAR[kv]
    fused_equals_split(case, 16, monkeypatch)


@pytest.mark.parametrize("other", [{"both_ways": False}, {"raw_values": False}], ids=str)
def test_what_a_block_sees_makes_a_difference(other):
    kv, wrong = torch.bfloat16, replace(BLOCK, **other)
    case, another = (case_of(layer, kv, [126]) for layer in (BLOCK, wrong))
    assert error(another.all_together(8), case.exact(8)) > 0.1


@pytest.mark.parametrize("which", PICTURES, ids=["stored in attention", "stored before it"])
def test_tokens_of_a_picture_see_each_other(which, monkeypatch):
    """Those around it don't: at edges of chunks and tiles. The window bounds what lies before."""
    tokens, picture, kv = which
    case = case_of(replace(SHORT, window=12), kv, [0, 61, 120])
    case.picture = picture
    assert error(case.all_together(tokens), case.exact(tokens)) <= NEAR[kv]
    fused_equals_split(case, tokens, monkeypatch)


def test_what_a_picture_sees_makes_a_difference():
    """No reach at all is far off. One token's changes that token alone."""
    tokens, picture, kv = PICTURES[0]
    case = case_of(replace(SHORT, window=12), kv, [61])
    case.picture = picture
    qkv, rows = case.qkv(tokens), case.rows(tokens, [61], [0])
    right = case.call(qkv, rows)
    causal = replace(rows, reach=61 + torch.arange(tokens).int()[None])
    assert error(case.call(qkv, causal), case.exact(tokens)) > 0.1
    for token, reach in ((11, 12), (3, 3)):
        wrong = replace(rows, reach=rows.reach.clone())
        wrong.reach[0, token] = 61 + reach
        same = (case.call(qkv, wrong) == right).all(1)
        assert same.tolist() == [t != token for t in range(tokens)], token


def test_a_global_layer_knows_no_reach():
    case = case_of(LONG, torch.bfloat16, [61])
    plain = case.all_together(8)
    case.picture = (2, 7)
    assert torch.equal(case.all_together(8), plain)


def test_a_lane_goes_on_to_its_next_chunk(monkeypatch):
    layer, starts, positions = FAR
    case = case_of(layer, torch.bfloat16, starts, positions)
    same_and_near(case, torch.bfloat16, 2)
    fused_equals_split(case, 2, monkeypatch)


@pytest.mark.parametrize(
    ("layer", "starts", "positions"),
    [(MANY, [FIRST - 3, 20_000], 20_096), (MANY, [EVEN - 2], 49_280), (TWO, [24_574], 24_704)],
    ids=["few", "64", "32"],
)
def test_a_long_texts_lanes_are_summed_in_one_order(layer, starts, positions, monkeypatch):
    """Where further lanes begin, in their turns, and where all go on alike: in a batch or alone, at
    any width, by either kernel, and however a column's lanes and rows are dealt to CTAs."""
    kv, tokens = torch.bfloat16, 5
    case = softened(case_of(layer, kv, starts, positions))
    same_and_near(case, kv, tokens)
    together, kept = fused_equals_split(case, tokens, monkeypatch), case.stored()
    make_alone(monkeypatch, 48)
    for way in ((2, 2), (4, 1)):
        case.fill()
        monkeypatch.setattr(attention, "_spread", lambda *_, way=way: way)
        assert torch.equal(case.all_together(tokens), together), way
        assert all(map(torch.equal, case.stored(), kept)), way


def test_short_texts_have_the_bits_of_sixteen_lanes(monkeypatch):
    starts = [61, FIRST - 5, FIRST - 4]
    case = softened(case_of(MANY, torch.bfloat16, starts, FIRST + 128))
    found = case.all_together(5)
    monkeypatch.setattr(attention, "MOST_LANES", attention.LANES)
    others = case.all_together(5)
    assert torch.equal(found[:14], others[:14])
    assert not torch.equal(found[14], others[14])


def test_a_lane_has_many_chunks():
    layer, starts, positions = FARTHEST
    case = case_of(layer, torch.bfloat16, starts, positions)
    assert error(case.all_together(2), case.exact(2)) <= NEAR[torch.bfloat16]


def test_the_last_positions_have_entries_of_their_own():
    layer, starts, positions = LAST
    same_and_near(case_of(layer, torch.bfloat16, starts, positions), torch.bfloat16, 3)


@pytest.mark.parametrize("way", ["fused", "split", "prepare"])
def test_rows_that_sit_out_are_left_alone(way, monkeypatch):
    """Where all do, a kernel still waits for those before it."""
    monkeypatch.setattr(attention, "FUSED_FROM_CTAS", 1 if way == "fused" else 10**9)
    if way == "prepare":
        make_alone(monkeypatch, 0)
    case = case_of(SHORT, torch.bfloat16)
    whole, kept = case.all_together(2), case.stored()
    given = case.call(case.qkv(2), case.rows(2, STARTS, [0, -1, 2, -1]))
    assert torch.equal(given[:2], whole[:2]) and torch.equal(given[4:6], whole[4:6])
    case.call(case.qkv(2), case.rows(2, STARTS, [-1] * 4))
    assert all(map(torch.equal, case.stored(), kept))


@pytest.mark.slow
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer(layer, kv, monkeypatch):
    for tokens in (1, 3, 5, 8):
        same_and_near(case_of(layer, kv), kv, tokens)
        with monkeypatch.context() as patch:
            fused_equals_split(case_of(layer, kv), tokens, patch)

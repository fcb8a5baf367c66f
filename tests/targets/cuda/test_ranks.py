"""Several cards' parts of a model: what each has, and what can't be shared."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specdec.core.config import ModelConfig
from specdec.core.errors import UserError
from targets.arch import released
from targets.backend import backend_of
from targets.cuda import attention, exchange, int4
from targets.cuda.exchange import ExchangeMemory, check_peers
from targets.cuda.footprint import TargetShape, need
from targets.cuda.ranks import Rank, refuse_ranks
from targets.cuda.reader import quantise_fp8
from targets.tensors import all_tensors
from tests.targets.cuda.nvfp4_files import as_nvfp4

ARCH = released("gemma-4-12b")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def zeros_between(values: torch.Tensor) -> int4.Int4:
    narrow = int4.quantise(values)
    return replace(narrow, zero=torch.randint(0, 16, narrow.scale.shape).to(torch.uint8))


FORMS = {
    "bf16": lambda values: (values, None),
    "fp8": quantise_fp8,
    "int4": int4.quantise,
    "uint4": zeros_between,
    "nvfp4": as_nvfp4,
}


def values_of(raw) -> torch.Tensor:
    if not isinstance(raw, tuple):
        return raw.values().float() * raw.row[..., None]
    values, scale = raw
    return values.float() if scale is None else values.float() * scale[..., None]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize(("name", "axis"), [("q_proj", 0), ("o_proj", 1), ("down_proj", 1)])
def test_parts_are_the_whole(name, axis, count, form):
    raw = FORMS[form](drawn(64, 512))
    cuts = [Rank(i, count, ARCH).cut(f"layers.0.self_attn.{name}", raw) for i in range(count)]
    assert torch.equal(torch.cat([values_of(part) for part in cuts], axis), values_of(raw))


def test_a_single_kv_head_is_on_every_card():
    """12B's global layers; of the sliding ones' eight heads each card has some."""
    near = next(i for i, layer in enumerate(ARCH.layers) if layer.window)
    far = next(i for i, layer in enumerate(ARCH.layers) if not layer.window)
    assert (ARCH.layers[near].kv_heads, ARCH.layers[far].kv_heads) == (8, 1)
    raw = drawn(32, 8), None
    for number in range(4):
        rank = Rank(number, 4, ARCH)
        own = rank.cut(f"layers.{near}.self_attn.k_proj", raw)[0]
        assert torch.equal(own, raw[0][8 * number : 8 * number + 8])
        assert torch.equal(rank.cut(f"layers.{far}.self_attn.k_proj", raw)[0], raw[0])
        assert (rank.own.layers[near].kv_heads, rank.own.layers[far].kv_heads) == (2, 1)


@pytest.mark.parametrize("name", ["gemma-4-12b", "gemma-4-31b"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_part_of_the_heads_has_the_whole_ones_lanes(name, count):
    """So that keys are summed in the same order on any number of cards."""
    whole = released(name)
    pairs = zip(Rank(0, count, whole).own.layers, whole.layers, strict=True)
    assert all(attention._heads(own) == attention._heads(layer) for own, layer in pairs)


def test_what_is_not_divided_is_everywhere():
    raw = drawn(16, 8), None
    assert Rank(1, 2, ARCH).cut("embed_tokens", raw) is raw


def test_cards_need_less_than_one():
    shape = TargetShape(8, 8192, 5, 2048, "fp8", "fp8")
    one, two = need(ARCH, shape), need(Rank(0, 2, ARCH).own, shape)
    table = all_tensors(ARCH)["embed_tokens"].shape
    assert two.weights - one.weights // 2 == pytest.approx(table[0] * table[1], rel=0.05)
    assert two.cache < 0.75 * one.cache


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("gemma-4-31b", 3, "--tp must be 1, 2, 4, 8"),
        ("gemma-4-26b-a4b", 2, "run a server per card"),
        ("gemma-4-e4b", 2, "run a server per card"),
    ],
)
def test_models_that_cards_cant_share(name, count, words):
    with pytest.raises(UserError, match=words):
        refuse_ranks(released(name), count)


@pytest.mark.parametrize("name", ["gemma-4-12b", "gemma-4-31b"])
@pytest.mark.parametrize("count", [2, 4])
def test_dense_models_are_shared_by_two_or_four(name, count):
    refuse_ranks(released(name), count)


def test_kv_heads_that_cards_cant_divide():
    layer = replace(ARCH.layers[0], kv_heads=3)
    with pytest.raises(UserError, match="2 cards can't share layer 0: .* 3 K/V heads"):
        refuse_ranks(replace(ARCH, layers=(layer, *ARCH.layers[1:])), 2)


def test_widths_that_cards_cant_divide():
    layer = replace(ARCH.layers[0], ffw=960)
    with pytest.raises(UserError, match="2 cards can't share layer 0: .* 960 features"):
        refuse_ranks(replace(ARCH, layers=(layer, *ARCH.layers[1:])), 2)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"dtype": "float32"}])
def test_references_run_on_one_device(options):
    with pytest.raises(UserError, match="--tp with cuda needs GPUs"):
        backend_of(ModelConfig(backend="cuda", tp=2, **options))


def test_long_prompts_have_no_copy_on_cards():
    with pytest.raises(UserError, match="--prefill-copy is for one card"):
        backend_of(ModelConfig(backend="cuda", tp=2, prefill_copy=True))


def test_cards_that_are_not_there(monkeypatch):
    monkeypatch.setattr(exchange.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="--tp 2 needs 2 GPUs, this machine has 1"):
        check_peers(range(2))


def test_cards_that_cant_reach_each_other(monkeypatch):
    monkeypatch.setattr(exchange.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(exchange.torch.cuda, "can_device_access_peer", lambda a, b: False)
    with pytest.raises(UserError, match="GPU 0 can't reach the memory of GPU 1"):
        check_peers(range(2))


@pytest.mark.parametrize(
    "other", [{"name": "NVIDIA H100"}, {"major": 10}, {"multi_processor_count": 114}]
)
def test_cards_of_two_kinds(monkeypatch, other):
    kind = {"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132}
    found = [SimpleNamespace(**kind), SimpleNamespace(**kind | other)]
    monkeypatch.setattr(exchange.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(exchange.torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(exchange.torch.cuda, "get_device_properties", found.__getitem__)
    with pytest.raises(UserError, match="GPU 1 .* is of another kind than GPU 0 "):
        check_peers(range(2))
    check_peers([0, 0])


def test_no_room_for_what_cards_send_each_other(monkeypatch):
    """Another process may have taken what was free when it was counted."""
    fine = SimpleNamespace(value=0, name="CUDA_SUCCESS")
    full = SimpleNamespace(value=2, name="CUDA_ERROR_OUT_OF_MEMORY")
    answers = SimpleNamespace(
        cuCtxEnablePeerAccess=lambda *given: (fine,), cuMemAlloc=lambda size: (full, None)
    )
    monkeypatch.setattr(exchange, "check_peers", lambda devices: None)
    monkeypatch.setattr(exchange, "_context", lambda device: None)
    monkeypatch.setattr(exchange, "driver", lambda: answers)
    monkeypatch.setattr(exchange.torch.cuda, "device", lambda device: nullcontext())
    with pytest.raises(UserError, match="no room for what cards send each other"):
        ExchangeMemory(range(2), rows=8, width=64)

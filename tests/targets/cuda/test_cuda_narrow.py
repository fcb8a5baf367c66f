"""Narrow weights and caches of the CUDA target's references: what they round, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from targets.checkpoint import Checkpoint
from targets.cuda import reference
from targets.cuda.cache import read
from targets.cuda.formulas import FP8_MAX, as_e4m3
from targets.cuda.ops import Linear
from targets.stored import dequantise
from tests.support.tiny import IDS, VARIANTS, oracle, write_tiny
from tests.targets.cuda_runner import Routers, Runner

TOLERANCE = 5e-4


def relative(ours: np.ndarray, exact: np.ndarray) -> float:
    """Root mean square of the difference, relative to the exact one's."""
    return float(np.sqrt(((ours - exact) ** 2).mean() / (exact**2).mean()))


@pytest.mark.parametrize("variant", ["31b", "26b-a4b", "e2b"])
def test_fp8_files_equal_their_dequantised_tensors(tmp_path, monkeypatch, variant):
    """Weight-only arithmetic: what transformers computes on values * scale. Beside FP8 the rest
    is bf16, and so are its inputs: coarser than float32, but the same numbers, where routers pick
    the same experts (see the next test)."""
    write_tiny(tmp_path, variant, "fp8")
    wide, narrow, routers = Runner(tmp_path), Runner(tmp_path, "fp8"), Routers(monkeypatch)
    checkpoint = Checkpoint(tmp_path, wide.arch)
    tensors = {name: dequantise(checkpoint.read(name)) for name in checkpoint.specs}
    with torch.no_grad():
        logits = oracle(variant, tensors)(torch.tensor(IDS)).logits.numpy()
    routers.note()
    ours = wide.feed(IDS[:, :32], [0, 0], [0, 1])[0]
    assert np.abs(ours - logits[:, :32]).max() <= TOLERANCE
    routers.pick_again()
    near = narrow.feed(IDS[:, :32], [0, 0], [0, 1])[0]
    assert relative(near, logits[:, :32]) <= 0.05
    stored = checkpoint.read("layers.0.self_attn.o_proj")
    kept = narrow.weights.layers[0].o
    assert (kept.data.float().numpy() == stored.values.astype(np.float32)).all()
    assert (kept.scale.numpy() == stored.scale).all()


def test_a_router_flips_only_where_experts_are_all_but_equal(tmp_path, monkeypatch):
    """Why a narrow forward with experts may be far from the wide one (0.25 here, 0.005 with the
    same picks): if the scores of a row's second and third expert differ by less than bf16's
    resolution, it picks the other one, and all later states differ. It is no error of the experts'
    arithmetic."""
    # a flip needs layers to grow in
    deep = {"layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2}
    monkeypatch.setitem(
        VARIANTS, "26b-a4b", VARIANTS["26b-a4b"] | deep
    )  # a flip needs room to grow
    write_tiny(tmp_path, "26b-a4b", "fp8")
    routers, narrow = Routers(monkeypatch), [Runner(tmp_path, "fp8") for _ in range(2)]
    free = narrow[0].feed(IDS[:, :32], [0, 0], [0, 1])[0]
    routers.note()
    wide = Runner(tmp_path).feed(IDS[:, :32], [0, 0], [0, 1])[0]
    routers.pick_again()
    same = narrow[1].feed(IDS[:, :32], [0, 0], [0, 1])[0]
    assert relative(same, wide) <= 0.05 < relative(free, wide)
    # of 384 picks a few, each between shares that are 1/8 on average
    assert 0 < len(routers.margins) < 20 and max(routers.margins) < 1e-3


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_fp8_on_load_is_near_the_wide_file(tmp_path, storage):
    write_tiny(tmp_path, "31b", storage)
    wide, narrow = Runner(tmp_path), Runner(tmp_path, "fp8")
    layer = narrow.weights.layers[0]
    assert (layer.o.kind, layer.gate_up.kind, narrow.weights.head.kind) == ("fp8", "fp8", "bf16")
    exact = wide.weights.layers[0].gate_up.data
    near = layer.gate_up.data.float() * layer.gate_up.scale[:, None]
    assert ((near - exact).abs() <= exact.abs() / 16 + layer.gate_up.scale[:, None] / 512).all()


class Checks:
    """What a reference's 8-bit linear layers make of their inputs beside float64, layer by layer,
    and how far each input is from where it was rounded to, in steps of e4m3."""

    def __init__(self, ops: reference.Reference, patch: pytest.MonkeyPatch) -> None:
        self.products: list[float] = []
        self.steps: list[float] = []
        self._linear, self._rounds = ops.linear, reference.as_e4m3
        patch.setattr(ops, "linear", self._product)
        patch.setattr(ops, "branch", self._product)
        patch.setattr(reference, "as_e4m3", self._rounded)

    def _product(self, x: torch.Tensor, weight: Linear) -> torch.Tensor:
        out = self._linear(x, weight)
        if weight.kind == "w8a8":
            values = weight.data.double() * weight.scale.double()[:, None]
            self.products.append(relative(out.double().numpy(), (x.double() @ values.T).numpy()))
        return out

    def _rounded(self, x: torch.Tensor, groups: int = 1) -> torch.Tensor:
        near = self._rounds(x, groups)
        each = -(-x.shape[-1] // (groups * 32)) * 32
        for wide, narrow in zip(
            x.double().split(each, -1), near.double().split(each, -1), strict=True
        ):
            unit = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
            exponent = (wide / unit).abs().clamp(min=2.0**-6).log2().floor()
            self.steps.append(float(((narrow - wide) / unit / 2 ** (exponent - 3)).abs().max()))
        return near


@pytest.mark.parametrize("variant", VARIANTS)
def test_w8a8_is_the_same_weights_and_inputs_of_4_bits(tmp_path, monkeypatch, variant):
    """A scale per token and linear layer. Experts, and what is not quantised, stay as they are."""
    write_tiny(tmp_path, variant, "fp8")
    wide, narrow = Runner(tmp_path, "fp8"), Runner(tmp_path, "fp8-w8a8")
    for ours, theirs in zip(narrow.weights.layers, wide.weights.layers, strict=True):
        assert (ours.qkv.kind, ours.o.kind, ours.gate_up.kind, ours.down.kind) == ("w8a8",) * 4
        assert torch.equal(ours.down.data.view(torch.uint8), theirs.down.data.view(torch.uint8))
        assert ours.moe is None or (ours.moe.down.kind, ours.moe.router.kind) == ("fp8", "bf16")
        assert ours.per_layer is None or ours.per_layer.gate.kind == "bf16"
    checks = Checks(narrow.ops, monkeypatch)
    near, exact = (r.feed(IDS[:, :32], [0, 0], [0, 1])[0] for r in (narrow, wide))
    assert relative(near, exact) > 1e-3
    # each product and each rounding on its own: models as small as these amplify what rounding does
    assert len(checks.products) >= 4 * len(narrow.weights.layers)
    assert max(checks.products) <= 1e-6 and max(checks.steps) <= 0.5 + 1e-5


def test_inputs_round_to_e4m3_of_their_own_largest():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=random) * torch.tensor([1e-3, 1.0, 1e4, 0.0, 3.0])[:, None]
    near = as_e4m3(x)
    largest = x.abs().amax(-1, keepdim=True)
    assert ((near - x).abs() <= x.abs() / 16 + largest / 448 / 512).all()
    # 448 steps of largest / 448, of which each is rounded
    torch.testing.assert_close(near.abs().amax(-1), largest[:, 0], rtol=2**-23, atol=0)
    assert torch.equal(as_e4m3(x[2:3]), near[2:3]) and not near[3].any()


@pytest.mark.parametrize(("dtype", "step"), [(torch.bfloat16, 2**-8), (torch.float8_e4m3fn, 2**-4)])
def test_narrow_caches_round_and_nothing_else(tiny, dtype, step):
    exact, near = Runner(tiny["31b"]), Runner(tiny["31b"], cache_dtype=dtype)
    for runner in (exact, near):
        runner.feed(IDS[:, :32], [0, 0], [2, 1])
    for wide, narrow in zip(
        *(read(r.cache.layers[0], 2, 0, 32) for r in (exact, near)), strict=True
    ):
        assert ((narrow.float() - wide).abs() <= wide.abs() * step + 2**-10).all()
    assert not near.cache.layers[0].k[0].float().any()  # nobody's slot

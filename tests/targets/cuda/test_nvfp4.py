"""NVFP4 on the CUDA target: products are exact, packed words have the kernels' layout, files
determine the kind by themselves, and an invalid file is refused in one line."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.core.errors import UserError
from targets.checkpoint import Checkpoint
from targets.cuda import nvfp4
from targets.cuda.footprint import weight_bytes
from targets.cuda.load import CudaOptions, load_target as load_cuda, plan_of, stored_dtype
from targets.cuda.nvfp4 import Nvfp4
from targets.jax.load import JaxOptions, load_target as load_jax
from targets.model_folder import read_arch
from targets.stored import NIBBLES, dequantise
from tests.support import tiny
from tests.support.tiny import VOCAB, oracle
from tests.targets.cuda.nvfp4_files import in_part, write_nvfp4
from tests.targets.cuda_runner import Runner
from tests.targets.four_bits import WIDER, write_quantised

IDS = np.random.default_rng(1).integers(0, VOCAB, (2, 8))
LAYER = "model.language_model.layers.0"
CPU = CudaOptions(slots=1, max_len=32, device="cpu")
IN_4_BITS = CudaOptions(slots=1, max_len=32, device="cpu", dtype="int4")


@pytest.fixture(autouse=True)
def wider(monkeypatch):
    monkeypatch.setitem(tiny.VARIANTS, "31b", tiny.VARIANTS["31b"] | WIDER)


def opened(path):
    return Checkpoint(path, read_arch(path))


def change(path, how):
    """The file's tensors, changed."""
    tensors = load_file(path / "model.safetensors")
    how(tensors)
    save_file(tensors, path / "model.safetensors")


def test_every_code_times_every_scale_is_exact():
    """16 codes by 254 scales, both signs, subnormals and 0: all that a file can hold but NaN."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    scale = bytes_[(bytes_ & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(16).expand(len(scale), -1)
    weight = Nvfp4(codes, scale[:, None].expand(-1, 16), torch.ones(len(scale)))
    meant = NIBBLES["e2m1"].astype(np.float64).repeat(16) * scale.double().numpy()[:, None]
    assert weight.values().dtype == torch.float16 and len(scale) == 254
    np.testing.assert_array_equal(weight.values().double() * 2**nvfp4.LOWERED, meant)


def test_words_are_what_the_kernels_take_apart():
    parts = nvfp4.parts_of_words().tolist()
    draw = random.Random(1)
    for _ in range(2000):
        codes = [draw.randrange(16) for _ in range(8)]
        word = 0
        for part, code in zip(parts, codes, strict=True):
            word ^= part[code]
        apart = nvfp4.codes_of(word & 0xFFFFFFFF)
        assert [apart >> 4 * i & 15 for i in range(8)] == codes


def test_a_file_picks_the_kind_by_itself(tmp_path):
    """Of compressed-tensors and of ModelOpt, by the dtype of what it stores."""
    write_quantised(tmp_path, "31b", "nvfp4")
    assert stored_dtype(opened(tmp_path)) == "int4"
    change(tmp_path, as_modelopt)
    assert stored_dtype(opened(tmp_path)) == "int4"
    layer = Runner(tmp_path, "int4", torch.bfloat16).weights.layers[0]
    assert {w.kind for w in (layer.qkv, layer.o, layer.gate_up, layer.down)} == {"nvfp4"}


def as_modelopt(tensors):
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        base = name.removesuffix(".weight_packed")
        tensors[f"{base}.weight"] = tensors.pop(name)
        tensors[f"{base}.weight_scale_2"] = 1 / tensors.pop(f"{base}.weight_global_scale")[0]


def test_what_the_file_keeps_otherwise_stays_so(tmp_path):
    """Wide (with all weights that are joined to it) or FP8. Memory is counted accordingly before
    loading, and the logits follow from the file's values."""
    tiny.write_tiny(tmp_path / "wide", "26b-a4b")
    write_nvfp4(tmp_path / "wide", tmp_path, in_part)
    runner = Runner(tmp_path, "int4", torch.bfloat16)
    first, second, third = runner.weights.layers[:3]

    def kinds(layer):
        return [w.kind for w in (layer.qkv, layer.o, layer.gate_up, layer.down, layer.moe.down)]

    assert kinds(first) == ["fp8", "bf16", "nvfp4", "bf16", "bf16"]
    assert kinds(second) == ["fp8", "nvfp4", "bf16", "nvfp4", "nvfp4"]
    assert kinds(third) == ["fp8", *["nvfp4"] * 4]
    checkpoint, arch = opened(tmp_path), read_arch(tmp_path)
    own = plan_of(checkpoint, arch, IN_4_BITS).own
    assert (own["layers.2.self_attn.q_proj"], own["layers.0.mlp.down_proj"]) == ("fp8", "bfloat16")
    assert "layers.0.mlp.up_proj" not in own
    more = weight_bytes(arch, "int4", own) - weight_bytes(arch, "int4")
    by_hand = {"fp8": 1 - 9 / 16, "bfloat16": 2 - 9 / 16}
    rows = 4 * sum(np.prod(checkpoint.specs[n].shape[:-1]) for n in own if own[n] == "bfloat16")
    values = sum(by_hand[kind] * np.prod(checkpoint.specs[n].shape) for n, kind in own.items())
    assert more == values - rows
    meant = {name: dequantise(checkpoint.read(name)) for name in checkpoint.specs}
    with torch.no_grad():
        expected = oracle("26b-a4b", meant)(torch.tensor(IDS)).logits.numpy()
    ours, _ = runner.feed(IDS, [0, 0], [0, 1])
    assert np.linalg.norm(ours - expected) <= 2e-2 * np.linalg.norm(expected)


def test_a_scale_that_is_no_number_is_refused(tmp_path):
    write_quantised(tmp_path, "31b", "nvfp4")
    nan = torch.tensor([0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    change(tmp_path, lambda t: t[f"{LAYER}.mlp.up_proj.weight_scale"][5].copy_(nan))
    told = rf"{tmp_path}: layers.0.mlp.up_proj holds NaN"
    for load in (
        lambda: load_cuda(tmp_path, IN_4_BITS),
        lambda: load_cuda(tmp_path, CPU),
        lambda: load_jax(tmp_path, JaxOptions(slots=1, max_len=32)),
    ):
        with pytest.raises(UserError, match=told):
            load()


UP = f"{LAYER}.mlp.up_proj"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda t: t.pop(f"{UP}.weight_global_scale"), r"weight_global_scale is missing"),
        (lambda t: t.pop(f"{UP}.weight_scale"), r"weight_scale is missing"),
        (
            lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"][:, :4].contiguous()}),
            r"groups of 32 inputs, where 16 are expected",
        ),
        (
            lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"].bfloat16()}),
            r"weight_scale is BF16: the scales of NVFP4 are F8_E4M3",
        ),
        (
            lambda t: t.update({f"{UP}.weight_packed": t[f"{UP}.weight_packed"][:, :32].clone()}),
            r"\[256, 32\], config.json needs \[256, 64\]",
        ),
        (
            lambda t: t[f"{UP}.weight_global_scale"].zero_(),
            r"weight_global_scale is 0.0: a positive number is expected",
        ),
        (
            lambda t: t.update({f"{UP}.weight_global_scale": torch.ones(2)}),
            r"weight_global_scale has shape \[2\]: one number is expected",
        ),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, how, message):
    """From the headers, before anything is loaded, with the same error from both targets."""
    write_quantised(tmp_path, "31b", "nvfp4")
    change(tmp_path, how)
    with pytest.raises(UserError, match=message) as problem:
        load_cuda(tmp_path, IN_4_BITS)
    assert "\n" not in str(problem.value)
    with pytest.raises(UserError, match=message):
        opened(tmp_path)

"""4-bit checkpoints, and FP8 in blocks: we compute with the values that the library that wrote them
reads; an invalid file is refused in one line."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.core.errors import UserError
from targets import shards
from targets.checkpoint import Checkpoint
from targets.cuda import four_bits, int4
from targets.cuda.upload import as_tensor
from targets.jax import model
from targets.jax.int4 import quantise_int4
from targets.jax.load import JaxOptions, load_target
from targets.jax.params import Grouped, load_params
from targets.model_folder import read_arch
from targets.schemes import Weight
from targets.stored import dequantise
from tests.support import tiny
from tests.support.lossless import check_device, check_host, forget_targets
from tests.support.tiny import IDS, oracle, write_tiny
from tests.targets.cuda_runner import Runner
from tests.targets.four_bits import SCHEMES, WIDER, write_quantised

pytestmark = pytest.mark.usefixtures("cheap_programs")

TOLERANCE = 5e-4


@pytest.fixture(autouse=True)
def wider(monkeypatch):
    for variant in ("31b", "26b-a4b", "e4b"):
        monkeypatch.setitem(tiny.VARIANTS, variant, tiny.VARIANTS[variant] | WIDER)


@pytest.mark.parametrize(
    ("variant", "scheme"),
    [
        *(("31b", scheme) for scheme in SCHEMES),
        ("26b-a4b", "int4 by 32"),
        ("26b-a4b", "nvfp4"),
        ("e4b", "int4 by 64"),
    ],
)
def test_logits_are_those_of_what_the_library_reads(tmp_path, variant, scheme):
    """Each weight alone, then transformers in float32 on all of them, beside both targets."""
    meant = write_quantised(tmp_path, variant, scheme)
    arch = read_arch(tmp_path)
    checkpoint = Checkpoint(tmp_path, arch)
    narrow = 0
    for name, values in meant.items():
        stored = checkpoint.read(name)
        narrow += not stored.wide
        np.testing.assert_allclose(dequantise(stored), values, 1e-6, 1e-9)
    assert narrow >= 10
    with torch.no_grad():
        expected = oracle(variant, meant)(torch.tensor(IDS)).logits.numpy()
    params = load_params(checkpoint, arch, jnp.float32)
    ours = jax.jit(lambda p: model.sequence_logits(p, arch, IDS))(params)
    assert np.abs(ours - expected).max() <= TOLERANCE
    cuda, _ = Runner(tmp_path).feed(IDS[:, :8], [0, 0], [0, 1])
    assert np.abs(cuda - expected[:, :8]).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("variant", "scheme"),
    [
        *(("31b", scheme) for scheme in SCHEMES if "fp8" not in scheme),
        ("26b-a4b", "nvfp4"),
        ("e4b", "nvfp4"),
    ],
)
def test_cuda_multiplies_what_the_library_reads(tmp_path, variant, scheme):
    """To the bit where a code's difference from its zero point has no more bits than 4, and as near
    as a float16 is where it has; NVFP4 but for the last bit of a tensor's scale, which others
    divide by. In the whole, beside transformers in float32."""
    meant = write_quantised(tmp_path, variant, scheme)
    arch = read_arch(tmp_path)
    checkpoint, narrow = Checkpoint(tmp_path, arch), 0
    rounded = 2**-11 if "zero" in scheme else 2**-22 if scheme == "nvfp4" else 0
    for name, values in meant.items():
        stored = checkpoint.read(name)
        weight = four_bits.from_stored(stored, as_tensor(stored.values))
        if weight is not None:
            narrow += 1
            ours = (weight.values().float() * weight.row[..., None]).numpy()
            np.testing.assert_allclose(ours, values, rounded, 1e-9)
    assert narrow >= 10
    with torch.no_grad():
        expected = oracle(variant, meant)(torch.tensor(IDS)).logits.numpy()[:, :8]
    runner = Runner(tmp_path, "int4", torch.bfloat16)
    ours, _ = runner.feed(IDS[:, :8], [0, 0], [0, 1])
    assert np.linalg.norm(ours - expected) <= 2e-2 * np.linalg.norm(expected)
    kind = "nvfp4" if scheme == "nvfp4" else "uint4" if "zero" in scheme else "int4"
    layers = runner.weights.layers
    assert {w.kind for layer in layers for w in (layer.qkv, layer.gate_up, layer.down)} == {kind}
    assert all(moe.down.kind == kind for layer in layers if (moe := layer.moe))


@pytest.mark.parametrize("shape", [(48, 64), (5, 40), (3, 16, 96)])
def test_cuda_rounds_to_the_scale_of_the_least_error(shape):
    """As JAX does, code by code; widths that no group divides too."""
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    ours = int4.quantise(torch.from_numpy(values))
    assert ours.kind == "int4" and ours.codes.shape == shape
    values_of_ours = (ours.values().float() * ours.row[..., None]).numpy()
    np.testing.assert_allclose(values_of_ours, dequantise(quantise_int4(values)), 1e-6, 1e-9)


def test_jax_keeps_four_bits_in_memory(tmp_path):
    for scheme, kind in (("int4 by 64", jnp.int4), ("nvfp4", jnp.float4_e2m1fn)):
        write_quantised(tmp_path / scheme, "31b", scheme)
        arch = read_arch(tmp_path / scheme)
        params = load_params(Checkpoint(tmp_path / scheme, arch), arch, jnp.float32)
        weight = params.segments[0][0]["mlp.gate_proj"]
        assert isinstance(weight, Grouped) and weight.values.dtype == kind


@pytest.mark.slow
def test_no_draft_changes_a_token(tmp_path):
    """Host and device loops with a narrow model, with any drafter."""
    write_quantised(tmp_path, "31b", "int4 by 32, zero points")
    check_host(tmp_path, "nucleus", 3, (4,), adversaries=("ngram", "right", "random"))
    check_device(tmp_path, "nucleus", 3, (4,), adversaries=("right", "wild"))
    forget_targets()


def test_int4_on_load_is_nearer_than_the_scale_of_the_largest(tmp_path):
    values = np.random.default_rng(0).standard_normal((5, 3, 80)).astype(np.float32)
    stored = quantise_int4(values)
    assert stored.values.shape == (5, 3, 40) and stored.groups.scale.shape == (5, 3, 3)
    parts = np.pad(values, [(0, 0), (0, 0), (0, 16)]).reshape(5, 3, 3, 32)
    scale = np.abs(parts).max(-1, keepdims=True) / 7
    rounded = (np.rint(parts / scale) * scale).reshape(5, 3, 96)[..., :80]
    assert np.square(dequantise(stored) - values).sum() < 0.9 * np.square(rounded - values).sum()


def test_int4_on_load_runs(tmp_path):
    write_tiny(tmp_path, "26b-a4b")
    target = load_target(tmp_path, JaxOptions(max_len=64, narrow="int4"))
    weight = target.params.segments[0][0]["experts.down_proj"]
    assert isinstance(weight, Grouped) and weight.values.dtype == jnp.int4


def tensors_of(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


NAME = "model.language_model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("int4 by 32", lambda t: t.pop(f"{NAME}.weight_scale"), r"up_proj.weight_scale is missing"),
        (
            "int4 by 32, zero points",
            lambda t: t.pop(f"{NAME}.weight_zero_point"),
            r"asymmetric but .*weight_zero_point is missing",
        ),
        (
            "int4 by 32",
            lambda t: t.update({f"{NAME}.weight_scale": torch.ones(256, 2)}),
            r"groups of 64 inputs, where 32 are expected",
        ),
        (
            "int4 by 32",
            lambda t: t.update({f"{NAME}.weight_scale": torch.ones(256, 3)}),
            r"\[256, groups\], groups of equally many",
        ),
        (
            "int4 by 32",
            lambda t: t.update({f"{NAME}.weight_packed": torch.ones(256, 32, dtype=torch.int32)}),
            r"\[256, 32\], config.json needs \[256, 16\] \(of 4 bits",
        ),
        (
            "int4 by 32",
            lambda t: t.update({f"{NAME}.weight_g_idx": torch.arange(128).int() % 4}),
            r"ordered by activation",
        ),
        ("nvfp4", lambda t: t.pop(f"{NAME}.weight_global_scale"), r"global_scale is missing"),
        (
            "nvfp4",
            lambda t: t.update({f"{NAME}.weight_scale": torch.ones(256, 4)}),
            r"groups of 32 inputs, where 16 are expected",
        ),
        (
            "fp8 in blocks",
            lambda t: t.update({f"{NAME}.weight_scale": torch.ones(4, 2)}),
            r"per block of 128 x 128",
        ),
        (
            "int4 by 32",
            lambda t: t.pop(f"{NAME}.weight_packed"),
            r"quantised as compressed-tensors",
        ),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, scheme, change, message):
    write_quantised(tmp_path, "31b", scheme)
    tensors_of(tmp_path, change)
    with pytest.raises(UserError, match=message) as problem:
        checkpoint = Checkpoint(tmp_path, read_arch(tmp_path))
        checkpoint.read("layers.0.mlp.up_proj")
    assert "\n" not in str(problem.value)


def test_as_many_blocks_as_output_channels_are_blocks(tmp_path):
    """31B's global output projections, [5376, 16384], have 42 x 128 blocks."""
    scale = torch.tensor([[1.0, 2.0]])
    tensors = {"o.weight": torch.ones(2, 256).to(torch.float8_e4m3fn), "o.weight_scale": scale}
    save_file(tensors, tmp_path / "model.safetensors")
    weight = Weight(tmp_path, shards.tensors_of(tmp_path), "o", (2, 256), {})
    weight.check()
    expected = scale.repeat(2, 1).repeat_interleave(128, 1)
    np.testing.assert_array_equal(dequantise(weight.read()), expected)


def test_modelopts_names(tmp_path):
    """The same weight, where the scales' own scale is multiplied."""
    meant = write_quantised(tmp_path, "31b", "nvfp4")

    def rename(tensors):
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            base = name.removesuffix(".weight_packed")
            tensors[f"{base}.weight"] = tensors.pop(name)
            tensors[f"{base}.weight_scale_2"] = 1 / tensors.pop(f"{base}.weight_global_scale")[0]
            tensors[f"{base}.input_scale"] = torch.ones(())

    tensors_of(tmp_path, rename)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(tmp_path, read_arch(tmp_path))
    for name, values in meant.items():
        np.testing.assert_allclose(dequantise(checkpoint.read(name)), values, 1e-6, 1e-9)

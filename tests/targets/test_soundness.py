"""A weight that is no number is refused at load, by name, on both backends and in any storage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from drafters.eagle3.files import load_head, save_flat
from drafters.eagle3.spec import random_head, sized
from specdec.core.errors import UserError
from targets.cuda import soundness as on_device
from targets.cuda.load import CudaOptions, load_target as load_cuda
from targets.cuda.upload import as_tensor
from targets.jax import model
from targets.jax.blank_params import abstract_params
from targets.jax.load import JaxOptions, load_target as load_jax
from targets.model_folder import read_arch
from targets.soundness import is_sound
from tests.support.tiny import PREFIX, write_tiny

KINDS = ("bfloat16", "float16", "float32", "float8_e4m3fn")


def kind_of(name: str):
    return getattr(ml_dtypes, name, None) or np.dtype(name).type


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_value_is_found_wherever_it_stands(kind, bad) -> None:
    rows = np.linspace(-400, 400, 600).astype(kind_of(kind)).reshape(20, 30)
    rows[0, 0] = np.finfo(np.float32).tiny  # rounds to 0 or to something finite
    assert is_sound(rows) and on_device.is_sound(as_tensor(rows))
    for place in (0, 299, 599):
        damaged = rows.copy().reshape(-1)
        damaged[place] = bad
        assert not is_sound(damaged) and not on_device.is_sound(as_tensor(damaged))


def test_integers_and_the_largest_numbers_are_sound() -> None:
    for values in (np.full(9, 127, np.int8), np.full(9, 448, ml_dtypes.float8_e4m3fn)):
        assert is_sound(values) and on_device.is_sound(as_tensor(values))
        assert is_sound(-values) and on_device.is_sound(as_tensor(-values))
    assert is_sound(np.full(3, np.finfo(np.float32).max))


def spoil(file: Path, name: str) -> None:
    """All bits of a tensor's last value set: NaN in every kind of float."""
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    entry = json.loads(data[8:start])[name]
    stop = start + entry["data_offsets"][1]
    size = {"F32": 4, "BF16": 2, "F8_E4M3": 1}[entry["dtype"]]
    data[stop - size : stop] = b"\xff" * size
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("storage", "name"),
    [
        ("bfloat16", "layers.1.mlp.up_proj.weight"),
        ("bfloat16", "norm.weight"),
        ("fp8", "layers.1.mlp.up_proj.weight"),
        ("fp8", "layers.1.mlp.up_proj.weight_scale"),
        ("int8", "layers.1.mlp.up_proj.weight_scale"),
    ],
)
def test_a_damaged_tensor_is_named(tmp_path, storage, name) -> None:
    write_tiny(tmp_path, "31b", storage)
    spoil(tmp_path / "model.safetensors", PREFIX + name)
    told = rf"{tmp_path}: {name.rpartition('.')[0]} holds NaN"
    with pytest.raises(UserError, match=told):
        load_jax(tmp_path, JaxOptions(slots=1, max_len=32))
    with pytest.raises(UserError, match=told):
        load_cuda(tmp_path, CudaOptions(slots=1, max_len=32, device="cpu"))


def test_a_damaged_head_is_refused(tmp_path) -> None:
    write_tiny(tmp_path / "model", "12b")
    arch = read_arch(tmp_path / "model")
    save_flat(random_head(sized(arch)), tmp_path / "head", (1,))
    spoil(tmp_path / "head" / "model.safetensors", "fc.weight")
    with pytest.raises(UserError, match=r"head: fc holds NaN"):
        load_head(tmp_path / "head", arch)


def test_llamas_layers_are_not_run_as_gemmas(tmp_path) -> None:
    """The CUDA target runs them, as a draft head's; this forward would ignore what they are."""
    write_tiny(tmp_path, "31b")
    arch = read_arch(tmp_path)
    params, tokens = abstract_params(arch, jnp.float32), jax.ShapeDtypeStruct((1, 4), int)

    def trace(arch):
        return jax.eval_shape(lambda *of: model.sequence_hidden(of[0], arch, of[1]), params, tokens)

    assert trace(arch).last.shape == (1, 4, arch.hidden)
    raw = (replace(arch.layers[0], normed=False), *arch.layers[1:])
    for other in (replace(arch, silu=True), replace(arch, layers=raw)):
        with pytest.raises(AssertionError):
            trace(other)

"""Weights rounded to NVFP4 without a library: on a GPU, and as files, any model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from targets.checkpoint import Checkpoint
from targets.cuda.nvfp4 import GROUP, LOWERED, Nvfp4
from targets.cuda.reader import quantise_fp8
from targets.model_folder import read_arch
from targets.stored import dequantise
from targets.tensors import stored_name
from tests.support.tiny import PREFIX

Other = Callable[[str], str | None]
LARGEST = 6.0, 448.0
"""Of e2m1, and of its scales."""
EDGES = 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0
"""Between the magnitudes of e2m1."""


def as_nvfp4(values: Tensor) -> Nvfp4:
    """[..., n, k] to nearest. The halves of n have a scale of their own, as gate and up have."""
    halves = 2 if values.shape[-2] % 2 == 0 else 1
    codes, scale, factor = rounded(values.unflatten(-2, (halves, -1)))
    row = (factor * 2**LOWERED).expand(scale.shape[:-1])
    return Nvfp4(codes.flatten(-3, -2), scale.flatten(-3, -2), row.flatten(-2).contiguous())


def in_part(name: str) -> str | None:
    """For `write_nvfp4`: a model in which kinds meet in every way. FP8 queries, keys and values;
    in some layers one of gate, up and down wide, of experts too."""
    place = name.split(".")
    if place[-1] in ("q_proj", "k_proj", "v_proj"):
        return "fp8"
    wide = {"0": ("o_proj", "down_proj"), "1": ("up_proj", "gate_up_proj")}
    return "bfloat16" if place[0] == "layers" and place[-1] in wide.get(place[1], ()) else None


def rounded(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., n, k] -> codes [..., n, k], scales [..., n, k / 16] and the scale of all [..., 1]."""
    wide = matrix.float()
    factor = wide.abs().amax((-2, -1), keepdim=True).clamp(min=1e-12) / (LARGEST[0] * LARGEST[1])
    groups = (wide / factor).unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / LARGEST[0]).to(torch.float8_e4m3fn)
    steps = groups / scale.float().clamp(min=2**-9)[..., None]
    edges = torch.tensor(EDGES, device=matrix.device)
    codes = torch.bucketize(steps.abs(), edges, out_int32=True) + 8 * (steps < 0)
    return codes.to(torch.uint8).flatten(-2), scale, factor[..., 0]


def write_nvfp4(source: Path, path: Path, other: Other = lambda name: None) -> None:
    """Write a folder's model in compressed-tensors' NVFP4 form: the linear layers with a multiple
    of GROUP inputs. other: name -> "fp8" or "bfloat16" for a weight to store in that form
    instead."""
    arch = read_arch(source)
    checkpoint = Checkpoint(source, arch)
    files: dict[str, Tensor] = {}
    for name, spec in checkpoint.specs.items():
        values = torch.from_numpy(dequantise(checkpoint.read(name)))
        kind = other(name)
        if kind == "bfloat16" or not spec.linear or values.shape[-1] % GROUP:
            files[stored_name(PREFIX, name)] = values.bfloat16()
        elif values.ndim == 2:
            files |= _file_of(stored_name(PREFIX, name).removesuffix(".weight"), values, kind)
        else:  # experts one by one, gate and up apart
            base, last = name.rsplit(".", 1)
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for e, matrix in enumerate(values):
                for part, half in zip(parts, matrix.chunk(len(parts)), strict=True):
                    files |= _file_of(f"{PREFIX}{base}.{e}.{part}", half, kind)
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    said = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    save_file(files, path / "model.safetensors")


def _file_of(base: str, matrix: Tensor, kind: str | None) -> dict[str, Tensor]:
    if kind == "fp8":
        values, scale = quantise_fp8(matrix)
        return {f"{base}.weight": values, f"{base}.weight_scale": scale[:, None]}
    codes, scale, factor = rounded(matrix)
    return {
        f"{base}.weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        f"{base}.weight_scale": scale,
        f"{base}.weight_global_scale": 1 / factor,
    }

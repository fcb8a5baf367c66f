"""Tiny checkpoints with linear layers quantised by the public compressed-tensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from targets.arch import parse_arch
from targets.tensors import TensorSpec, all_tensors, stored_name
from tests.support.tiny import PREFIX, config_of, random_tensors

if TYPE_CHECKING:  # takes four seconds (imports half of transformers): only to write a checkpoint
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

WIDER = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "global_head_dim": 64}
"""Of tiny models: widths that groups of 128 divide, or fail to."""
INT4 = {"num_bits": 4, "type": "int"}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"int4 by {size}": ("pack-quantized", INT4 | {"strategy": "group", "group_size": size})
        for size in (32, 64, 128)
    },
    "int4 by 32, zero points": (
        "pack-quantized",
        INT4 | {"strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int4 per channel": ("pack-quantized", INT4 | {"strategy": "channel"}),
    "int4 per channel, zero points": (
        "pack-quantized",
        INT4 | {"strategy": "channel", "symmetric": False},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "fp8 in blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
}
Tensors = dict[str, torch.Tensor]


def write_quantised(path: Path, variant: str, scheme: str) -> dict[str, np.ndarray]:
    """A tiny checkpoint; returns what the library itself reads from it, in float32, by the engine's
    names."""
    return write_folder(path, config_of(variant), random_tensors(variant), scheme)


def write_folder(
    path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], scheme: str
) -> dict[str, np.ndarray]:
    """A model's config and weights. Those that the groups don't divide stay wide."""
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )

    form, given = SCHEMES[scheme]
    wanted = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**given), format=form)
    specs = all_tensors(parse_arch(config))
    files: Tensors = {}
    meant: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        wide = torch.from_numpy(values)
        if specs[name].linear and values.shape[-1] % (given.get("group_size") or 1) == 0:
            meant[name] = _compressed(name, wide, specs[name], wanted, files).numpy()
        else:
            files[stored_name(PREFIX, name)] = wide.bfloat16()
            meant[name] = values
    quantisation = QuantizationConfig(config_groups={"group_0": wanted}, format=form)
    said = config | {"quantization_config": quantisation.model_dump(mode="json")}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(said))
    save_file(files, path / "model.safetensors")
    return meant


def _compressed(
    name: str, wide: torch.Tensor, spec: TensorSpec, scheme: QuantizationScheme, files: Tensors
) -> torch.Tensor:
    """Add a quantised weight to `files`; returns its dequantised values. Experts are stored one by
    one, gate and up apart."""
    if wide.ndim == 2:
        return _one(stored_name(PREFIX, name).removesuffix(".weight"), wide, scheme, files)
    base, kind = name.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    said = [
        _one(f"{PREFIX}{base}.{e}.{part}", half.contiguous(), scheme, files)
        for e, matrix in enumerate(wide)
        for part, half in zip(parts, matrix.chunk(len(parts)), strict=True)
    ]
    return torch.cat(said).reshape(spec.shape)


def _one(base: str, wide: torch.Tensor, scheme: QuantizationScheme, files: Tensors) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = scheme.weights
    assert arguments is not None
    state: Tensors = {"weight": wide}
    parts = _parts(wide, arguments)
    least, most = parts.amin(-1), parts.amax(-1)
    over = None
    if scheme.format == "nvfp4-pack-quantized":
        over = state["weight_global_scale"] = generate_gparam(wide.min()[None], wide.max()[None])
    scale, zero = calculate_qparams(least, most, arguments, over)
    if arguments.strategy != "tensor_group":
        scale = scale.bfloat16().float()  # as it is saved: the codes are of this scale
    state |= {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored = compressor.compress(state, scheme)
    if over is None:
        meant = compressor.decompress(dict(stored), scheme)["weight"]
        stored["weight_scale"] = stored["weight_scale"].bfloat16()
    else:  # its own way rounds to bfloat16
        codes = unpack_fp4_from_uint8(stored["weight_packed"], *wide.shape, torch.float32)
        meant = dequantize(codes, stored["weight_scale"].float(), None, arguments, None, over)
    files |= {f"{base}.{last}": value.contiguous() for last, value in stored.items()}
    return meant.float()


def _parts(wide: torch.Tensor, arguments: QuantizationArgs) -> torch.Tensor:
    """What shares a scale, along the last axis."""
    if arguments.strategy == "channel":
        return wide[:, None]
    if arguments.strategy != "block":
        return wide.reshape(len(wide), -1, arguments.group_size or 1)
    rows, columns = arguments.block_structure
    short = -wide.shape[1] % columns, -wide.shape[0] % rows
    padded = torch.nn.functional.pad(wide, (0, short[0], 0, short[1]))
    blocks = padded.unfold(0, rows, rows).unfold(1, columns, columns)
    return blocks.flatten(2)

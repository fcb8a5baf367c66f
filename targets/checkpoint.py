"""Hugging Face safetensors to numpy, strict both ways: every parameter filled, every tensor used.

Read as they are: bf16, f16, f32, and the quantised forms of `targets/schemes.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from specdec.core.errors import UserError
from targets import schemes
from targets.arch import Arch
from targets.schemes import Weight
from targets.stored import Groups, Stored
from targets.tensors import TensorSpec, all_tensors, stored_name

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
OTHER_TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
"""Parts of a multimodal checkpoint that text decoding does not need."""

MAPPED_TYPES = {
    name: np.dtype(kind)
    for name, kind in {
        "F32": np.float32,
        "F16": np.float16,
        "I8": np.int8,
        "U8": np.uint8,
        "I32": np.int32,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
    }.items()
}
"""What weights and their scales are read from, by safetensors' names."""
FOUR_BITS = frozenset({"I32", "U8"})
"""What packed values of 4 bits lie in: of int4, and of NVFP4."""
WIDE_TYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))


class Checkpoint:
    """The text decoder's tensors of one checkpoint folder. `read` is lazy, one tensor at a time."""

    def __init__(self, path: Path, arch: Arch) -> None:
        """Opens, and checks names and shapes by the headers; raises UserError."""
        self.path = path
        self.specs = all_tensors(arch)
        self._where = {name: file for file in open_shards(path) for name in file.names}
        self._config = _quantization_config(path)
        self._prefix = self._find_prefix()
        self._check_headers()

    def read(self, name: str) -> Stored:
        """The tensor that `targets.tensors` calls `name`.

        Raises UserError on a dtype that isn't read, and on what a quantised weight lacks.
        """
        spec = self.specs[name]
        parts = self._expert_parts(name, spec)
        if parts is None:
            return self._read_one(stored_name(self._prefix, name), spec.shape)
        stored = [self._read_one(p, shape) for p, shape in parts]
        return _fuse_experts(name, stored, spec)

    @property
    def has_fp8(self) -> bool:
        """Whether any of its tensors is stored as FP8."""
        return "F8_E4M3" in map(self.stored_as, self.specs)

    @property
    def has_four_bits(self) -> bool:
        """Whether any of its tensors is stored as int4 or NVFP4."""
        return not FOUR_BITS.isdisjoint(map(self.stored_as, self.specs))

    def stored_as(self, name: str) -> str:
        """safetensors' dtype of a tensor's values; of experts the first one's. 4-bit values are in
        bytes or words: `FOUR_BITS`."""
        parts = self._expert_parts(name, self.specs[name])
        stored = parts[0][0] if parts else stored_name(self._prefix, name)
        packed = f"{stored.removesuffix('.weight')}.weight_packed"
        held = packed if packed in self._where else stored
        return self._where[held].dtype(held)

    def _find_prefix(self) -> str:
        for prefix in PREFIXES:
            if f"{prefix}embed_tokens.weight" in self._where:
                return prefix
        raise UserError(
            f"{self.path}: no tensor <prefix>embed_tokens.weight with one of the prefixes "
            f"{', '.join(PREFIXES)}: this is not a Gemma 4 checkpoint, or a shard is missing"
        )

    def _expert_parts(
        self, name: str, spec: TensorSpec
    ) -> list[tuple[str, tuple[int, ...]]] | None:
        """Names and shapes of un-fused experts (compressed-tensors files); None where fused, and
        for all other tensors."""
        if "experts." not in name or stored_name(self._prefix, name) in self._where:
            return None
        base, kind = name.rsplit(".", 1)
        experts, out, inner = spec.shape
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        shape = (out // len(names), inner)
        return [
            (f"{self._prefix}{base}.{e}.{part}.weight", shape)
            for e in range(experts)
            for part in names
        ]

    def _check_headers(self) -> None:
        """Names and shapes, before gigabytes are read."""
        needed: dict[str, tuple[int, ...]] = {}
        for name, spec in self.specs.items():
            parts = self._expert_parts(name, spec)
            needed |= dict(parts) if parts else {stored_name(self._prefix, name): spec.shape}
        used: set[str] = set()
        missing = {name for name, shape in needed.items() if not self._find(name, shape, used)}
        if missing and (scheme := schemes.named(self._config)):
            raise UserError(
                f"{self.path} lacks {min(missing)}: it is quantised as {scheme}, of which specdec "
                f"does not read this; it reads {schemes.READ}"
            )
        _refuse("lacks", missing, self.path, "download the missing shards")
        extra = {n for n in self._where.keys() - used if not self._ignorable(n)}
        _refuse(
            "has unused",
            extra,
            self.path,
            "config.json does not describe this checkpoint, or it is an unsupported variant",
        )

    def _find(self, name: str, shape: tuple[int, ...], used: set[str]) -> bool:
        """Whether it is there, in any form. Its tensors are checked and added to `used`."""
        weight = self._weight(name, shape)
        if weight is None:
            if name in self._where:
                self._check_shape(name, shape)
                used.add(name)
            return name in self._where
        weight.check()
        used |= weight.names
        return True

    def _weight(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        """A weight that may be quantised, if that is what is stored under this name."""
        base = name.removesuffix(".weight")
        there = name in self._where or f"{base}.weight_packed" in self._where
        if base == name or len(shape) != 2 or not there:
            return None
        return Weight(self.path, self._where, base, shape, self._config)

    def _ignorable(self, name: str) -> bool:
        if any(f"{tower}." in name for tower in OTHER_TOWERS) or "lm_head." in name:
            return True
        # released E2B/E4B files carry the K/V projections of layers that share another's K/V
        shared = re.search(r"layers\.(\d+)\.self_attn\.([kv]_proj|k_norm)\.", name)
        return bool(shared) and f"layers.{shared[1]}.self_attn.k_proj" not in self.specs

    def _read_one(self, name: str, shape: tuple[int, ...]) -> Stored:
        weight = self._weight(name, shape)
        stored = Stored(self._where[name].read(name)) if weight is None else weight.read()
        if stored.wide and stored.values.dtype not in WIDE_TYPES:
            raise UserError(
                f"{self.path}: {name} is {stored.values.dtype}, which specdec can't read"
            )
        return stored

    def _check_shape(self, stored: str, shape: tuple[int, ...]) -> None:
        found = self._where[stored].shape(stored)
        if found != shape:
            raise UserError(
                f"{self.path}: {stored} has shape {list(found)}, config.json needs "
                f"{list(shape)}: config and weights are of different models"
            )


def _quantization_config(path: Path) -> dict[str, Any]:
    """quantization_config of config.json or ModelOpt's own file; empty if weights are wide."""
    for file, keys in (
        ("config.json", ("quantization_config", "compression_config")),
        ("hf_quant_config.json", ("quantization",)),
    ):
        if not (path / file).is_file():
            continue
        config = json.loads((path / file).read_text(encoding="utf-8"))
        for part in (config, config.get("text_config") or {}):
            found = next((part[key] for key in keys if isinstance(part.get(key), dict)), None)
            if found is not None:
                return found
    return {}


def _refuse(what: str, names: set[str], path: Path, remedy: str) -> None:
    if names:
        listed = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" * (len(names) > 8))
        raise UserError(f"{path} {what} tensors: {listed}: {remedy}")


def _fuse_experts(name: str, parts: list[Stored], spec: TensorSpec) -> Stored:
    if len({part.form for part in parts}) != 1:
        raise UserError(f"{name}: its experts are not all quantised alike")
    shape = spec.shape[:-1]

    def joined(pieces: list[np.ndarray | None], *last: int) -> np.ndarray | None:
        there = [piece for piece in pieces if piece is not None]
        return np.concatenate(there).reshape(*shape, *last) if there else None

    values = joined([part.values for part in parts], -1)
    scale = joined([part.scale for part in parts])
    groups = [part.groups for part in parts if part.groups is not None]
    assert values is not None
    if not groups:
        return Stored(values, scale, None, parts[0].code)
    scales = joined([g.scale for g in groups], -1)
    zero = joined([g.zero for g in groups], -1)
    assert scales is not None
    return Stored(values, scale, Groups(scales, groups[0].size, zero), parts[0].code)


class Shard:
    """One safetensors file. Tensors are views of the mapped file, read when they are used."""

    def __init__(self, file: Path) -> None:
        try:
            self._open = safe_open(file, framework="numpy")
        except (SafetensorError, OSError) as problem:
            raise UserError(
                f"{file} is truncated or damaged ({problem}): download it again"
            ) from None
        with file.open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
            self._header = json.loads(stream.read(start - 8))
        self.names = set(self._header) - {"__metadata__"}
        # copy on write: writable, because torch requires that, and the file is not changed
        self._data = np.memmap(file, np.uint8, "c")[start:]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> str:
        """The dtype's name in safetensors."""
        return self._header[name]["dtype"]

    def read(self, name: str) -> np.ndarray:
        kind = MAPPED_TYPES.get(self.dtype(name))
        if kind is None:
            return self._open.get_tensor(name)
        start, stop = self._header[name]["data_offsets"]
        return np.asarray(self._data[start:stop]).view(kind).reshape(self.shape(name))


def _shard_names(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise UserError(
            f"{index} has no readable weight_map ({problem}): download it again"
        ) from None


def open_shards(path: Path) -> list[Shard]:
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        names = _shard_names(index)
    elif single.is_file():
        names = [single.name]
    else:
        raise UserError(f"{path} has neither model.safetensors nor {index.name}")
    for name in names:
        if not (path / name).is_file():
            raise UserError(f"{path}: shard {name} is missing: download it again")
    return [Shard(path / name) for name in names]

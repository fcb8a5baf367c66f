"""Hugging Face safetensors to numpy, strict both ways: every parameter filled, every tensor used.

Read as they are: bf16, f16, f32, FP8-dynamic (compressed-tensors: `.weight` e4m3 [out, in] with
`.weight_scale` [out, 1]) and int8 per channel. What is decided per tensor is never read from the
quantisation config's ignore list (third-party files disagree with theirs).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from specdec.core.errors import UserError
from targets.arch import Arch
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
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
    }.items()
}
"""What is read, by safetensors' names."""


@dataclass(frozen=True)
class Stored:
    """values [..., out, in]; scale [..., out] float32 for e4m3 and int8 values, else None."""

    values: np.ndarray
    scale: np.ndarray | None = None


class Checkpoint:
    """The text decoder's tensors of one checkpoint folder. `read` is lazy, one tensor at a time."""

    def __init__(self, path: Path, arch: Arch) -> None:
        """Opens, and checks names and shapes by the headers; raises UserError."""
        self.path = path
        self.specs = all_tensors(arch)
        self._where = {name: file for file in open_shards(path) for name in file.names}
        self._prefix = self._find_prefix()
        self._check_headers()

    def read(self, name: str) -> Stored:
        """The tensor that `targets.tensors` calls `name`.

        Raises UserError on a dtype that isn't read, and on a scale that is missing or not per
        output channel.
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
        return any(shard.dtype(name) == "F8_E4M3" for name, shard in self._where.items())

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
        missing = needed.keys() - self._where.keys()
        _refuse("lacks", missing, self.path, "download the missing shards")
        for stored, shape in needed.items():
            self._check_shape(stored, shape)
        scales = {_scale_name(n) for n in needed}
        extra = {n for n in self._where.keys() - needed.keys() - scales if not self._ignorable(n)}
        _refuse(
            "has unused",
            extra,
            self.path,
            "config.json does not describe this checkpoint, or specdec does not know this variant",
        )

    def _ignorable(self, name: str) -> bool:
        if any(f"{tower}." in name for tower in OTHER_TOWERS) or "lm_head." in name:
            return True
        # released E2B/E4B files carry the K/V projections of layers that share another's K/V
        shared = re.search(r"layers\.(\d+)\.self_attn\.([kv]_proj|k_norm)\.", name)
        return bool(shared) and f"layers.{shared[1]}.self_attn.k_proj" not in self.specs

    def _read_one(self, stored: str, shape: tuple[int, ...]) -> Stored:
        values = self._where[stored].read(stored)
        if values.dtype not in MAPPED_TYPES.values():
            raise UserError(f"{self.path}: {stored} is {values.dtype}, which specdec can't read")
        if values.dtype not in (np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)):
            return Stored(values)
        return Stored(values, self._read_scale(stored, shape))

    def _check_shape(self, stored: str, shape: tuple[int, ...]) -> None:
        found = self._where[stored].shape(stored)
        if found != shape:
            raise UserError(
                f"{self.path}: {stored} has shape {list(found)}, config.json needs "
                f"{list(shape)}: config and weights are of different models"
            )

    def _read_scale(self, stored: str, shape: tuple[int, ...]) -> np.ndarray:
        file = self._where.get(_scale_name(stored))
        if file is None:
            raise UserError(
                f"{self.path}: {stored} is quantised but {_scale_name(stored)} is missing"
            )
        scale = file.read(_scale_name(stored)).astype(np.float32)
        if scale.size != int(np.prod(shape[:-1])):
            raise UserError(
                f"{self.path}: the scale of {stored} has shape {list(scale.shape)}: only one "
                f"scale per output channel ({shape[-2]} of them) is supported"
            )
        return scale.reshape(shape[:-1])


def quantise_int8(values: np.ndarray) -> Stored:
    """Symmetric per output channel: scale = absmax / 127 in float32 over the last axis."""
    wide = values.astype(np.float32)
    scale = np.maximum(np.abs(wide).max(-1), 1e-12) / np.float32(127)
    return Stored(np.rint(wide / scale[..., None]).astype(np.int8), scale)


def dequantise(stored: Stored) -> np.ndarray:
    """float32 values, whatever the storage."""
    wide = stored.values.astype(np.float32)
    return wide if stored.scale is None else wide * stored.scale[..., None]


def _scale_name(stored: str) -> str:
    return stored.removesuffix(".weight") + ".weight_scale"


def _refuse(what: str, names: set[str], path: Path, remedy: str) -> None:
    if names:
        listed = ", ".join(sorted(names)[:8]) + (f" and {len(names) - 8} more" * (len(names) > 8))
        raise UserError(f"{path} {what} tensors: {listed}: {remedy}")


def _fuse_experts(name: str, parts: list[Stored], spec: TensorSpec) -> Stored:
    values = np.concatenate([p.values for p in parts]).reshape(spec.shape)
    scales = [p.scale for p in parts if p.scale is not None]
    if len(scales) not in (0, len(parts)):
        raise UserError(f"{name}: some experts are quantised and some are not")
    return Stored(values, np.concatenate(scales).reshape(spec.shape[:-1]) if scales else None)


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
        # copy on write: writable, as torch wants its memory, and the file stays as it is
        self._data = np.memmap(file, np.uint8, "c")[start:]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> str:
        """As safetensors calls it."""
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

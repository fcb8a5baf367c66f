"""Hugging Face safetensors to numpy, strict both ways: every parameter filled, every tensor used.

Read as they are: bf16, f16, f32, and the quantised forms of `targets/schemes.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specdec.core.errors import UserError
from targets import schemes
from targets.arch import Arch
from targets.schemes import Weight
from targets.shards import Shard, tensors_of
from targets.soundness import PIECE
from targets.stored import Groups, Stored
from targets.tensors import TensorSpec, all_tensors, stored_name

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
OTHER_TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
IGNORED = {
    rf"(^|\.)({'|'.join(OTHER_TOWERS)})\.": "another modality: text decoding does not use it",
    r"\.self_attn\.([qkv]_scale|[qkv]_proj\.[qkv]_scale)$": (
        "scales of an FP8 K/V cache: the cache's own type is --kv-dtype, and needs none"
    ),
    r"\.rotary_emb\.inv_freq$": "computed from config.json's rope_parameters",
}
"""Tensors that may be in a file though nothing reads them, and the reason. What is in none of these
rows, and not in `Checkpoint._ignorable`, is refused."""
HEAD = "lm_head"
EXPERTS = ".experts."
"""Between a layer's name and that of an expert's tensor."""
OLDER = ".moe.experts."
"""The same in older community files."""

FOUR_BITS = frozenset({"I32", "U8"})
"""What packed values of 4 bits lie in: of int4, and of NVFP4."""
WIDE_TYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))


class Checkpoint:
    """The text decoder's tensors of one checkpoint folder. `read` is lazy, one tensor at a time."""

    def __init__(self, path: Path, arch: Arch) -> None:
        """Opens, and checks names and shapes by the headers; raises UserError."""
        self.path = path
        self.specs = all_tensors(arch)
        self._where = tensors_of(path)
        self._config = quantization_config(path)
        self._prefix = self._find_prefix()
        self._older_experts = {n.partition(OLDER)[0] for n in self._where if OLDER in n}
        self._head = head_name(self._where) or stored_name(self._prefix, HEAD)
        self._check_headers()

    def read(self, name: str) -> Stored:
        """The tensor that `targets.tensors` calls `name`.

        Raises UserError on a dtype that isn't read, and on what a quantised weight lacks.
        """
        spec = self.specs[name]
        parts = self._expert_parts(name, spec)
        if parts is None:
            return self._read_one(self._stored(name), spec.shape)
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
        stored = parts[0][0] if parts else self._stored(name)
        packed = f"{stored.removesuffix('.weight')}.weight_packed"
        held = packed if packed in self._where else stored
        return self._where[held].dtype(held)

    def _find_prefix(self) -> str:
        schemes.refuse_unread(self.path, self._where, self._config)
        if (prefix := prefix_of(self._where)) is not None:
            return prefix
        raise UserError(
            f"{self.path}: no tensor <prefix>embed_tokens.weight with one of the prefixes "
            f"{', '.join(PREFIXES)}: this is not a Gemma 4 checkpoint, or a shard is missing"
        )

    def _stored(self, name: str) -> str:
        """The file's name of a tensor that `targets.tensors` calls `name`."""
        if name == HEAD:
            return self._head
        usual = stored_name(self._prefix, name)
        layer, _, rest = usual.partition(EXPERTS)
        return f"{layer}{OLDER}{rest}" if rest and layer in self._older_experts else usual

    def _expert_parts(
        self, name: str, spec: TensorSpec
    ) -> list[tuple[str, tuple[int, ...]]] | None:
        """Names and shapes of un-fused experts (compressed-tensors files); None where fused, and
        for all other tensors."""
        if EXPERTS not in name or self._stored(name) in self._where:
            return None
        base, kind = self._stored(name).rsplit(".", 1)
        experts, out, inner = spec.shape
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        shape = (out // len(names), inner)
        return [(f"{base}.{e}.{part}.weight", shape) for e in range(experts) for part in names]

    def _check_headers(self) -> None:
        """Names and shapes, before gigabytes are read."""
        needed: dict[str, tuple[int, ...]] = {}
        for name, spec in self.specs.items():
            parts = self._expert_parts(name, spec)
            needed |= dict(parts) if parts else {self._stored(name): spec.shape}
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
        """Whether a tensor that is not read is expected. Raises UserError for a copy that differs
        from the tensor that is read in its place."""
        if any(re.search(pattern, name) for pattern in IGNORED):
            return True
        if name.rpartition(".")[0] == self._head.rpartition(".")[0]:
            return True  # equal to the embedding, see `model_folder.has_own_head`
        layer = re.search(r"layers\.(\d+)\.self_attn\.([kv]_proj|k_norm)\.", name)
        if layer is None:
            return False
        if f"layers.{layer[1]}.self_attn.k_proj" not in self.specs:
            return True  # released E2B/E4B files carry those of layers that share another's K/V
        if layer[2] == "v_proj":
            self._check_values_are_keys(name.rpartition(".")[0])
        return layer[2] == "v_proj"

    def _check_values_are_keys(self, v_proj: str) -> None:
        """Raise UserError unless a layer's v_proj equals its k_proj, which is read for both."""
        k_proj = f"{v_proj.removesuffix('v_proj')}k_proj"
        if not same_tensors(self._where, k_proj, v_proj):
            raise UserError(
                f"{self.path}: {v_proj} differs from {k_proj}, but config.json has "
                "attention_k_eq_v: config and weights are of different models"
            )

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


def quantization_config(path: Path) -> dict[str, Any]:
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


def prefix_of(names: Container[str]) -> str | None:
    """What stands before the embedding's name; None where there is no embedding."""
    return next((p for p in PREFIXES if f"{p}embed_tokens.weight" in names), None)


def head_name(names: Iterable[str]) -> str | None:
    """The name of a language model's head among a file's tensors, as if it were not quantised."""
    for name in names:
        base, _, last = name.rpartition(".")
        if last in ("weight", "weight_packed") and base.rpartition(".")[-1] == HEAD:
            return f"{base}.weight"
    return None


def same_tensors(where: Mapping[str, Shard], one: str, other: str) -> bool:
    """Whether two weights, by their names without `.weight`, are stored as equal values, with equal
    scales if they have any. Compared by pieces, up to the first difference."""
    parts = [_parts(where, base) for base in (one, other)]
    if parts[0].keys() != parts[1].keys():
        return False
    pairs = ((where[name], name, parts[1][last]) for last, name in parts[0].items())
    return all(_same_values(shard.read(a), where[b].read(b)) for shard, a, b in pairs)


def _parts(where: Mapping[str, Shard], base: str) -> dict[str, str]:
    """A weight's tensors by the last part of their names."""
    split = {name: name.rpartition(".") for name in where}
    return {
        last: name
        for name, (before, _, last) in split.items()
        if before == base and last not in schemes.UNUSED
    }


def _same_values(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape:
        return False
    kind = one.dtype if one.dtype == other.dtype else np.float32

    def equal(start: int) -> bool:
        pieces = (x.reshape(-1)[start : start + PIECE].astype(kind) for x in (one, other))
        return bool((next(pieces) == next(pieces)).all())

    return all(map(equal, range(0, one.size, PIECE)))


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

"""A folder's safetensors files: names, shapes and dtypes by their headers, values on demand."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from specdec.core.errors import UserError

SINGLE_FILE = "model.safetensors"
"""File of a checkpoint in one part."""
INDEX = "model.safetensors.index.json"
"""File that maps tensors to the parts of a checkpoint."""
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


def _indexed_names(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise UserError(
            f"{index} has no readable weight_map ({problem}): download it again"
        ) from None


def shard_names(path: Path) -> list[str]:
    """The names of a folder's files of weights: the whole file where there is one, as an index
    beside it may be of an earlier download. Raises UserError for missing files."""
    index = path / INDEX
    if (path / SINGLE_FILE).is_file():
        names = [SINGLE_FILE]
    elif index.is_file():
        names = _indexed_names(index)
    else:
        raise UserError(f"{path} has neither {SINGLE_FILE} nor {INDEX}")
    for name in names:
        if not (path / name).is_file():
            raise UserError(f"{path}: shard {name} is missing: download it again")
    return names


def open_shards(path: Path) -> list[Shard]:
    """Every file of `shard_names`, opened. Raises UserError for files that are missing or
    damaged."""
    return [Shard(path / name) for name in shard_names(path)]


def tensors_of(path: Path) -> dict[str, Shard]:
    """The file of each tensor of a folder, by the tensor's name. Raises UserError."""
    return {name: shard for shard in open_shards(path) for name in shard.names}


def has_weights(path: Path) -> bool:
    """Whether `open_shards` has anything to open."""
    return (path / SINGLE_FILE).is_file() or (path / INDEX).is_file()

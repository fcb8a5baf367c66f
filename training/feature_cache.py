"""The results of the teacher's forward for each packed row, computed once and kept on disk.

Features and last states are stored completely, in the teacher's dtype: the training step computes
distributions from them, as it does without a cache. Shards of whole rows appear whole, so a build
that was killed goes on; cache.json describes the target and data that the states are from.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  registers the name bfloat16 with numpy
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specdec.core.errors import UserError
from specdec.core.version import VERSION
from specdec.core.writing import beside
from targets.jax.model import Hidden
from training.manifest import agree
from training.packing import PADDING, PackedRows

MANIFEST = "cache.json"
SHARD_BYTES = 2**28
"""About what a kill can cost."""
SPARE_BYTES = 2**28
"""Room that a build leaves, for the run's own checkpoints."""
Read = Callable[[Any, Any], Hidden]
"""(tokens, documents [B, L]) -> their states."""


@dataclass(frozen=True)
class CacheLayout:
    """rows of `length` tokens; features and last: widths of a token's states, of this dtype."""

    rows: int
    length: int
    features: int
    last: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        return self.length * (self.features + self.last) * np.dtype(self.dtype).itemsize

    @property
    def shard_rows(self) -> int:
        return max(1, SHARD_BYTES // self.row_bytes)

    def shards(self) -> list[range]:
        """The rows of each."""
        starts = range(0, self.rows, self.shard_rows)
        return [range(start, min(start + self.shard_rows, self.rows)) for start in starts]


class FeatureCache:
    """One folder: of one teacher, and of some packed rows in their order."""

    def __init__(
        self, folder: Path, rows: PackedRows, layout: CacheLayout, facts: dict[str, Any]
    ) -> None:
        """facts: what decides the states besides rows and layout.

        Raises UserError for a folder where any of it differs, naming that, and for one that can't
        be written to.
        """
        self.folder, self.rows, self.layout = folder, rows, layout
        written = facts | asdict(layout) | {"packing": _packing_hash(rows)}
        written |= {"shard_rows": layout.shard_rows, "specdec": VERSION}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            agree(
                folder / MANIFEST,
                written,
                lambda names: (
                    f"{folder} holds features of other {names}: repeat the options that built "
                    "it, or name another --feature-cache"
                ),
            )
        except OSError as problem:
            raise UserError(f"--feature-cache: cannot write to {folder}: {problem}") from None

    def missing(self) -> list[int]:
        """Numbers of the shards that are not there yet."""
        return [n for n in range(len(self.layout.shards())) if not self._file(n).exists()]

    def check_room(self) -> int:
        """How many rows are missing. Raises UserError where the disk has no room for them."""
        shards = self.layout.shards()
        rows = sum(len(shards[n]) for n in self.missing())
        size, free = rows * self.layout.row_bytes, shutil.disk_usage(self.folder).free
        if rows and size + SPARE_BYTES > free:
            raise UserError(
                f"--feature-cache: {self.folder} would take {size / 2**30:.2f} GiB more, and "
                f"{free / 2**30:.2f} GiB are free: make room, or leave the option out (the "
                "target then runs in each step)"
            )
        return rows

    def build(self, read: Read, batch: int, tell: Callable[[int], None] = lambda _: None) -> None:
        """Compute what is missing, `batch` rows at a time. The callback gets how many more are
        done.

        Raises UserError if the disk fills up after all; the shards before it stay.
        """
        shards = self.layout.shards()
        for number in self.missing():
            parts, shard = [], shards[number]
            for start in shard[::batch]:
                parts.append(self._read(read, start, min(start + batch, shard.stop), batch))
                tell(len(parts[-1].last))
            self._write(number, Hidden(*map(np.concatenate, zip(*parts, strict=True))))

    def _read(self, read: Read, start: int, stop: int, batch: int) -> Hidden:
        """States of rows [start, stop), padded to `batch` for the one program that there is."""
        short = ((0, batch - (stop - start)), (0, 0))
        tokens = np.pad(self.rows.tokens[start:stop], short)
        documents = np.pad(self.rows.documents[start:stop], short, constant_values=PADDING)
        return Hidden(*(np.asarray(part)[: stop - start] for part in read(tokens, documents)))

    def _write(self, number: int, states: Hidden) -> None:
        try:
            with beside(self._file(number)) as file:
                save_file(states._asdict(), file)
        except (OSError, SafetensorError) as problem:
            raise UserError(
                f"--feature-cache: cannot write {self._file(number)}: {problem}; the shards "
                "before it stand: make room and repeat the command"
            ) from None

    def _file(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"

    def row(self, number: int) -> Hidden:
        """One row's states [L, ...]. Raises UserError for a damaged shard."""
        shard, place = divmod(number, self.layout.shard_rows)
        try:
            with safe_open(self._file(shard), framework="np") as file:
                return Hidden(*(file.get_slice(name)[place] for name in Hidden._fields))
        except (OSError, SafetensorError) as problem:
            raise UserError(
                f"{self._file(shard)} is damaged ({problem}): delete it and repeat the command"
            ) from None


@dataclass(frozen=True)
class Kept:
    """`PackedRows.states` of a cache's rows from `first` on: what is indexed is read from disk."""

    cache: FeatureCache
    first: int

    def __getitem__(self, numbers: Sequence[int]) -> Hidden:
        found = [self.cache.row(self.first + n) for n in numbers]
        return Hidden(*map(np.stack, zip(*found, strict=True)))


def joined(*parts: PackedRows) -> PackedRows:
    """All rows, in one cache's order."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def with_states(cache: FeatureCache, *parts: PackedRows) -> list[PackedRows]:
    """The parts that were `joined` for the cache, each with its states."""
    firsts = np.cumsum([0, *(len(part.tokens) for part in parts)]).tolist()
    return [p._replace(states=Kept(cache, n)) for p, n in zip(parts, firsts, strict=False)]


def _packing_hash(rows: PackedRows) -> str:
    """sha256 of which tokens stand where, and to which document they belong."""
    return hashlib.sha256(rows.tokens.tobytes() + rows.documents.tobytes()).hexdigest()

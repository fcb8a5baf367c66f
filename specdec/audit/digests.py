"""sha256 of a checkpoint's files, made once: a large model's take half a minute."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec.core.kept import kept_folder
from specdec.core.writing import beside
from targets.shards import shard_names

KEPT = kept_folder("digests")
"""Where digests are kept, a file for each checkpoint folder."""
BESIDE = ("config.json", "hf_quant_config.json")
"""Files with the form of the weights."""
THREADS = 8
"""Files that are read at once; hashing leaves Python's lock."""


def weight_digests(folder: Path, kept: Path = KEPT) -> dict[str, str]:
    """The digest of each file of weights, and of `BESIDE`, by file name. A kept one is taken while
    the file's size, times and inode are the same. Raises UserError for missing files."""
    names = [*shard_names(folder), *(name for name in BESIDE if (folder / name).is_file())]
    stamps = {name: _stamp(folder / name) for name in names}
    place = kept / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}.json"
    found = {n: d for n, (stamp, d) in _read(place).items() if stamps.get(n) == stamp}
    if missing := [name for name in names if name not in found]:
        with ThreadPoolExecutor(THREADS) as pool:
            made = pool.map(file_digest, (folder / name for name in missing))
            found |= dict(zip(missing, made, strict=True))
        _write(place, {name: [stamps[name], digest] for name, digest in found.items()})
    return {name: found[name] for name in names}


def _stamp(file: Path) -> list[int]:
    """Changes whenever the file may have: a writer can set the modification time, not the change
    of its entry."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def file_digest(file: Path) -> str:
    """sha256 of a file, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read(place: Path) -> dict[str, Any]:
    try:
        return {n: (stamp, digest) for n, (stamp, digest) in json.loads(place.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # none yet, or cut off: made anew


def _write(place: Path, digests: dict[str, Any]) -> None:
    """Without room they are made anew each time, which changes nothing but the start."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with beside(place) as file:
            file.write_text(json.dumps(digests))

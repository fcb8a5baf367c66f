"""Python source to learn from: the standard library and permissively licensed installed packages.

`python -m recipes.mini.corpus OUT --keep-out humaneval.jsonl` writes `train.jsonl`, `heldout.jsonl`
(one document per line: package, path, text) and `manifest.json`. The same files give the same
split on every machine: a file's normalised content decides its side, nothing else does.
"""

import argparse
import ast
import json
import multiprocessing
import re
import sys
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from recipes.mini.licences import licence_statement, permissive_licence
from recipes.mini.similarity import (
    LeakScan,
    NearDuplicates,
    content_key,
    evaluation_texts,
    signature,
)

HELDOUT_PERMILLE = 10
CHARACTERS = (200, 200_000)  # per file; smaller ones have no content, larger ones are tables
LONGEST_LINE = 500
GENERATED = re.compile(
    r"(auto-?matically|auto)[- ]?generated|generated (by|from|automatically)|do not edit|"
    r"@generated|file is generated",
    re.IGNORECASE,
)
# tests repeat themselves; vendored copies may be under another licence than their carrier
LEFT_OUT = {"test", "tests", "testing", "_testing", "idle_test", "_vendor", "site-packages"}


@dataclass(frozen=True)
class Package:
    """One source of files and the licence that lets us use it."""

    name: str
    version: str
    licence: str
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Document:
    """One file that passed the filters."""

    package: str
    path: str
    text: str
    key: str  # of its normalised content


def standard_library() -> Package:
    """The running interpreter's own library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.rglob("*.py") if not _is_left_out(f.relative_to(root)))
    return Package("python", sys.version.split()[0], "PSF-2.0", tuple(files))


def installed_packages() -> tuple[list[Package], dict[str, str]]:
    """Usable packages by name, and {package: licence statement} of the refused ones."""
    usable: dict[str, Package] = {}
    refused: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        statement = licence_statement(distribution)
        licence = permissive_licence(statement)
        if licence is None:
            refused[name] = statement or "no licence in the metadata"
            continue
        inside = [f for f in distribution.files or [] if f.suffix == ".py" and ".." not in f.parts]
        files = [Path(str(distribution.locate_file(f))) for f in inside if not _is_left_out(f)]
        usable[name] = Package(name, distribution.version, licence, tuple(sorted(files)))
    return [usable[name] for name in sorted(usable)], refused


def _is_left_out(path: PurePath) -> bool:
    name = path.name
    return (
        not LEFT_OUT.isdisjoint(path.parts)
        or name.startswith("test_")
        or name.endswith("_test.py")
        or name == "conftest.py"
    )


def fault(text: str) -> str | None:
    """Why a file is unfit to learn from, or None."""
    if not CHARACTERS[0] <= len(text) <= CHARACTERS[1]:
        return "size"
    if GENERATED.search(text[:2000]):
        return "generated"
    if max(map(len, text.splitlines())) > LONGEST_LINE:
        return "long lines"
    if sum(c.isdigit() for c in text) > 0.2 * len(text):
        return "table of numbers"
    if sum(not c.isascii() for c in text) > 0.05 * len(text):
        return "not mostly ASCII"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return "not Python 3"
    return None


def read(path: Path) -> str | None:
    """The file's text with plain newlines, or None if it cannot be read as UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text.replace("\r\n", "\n").removeprefix("\ufeff")


class Examiner:
    """Looks at one file; a class so that a worker process keeps its leak scan."""

    def __init__(self, scan: LeakScan) -> None:
        self.scan = scan

    def __call__(self, item: tuple[str, Path]) -> tuple[str, Document | None, np.ndarray | None]:
        """(reason, document, signature); reason is "" for a file that passed."""
        package, path = item
        text = read(path)
        if text is None:
            return "unreadable", None, None
        reason = fault(text) or ("evaluation set" if self.scan.leaks(text) else None)
        if reason:
            return reason, None, None
        short = "/".join(path.parts[-4:])
        return "", Document(package, short, text, content_key(text)), signature(text)


def examine(
    items: list[tuple[str, Path]], scan: LeakScan, workers: int
) -> Iterator[tuple[str, Document | None, np.ndarray | None]]:
    """Examine files in order, in `workers` processes."""
    examiner = Examiner(scan)
    if workers <= 1:
        yield from map(examiner, items)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(examiner, items, chunksize=32)


def is_heldout(key: str) -> bool:
    """The side of the split, from the normalised content's hash alone."""
    return int(key[:8], 16) % 1000 < HELDOUT_PERMILLE


def collect(
    packages: Iterable[Package], scan: LeakScan, workers: int = 1
) -> tuple[list[Document], list[Document], dict[str, Any]]:
    """(train, held-out, counts). Equal and nearly equal files are kept once, so none crosses."""
    items = [(package.name, path) for package in packages for path in package.files]
    dropped: Counter[str] = Counter()
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    sides: tuple[list[Document], list[Document]] = ([], [])
    seen: set[str] = set()
    near = NearDuplicates()
    for reason, document, minhash in examine(items, scan, workers):
        if document is None or minhash is None:
            dropped[reason] += 1
            continue
        if document.key in seen or not near.is_new(minhash):
            dropped["equal" if document.key in seen else "nearly equal"] += 1
            continue
        seen.add(document.key)
        sides[is_heldout(document.key)].append(document)
        totals[document.package][0] += 1
        totals[document.package][1] += len(document.text)
    return sides[0], sides[1], {"dropped": dict(dropped), "packages": dict(totals)}


def manifest(
    packages: list[Package], refused: dict[str, str], counts: dict[str, Any], sides: dict[str, Any]
) -> dict[str, Any]:
    """What was used (package, version, licence, files, characters), what was not, and why."""
    rows = []
    for package in packages:
        files, characters = counts["packages"].get(package.name, (0, 0))
        if files:
            row = {"version": package.version, "licence": package.licence}
            rows.append({"package": package.name, **row, "files": files, "characters": characters})
    rows.sort(key=lambda row: -row["characters"])
    return {"sides": sides, "packages": rows, "dropped": counts["dropped"], "refused": refused}


def write_documents(path: Path, documents: list[Document]) -> dict[str, int]:
    """One JSON document per line; returns the number of files and characters."""
    with path.open("w", encoding="utf-8") as out:
        for document in documents:
            out.write(json.dumps(asdict(document)) + "\n")
    return {"files": len(documents), "characters": sum(len(d.text) for d in documents)}


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--keep-out", type=Path, nargs="*", default=[], help="evaluation JSONL")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    usable, refused = installed_packages()
    packages = [standard_library(), *usable]
    scan = LeakScan(evaluation_texts(arguments.keep_out))
    train, heldout, counts = collect(packages, scan, arguments.workers)
    sides = {
        "train": write_documents(arguments.out / "train.jsonl", train),
        "heldout": write_documents(arguments.out / "heldout.jsonl", heldout),
    }
    summary = manifest(packages, refused, counts, sides)
    (arguments.out / "manifest.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps({**sides, "packages": len(summary["packages"]), "dropped": counts["dropped"]}))


if __name__ == "__main__":
    main()

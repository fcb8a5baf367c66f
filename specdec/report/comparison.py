"""Two receipts compared: what they are of, their digests, then ratios of their figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence as Seqs
from pathlib import Path
from typing import Any

from specdec.core.errors import UserError
from specdec.report.identity import SCHEMA_VERSION
from specdec.report.parts import Section
from specdec.report.questions import ALL
from specdec.report.subject import Condition

RATIOS = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
"""Figures of speed that are compared."""
SIZES = ("weights", "cache", "peak_device", "peak_rss")
"""Of memory."""
NONE = "–"


def read_receipt(path: Path) -> Section:
    """A report.json, or that of a folder. Raises UserError."""
    file = path / "report.json" if path.is_dir() else path
    try:
        receipt = json.loads(file.read_text(encoding="utf-8"))
        version = receipt["identity"]["schema_version"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{file} is no receipt: specdec report writes one") from None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{file} is a receipt of version {version}, and this specdec reads version "
            f"{SCHEMA_VERSION}: write it anew"
        )
    return receipt


def compare(first: Section, second: Section) -> dict[str, Any]:
    """identities: fields that differ, both values. digests: pairs of answers' digests, and whether
    they are equal. ratios: the second's figures over the first's. only: rows of one alone."""
    digests, lone_digests = _paired(_digests(first), _digests(second))
    figures, lone = _paired(_figures(first), _figures(second))
    return {
        "identities": _differing(first["identity"], second["identity"]),
        "digests": [{"of": name, "equal": a == b} for name, (a, b) in digests.items()],
        "ratios": [
            {"of": name, "first": a, "second": b, "ratio": b / a if a else None}
            for name, (a, b) in figures.items()
        ],
        "only": sorted({*lone_digests, *lone}),
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The comparison for people, a line each."""
    yield "identities: equal" if not found["identities"] else "identities differ in"
    for name, (a, b) in found["identities"].items():
        yield f"  {name}: {_short(a)} | {_short(b)}"
    other = [row["of"] for row in found["digests"] if not row["equal"]]
    yield f"digests of answers: {len(found['digests']) - len(other)} equal, {len(other)} differ"
    yield from (f"  {name}" for name in other)
    yield "second / first"
    for row in found["ratios"]:
        ratio = NONE if row["ratio"] is None else f"{row['ratio']:.3f}"
        yield f"  {ratio:>8}  {row['of']}: {_short(row['first'])} | {_short(row['second'])}"
    if found["only"]:
        yield f"in one alone: {len(found['only'])} rows"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _differing(first: Section, second: Section) -> dict[str, tuple[Any, Any]]:
    """Fields of one or the other with different values; of files, their digests."""
    a, b = _flat(first), _flat(second)
    return {k: (a.get(k), b.get(k)) for k in dict.fromkeys((*a, *b)) if a.get(k) != b.get(k)}


def _flat(identity: Section) -> dict[str, Any]:
    flat = {k: v for k, v in identity.items() if k not in ("files", "versions")}
    flat |= {f"version of {name}": value for name, value in identity["versions"].items()}
    return flat | {f"{f['of']}: {f['name']}": f["sha256"] for f in identity["files"]}


def _digests(receipt: Section) -> dict[str, str]:
    equality, speed = receipt["equality"]["rows"], receipt["speed"]["rows"]
    plain = {f"plain, {Condition.of(row)}": row["plain_sha256"] for row in equality}
    drafted = {f"drafted, {Condition.of(row)}": row["drafted_sha256"] for row in equality}
    return plain | drafted | {f"timed, {_timed(row)}": row["answers_sha256"] for row in speed}


def _figures(receipt: Section) -> dict[str, float]:
    whole = [r for r in receipt["acceptance"]["rows"] if r["category"] == r["context"] == ALL]
    taus = {f"tau, {r['drafter']}, K = {r['k']}, {Condition.of(r)}": r["tau"] for r in whole}
    rows = receipt["speed"]["rows"]
    speeds = {f"{name}, {_timed(row)}": row[name] for row in rows for name in RATIOS}
    memory = receipt["memory"]
    sizes = {f"memory, {name}": memory[name] for name in SIZES if memory[name] is not None}
    return taus | speeds | sizes


def _timed(row: dict[str, Any]) -> str:
    return f"{row['drafter']}, {row['users']} users"


def _paired(
    first: dict[str, Any], second: dict[str, Any]
) -> tuple[dict[str, tuple[Any, Any]], Seqs[str]]:
    both = {name: (value, second[name]) for name, value in first.items() if name in second}
    return both, [name for name in {*first, *second} if name not in both]

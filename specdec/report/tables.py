"""A receipt's sections as tables of HTML. Whatever they hold is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence as Seqs
from html import escape
from typing import Any

from specdec.report.parts import Section
from specdec.report.questions import ALL
from specdec.report.subject import Condition

Row = dict[str, Any]

NONE = "–"
DIGITS = 16
"""Of a digest, as the page shows it; report.json has it whole."""


def table(head: Seqs[str], rows: Iterable[Seqs[object]], texts: int = 1) -> str:
    """Cells are escaped. texts: columns on the left that hold words; the others hold figures."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table class="t{texts}"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def boxed(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def equality(section: Section) -> str:
    head = ("answers", "prompts", "tokens", "equal", "plain sha256", "drafted sha256", "tau, run")
    rows = [
        (
            Condition.of(row),
            row["prompts"],
            f"{row['tokens']:,}",
            "yes" if row["equal"] else f"NO, first at {row['first_difference']}",
            row["plain_sha256"][:DIGITS],
            row["drafted_sha256"][:DIGITS],
            f"{row['run_tau']:.3f}",
        )
        for row in section["rows"]
    ]
    text = f"The same prompts, decoded plainly and with {section['drafter']} at K = {section['k']}."
    return boxed("Equality", paragraph(text), table(head, rows))


def acceptance(section: Section) -> str:
    if not section["rows"]:
        return boxed("Acceptance", paragraph(f"empty: {section['why_not']}"))
    head = ("drafter", "answers", "K", "tau", "95 % interval", "acceptance length", "rate")
    head += ("first guess", "distinct-4")
    whole = [row for row in section["rows"] if row["category"] == row["context"] == ALL]
    most = max(row["k"] for row in whole)
    chosen = table(head, _taus(row for row in whole if row["k"] == most), 2)
    meant = section["definitions"]
    names = ("tau", "mean_acceptance_length", "draft_acceptance_rate", "distinct_4")
    terms = "".join(f"<dt>{name}</dt><dd>{escape(meant[name])}</dd>" for name in names)
    every = f"<details><summary>with every K</summary>{table(head, _taus(whole), 2)}</details>"
    return boxed("Acceptance of all prompts", chosen, f"<dl>{terms}</dl>", every)


def _taus(rows: Iterable[Row]) -> Iterator[tuple[object, ...]]:
    for row in rows:
        yield (
            row["drafter"],
            Condition.of(row),
            row["k"],
            f"{row['tau']:.3f}",
            f"{row['low']:.2f} – {row['high']:.2f}",
            f"{row['mean_acceptance_length']:.3f}",
            f"{row['draft_acceptance_rate']:.1%}",
            f"{row['per_position_acceptance_rates'][0]:.1%}",
            f"{row['distinct_4']:.2f}",
        )


def speed(section: Section) -> str:
    head = ("drafter", "users", "tok/s", "per user", "speed-up", "spread", "TTFT ms", "p99")
    head += ("TPOT ms", "p99", "ITL ms", "p99", "whole ms", "p99", "in", "out", "equal")
    rows = [
        (
            row["drafter"],
            row["users"],
            f"{row['output_throughput']:,.1f}",
            f"{row['per_user']:,.1f}",
            f"{row['speedup']:.2f}",
            f"{row['spread']:.0%}",
            *_times(row),
            f"{row['input_len']:.0f}",
            f"{row['output_len']:.0f}",
            "yes" if row["equal"] else "NO",
        )
        for row in section["rows"]
    ]
    text = (
        "Greedy answers through the Python API; medians and 99th percentiles. TPOT is (whole - "
        "TTFT) / (tokens - 1). ITL is the time between two updates, and an update may hold several "
        "tokens. A spread above 20 % means that the machine was too busy to be timed."
    )
    return boxed("Speed in detail", table(head, rows), paragraph(text))


def _times(row: Row) -> Iterator[str]:
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("median", "p99"):
            yield f"{row[f'{kind}_{name}_ms']:,.1f}"


def parity(section: Section) -> str:
    if not section["compared"]:
        return boxed("Parity with transformers", paragraph(f"not compared: {section['why_not']}"))
    first = section["first_difference"]
    place = "none" if first is None else f"token {first['position']}, margin {first['margin']:.2g}"
    rows = (
        ("tokens", section["tokens"]),
        ("largest difference of a log-probability", f"{section['max_abs_dlogprob']:.2g}"),
        ("mean difference", f"{section['mean_abs_dlogprob']:.2g}"),
        ("transformers' best token is ours", f"{section['top1_agreement']:.2%}"),
        ("first other choice", place),
    )
    text = (
        f"transformers {section['transformers']}, {section['dtype']} on {section['device']}, "
        "scores the ids that this engine chose, against the log-probabilities that it returned."
    )
    return boxed("Parity with transformers", paragraph(text), table(("", ""), rows))


def perplexity(section: Section | None) -> str:
    if section is None:
        return ""
    rows = (
        ("perplexity", f"{section['perplexity']:.3f}"),
        ("95 % interval", f"{section['low']:.3f} – {section['high']:.3f}"),
        ("nats per token", f"{section['nll']:.4f}"),
        ("tokens", f"{section['tokens']:,}"),
        ("sha256 of the text", section["text_sha256"][:DIGITS]),
    )
    return boxed("Perplexity", table(("", ""), rows))


def memory(section: Section) -> str:
    names = {
        "weights": "weights",
        "cache": "KV cache",
        "peak_device": "device, peak",
        "peak_rss": "process, peak",
    }
    rows = [(text, _gib(section[name])) for name, text in names.items()]
    return boxed("Memory", table(("", "GiB"), rows))


def _gib(size: int | None) -> str:
    return NONE if size is None else f"{size / 2**30:,.2f}"


def doctor(section: Section) -> str:
    rows = [(c["question"], f"{c['differing']} of {c['total']}") for c in section["checks"]]
    wiring = section["wiring"]
    text = (
        f"Wiring: {wiring['verdict']}. Nats per token: plain code {wiring['text']:.2f}, shuffled "
        f"{wiring['shuffled']:.2f}; random tokens {wiring['first']:.2f}, repeated "
        f"{wiring['second']:.2f}; uniform {wiring['uniform']:.2f}."
    )
    return boxed(
        "Doctor", table(("bitwise the same", "results that differ"), rows), paragraph(text)
    )


def identity(identity: Section) -> str:
    files = [
        (f["of"], f["name"], f"{f['bytes']:,}", f["sha256"][:DIGITS]) for f in identity["files"]
    ]
    hidden = ("files", "gpus", "versions")
    facts = [(k, NONE if v is None else v) for k, v in identity.items() if k not in hidden]
    versions = identity["versions"].items()
    gpus = [", ".join(str(value) for value in gpu.values()) for gpu in identity["gpus"]]
    return boxed(
        "Identity",
        table(("", ""), [*facts, *(("gpu", gpu) for gpu in gpus)], 2),
        table(("package", "version"), versions, 2),
        table(("of", "file", "bytes", "sha256"), files, 2) if files else "",
    )

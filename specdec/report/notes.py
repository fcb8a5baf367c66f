"""What a reader of a receipt should be warned of, and what was left out: derived from its
sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec.report.parts import Section
from specdec.report.profile import USERS, K
from specdec.report.questions import ALL, CODING
from targets.published import reported_acceptance

Note = dict[str, Any]
"""code, sentence, numbers."""

ENOUGH = 20
"""Prompts from which on a low acceptance is no accident."""
FIRST_GUESS = 0.4
"""Share of first guesses that a soundly wired assistant has right on code, at least."""
LEAST_TAU = 1.5
"""Tokens per verify pass that it gives on code, at least."""
LOOPS = 0.3
"""Share of distinct 4-grams below which answers mostly repeat themselves."""
LEAST_AGREEMENT = 0.95
"""Share of tokens that transformers chooses too; rounding alone turns fewer."""


def warnings(sections: dict[str, Section]) -> list[Note]:
    return [
        *_differing(sections),
        *_unhealthy(sections["doctor"]),
        *_wiring(sections["identity"], sections["acceptance"]),
        *_disagreeing(sections["parity"]),
        *_looping(sections["acceptance"]),
    ]


def skipped(sections: dict[str, Section]) -> list[Note]:
    """Sections and rows that are not there, each with the reason."""
    acceptance, parity = sections["acceptance"], sections["parity"]
    found = []
    if "why_not" in acceptance:
        found.append(_note("acceptance", f"empty: {acceptance['why_not']}"))
    if "perplexity" not in sections:
        found.append(_note("perplexity", "no text was given (--text)"))
    if not parity["compared"]:
        found.append(_note("parity", f"not compared with transformers: {parity['why_not']}"))
    if "why_not" in sections["memory"]:
        found.append(_note("memory", f"device memory: {sections['memory']['why_not']}"))
    return [*found, *_unfitting(acceptance), *_fewer_users(sections), *_thoughtless(acceptance)]


def equal(sections: dict[str, Section]) -> bool:
    """Whether no digest differs from that of plain decoding."""
    rows = [*sections["equality"]["rows"], *sections["speed"]["rows"]]
    return all(row["equal"] for row in rows)


def _note(code: str, sentence: str, **numbers: Any) -> Note:
    return {"code": code, "sentence": sentence, "numbers": numbers}


def _differing(sections: dict[str, Section]) -> Iterator[Note]:
    drafter = sections["equality"]["drafter"]
    for row in sections["equality"]["rows"]:
        where = {name: row[name] for name in ("temperature", "thinking")}
        if not row["equal"]:
            place = row["first_difference"]
            text = f"answers with {drafter} differ from plain decoding: the output is not lossless"
            yield _note("differs", text, **where, first_difference=place)
        elif row["taus_agree"] is False:
            text = f"tau of {drafter} in a real run is not the replayed one"
            taus = {name: row[name] for name in ("run_tau", "replay_tau")}
            yield _note("replay", text, **where, **taus)
    for row in sections["speed"]["rows"]:
        if not row["equal"]:
            text = f"timed answers with {row['drafter']} differ from plain decoding"
            yield _note("differs", text, users=row["users"])


def _unhealthy(doctor: Section) -> Iterator[Note]:
    differing = {c["question"]: c["differing"] for c in doctor["checks"] if c["differing"]}
    if differing:
        yield _note("inexact", "results depend on place or neighbours on this device", **differing)
    elif not doctor["healthy"]:
        numbers = {k: v for k, v in doctor["wiring"].items() if k != "verdict"}
        yield _note("model_wiring", f"the model: {doctor['wiring']['verdict']}", **numbers)


def _wiring(identity: Section, acceptance: Section) -> Iterator[Note]:
    """A drafter with weights that is right so rarely is more likely wired wrongly than bad."""
    for row in _code_rows(identity["assistant"], acceptance):
        first = row["per_position_acceptance_rates"][0]
        if first >= FIRST_GUESS and row["tau"] >= LEAST_TAU:
            continue
        reported = reported_acceptance(identity["arch"])
        text = (
            f"{row['drafter']} is right about the first token in {first:.0%} of its guesses, tau "
            f"{row['tau']:.2f}: that smells of wiring (position, features, weights of another "
            f"model); {reported or 'no figure of this size is known to us'}"
        )
        numbers = {name: row[name] for name in ("category", "prompts", "tau")}
        yield _note("wiring", text, **numbers, first_guess=first)


def _code_rows(drafter: str | None, acceptance: Section) -> list[dict[str, Any]]:
    """The greedy row on code without thinking, at K guesses; where too few prompts are about code,
    that of all prompts; none where those are few too."""
    asked = {"drafter": drafter, "k": K, "temperature": 0.0, "thinking": False, "context": ALL}
    rows = {r["category"]: r for r in acceptance["rows"] if r.items() >= asked.items()}
    enough = [rows[name] for name in (*CODING, ALL) if name in rows]
    return [row for row in enough if row["prompts"] >= ENOUGH][:1]


def _disagreeing(parity: Section) -> Iterator[Note]:
    if parity["compared"] and parity["top1_agreement"] < LEAST_AGREEMENT:
        text = (
            "transformers chooses other tokens than this engine more often than rounding explains"
        )
        numbers = {name: parity[name] for name in ("top1_agreement", "max_abs_dlogprob", "tokens")}
        yield _note("parity", text, **numbers)


def _looping(acceptance: Section) -> Iterator[Note]:
    for row in acceptance["conditions"]:
        if row["distinct_4"] < LOOPS:
            where = {name: row[name] for name in ("temperature", "thinking", "distinct_4")}
            yield _note("loops", "answers repeat themselves, which flatters acceptance", **where)


def _unfitting(acceptance: Section) -> Iterator[Note]:
    for row in acceptance["conditions"]:
        if row["prompts_too_long"]:
            where = {name: row[name] for name in ("temperature", "thinking", "prompts_too_long")}
            yield _note("too_long", "prompts are longer than the context (--max-len)", **where)


def _fewer_users(sections: dict[str, Section]) -> Iterator[Note]:
    slots = sections["identity"]["slots"]
    if slots < max(USERS):
        text = "speed with more users than there are slots (--slots)"
        yield _note("users", text, slots=slots)


def _thoughtless(acceptance: Section) -> Iterator[Note]:
    if acceptance["rows"] and not any(row["thinking"] for row in acceptance["conditions"]):
        text = "thinking: the chat template has none, or no prompt is a chat"
        yield _note("thinking", text)

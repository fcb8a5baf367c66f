"""What `specdec bench --script` is told to say: texts from files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.core.errors import UserError
from specdec.core.script import drawn_right

FORM = (
    'an object with "prompt" and "answer", and if you like "prediction" (a text) and "acceptance" '
    "(a list of shares)"
)
TEXTS = "prompt", "answer", "prediction"
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class ScriptText:
    """One request of a script."""

    prompt: str
    answer: str
    prediction: str | None = None
    """Its predicted output, where one is given."""
    acceptance: tuple[float, ...] | None = None
    """How often drafters with weights keep at least 1, 2, ... guesses; None: as the command
    says."""

    def encode(self, encode: Encode, encode_bare: Encode, most: int | None) -> ScriptRow:
        """encode: of a prompt's text; encode_bare: of one that begins none, without BOS. most:
        tokens of the answer that are said, None for all. Raises UserError."""
        prompt, answer = encode(self.prompt), encode_bare(self.answer)[:most]
        if not prompt or len(answer) < 2:
            raise UserError(
                f"--script: the answer {self.answer[:40]!r} is too short: at least 2 tokens are "
                "needed, the first of which is the prompt's own"
            )
        prediction = None if self.prediction is None else encode_bare(self.prediction)
        return ScriptRow(prompt, answer, prediction, self.acceptance)


@dataclass(frozen=True)
class ScriptRow:
    """A `ScriptText` as token ids."""

    prompt: list[int]
    answer: list[int]
    prediction: list[int] | None
    acceptance: tuple[float, ...] | None


def read_script(path: Path) -> list[ScriptText]:
    """The requests of a JSONL file; of another text one, whose first half is the prompt.

    Raises UserError that names the file, and the line where one is bad.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise UserError(f"--script: cannot read {path} as UTF-8 text: {failure}") from None
    if path.suffix != ".jsonl":
        half = len(text) // 2
        rows = [ScriptText(text[:half], text[half:])] if half else []
    else:
        numbered = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        rows = [_row(line, f"{path}:{n}") for n, line in numbered]
    if not rows:
        raise UserError(
            f"--script: {path} holds nothing to say: it must be a text, or JSON lines (.jsonl), "
            f"each {FORM}"
        )
    return rows


def _row(line: str, where: str) -> ScriptText:
    try:
        given = json.loads(line)
    except ValueError as failure:
        raise UserError(f"--script: {where} is not JSON: {failure}") from None
    if not isinstance(given, dict) or not {"prompt", "answer"} <= given.keys():
        raise UserError(f"--script: {where} must be {FORM}")
    strange = given.keys() - {*TEXTS, "acceptance"}
    if strange:
        raise UserError(f"--script: {where}: unknown key {min(strange)!r}: it must be {FORM}")
    for key in TEXTS:
        if key in given and (not isinstance(given[key], str) or not given[key]):
            raise UserError(f"--script: {where}: {key!r} must be a text that isn't empty")
    texts = given["prompt"], given["answer"], given.get("prediction")
    return ScriptText(*texts, _acceptance(given.get("acceptance"), where))


def _acceptance(given: Any, where: str) -> tuple[float, ...] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(type(x) in (int, float) for x in given):
        raise UserError(f'--script: {where}: "acceptance" must be a list of numbers')
    return checked_acceptance(given, f"--script: {where}")


def checked_acceptance(shares: Seqs[float], where: str) -> tuple[float, ...]:
    """Raises UserError that begins with `where`."""
    try:
        drawn_right(shares, 0, seed=0)
    except UserError as problem:
        raise UserError(f"{where}: {problem}") from None
    return tuple(shares)

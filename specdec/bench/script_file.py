"""Reads the texts for `specdec bench --script` from files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.core.errors import UserError
from specdec.core.script import drawn_right, recorded_right
from specdec.core.types import MAX_DRAFT

FORM = (
    'an object with "prompt" and "answer", and if you like "prediction" (texts, or lists of token '
    'ids), "acceptance" (a list of shares) and "recorded"'
)
TEXTS = "prompt", "answer", "prediction"
RECORDED = '{"k": guesses, "right": {drafter: a digit per token of the answer}}'
Encode = Callable[[str], list[int]]
Text = str | list[int]


@dataclass(frozen=True)
class Recorded:
    """How many guesses of drafters with weights were right on an answer, recorded by
    `eval-acceptance --record`."""

    k: int
    """Guesses per draft."""
    right: dict[str, np.ndarray]
    """By drafter, int32 [tokens of the answer]: how many guesses that begin there are right."""


@dataclass(frozen=True)
class ScriptText:
    """One request of a script."""

    prompt: Text
    answer: Text
    prediction: Text | None = None
    """Its predicted output, if given."""
    acceptance: tuple[float, ...] | None = None
    """Shares of cycles in which a drafter with weights keeps at least 1, 2, ... guesses; None: the
    command's --acceptance."""
    recorded: Recorded | None = None
    """Takes precedence over `acceptance`, for the drafters that it names."""

    def encode(self, encode: Encode, encode_bare: Encode, most: int | None) -> ScriptRow:
        """The request as token ids. encode: for the prompt. encode_bare: for other texts, without
        BOS.
        most: tokens of the answer to use, None for all. Raises UserError."""
        prompt, answer = _ids(self.prompt, encode), _ids(self.answer, encode_bare)
        for name, right in self.recorded.right.items() if self.recorded else ():
            if len(right) != len(answer):
                raise UserError(
                    f"--script: {len(right)} tokens of {name} were recorded, but the answer "
                    f"{self.answer[:40]!r} has {len(answer)}: with another tokenizer?"
                )
        if not prompt or len(answer[:most]) < 2:
            raise UserError(
                f"--script: the answer {self.answer[:40]!r} is too short: at least 2 tokens are "
                "needed, the first of which is the prompt's own"
            )
        prediction = None if self.prediction is None else _ids(self.prediction, encode_bare)
        return ScriptRow(prompt, answer[:most], prediction, self.acceptance, self.recorded)


def _ids(text: Text, encode: Encode) -> list[int]:
    return encode(text) if isinstance(text, str) else text


@dataclass(frozen=True)
class ScriptRow:
    """A `ScriptText` as token ids."""

    prompt: list[int]
    answer: list[int]
    prediction: list[int] | None = None
    acceptance: tuple[float, ...] | None = None
    recorded: Recorded | None = None

    def recorded_of(self, drafter: str) -> np.ndarray | None:
        """The recorded numbers of right guesses of a drafter, int32 [len(answer)]; None without."""
        right = None if self.recorded is None else self.recorded.right.get(drafter)
        return None if right is None else right[: len(self.answer)]


def read_script(path: Path) -> list[ScriptText]:
    """The requests of a JSONL file; any other text file is one request, with its first half as
    prompt.

    Raises UserError that names the file and the invalid line, if any.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise UserError(f"--script: cannot read {path} as UTF-8 text: {failure}") from None
    if path.suffix != ".jsonl":
        half = len(text) // 2
        rows = [ScriptText(text[:half], text[half:])] if half else []
    else:
        numbered = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        rows = [_row(line, f"{path}:{n}") for n, line in numbered]
    if not rows:
        raise UserError(
            f"--script: {path} is empty: it must be a text, or JSON lines (.jsonl), each {FORM}"
        )
    return rows


def _row(line: str, where: str) -> ScriptText:
    try:
        row = json.loads(line)
    except ValueError as failure:
        raise UserError(f"--script: {where} is not JSON: {failure}") from None
    if not isinstance(row, dict) or not {"prompt", "answer"} <= row.keys():
        raise UserError(f"--script: {where} must be {FORM}")
    strange = row.keys() - {*TEXTS, "acceptance", "recorded"}
    if strange:
        raise UserError(f"--script: {where}: unknown key {min(strange)!r}: it must be {FORM}")
    for key in TEXTS:
        if key in row and not _is_text(row[key]):
            raise UserError(
                f"--script: {where}: {key!r} must be a text that isn't empty, or its token ids"
            )
    texts = row["prompt"], row["answer"], row.get("prediction")
    acceptance = _acceptance(row.get("acceptance"), where)
    return ScriptText(*texts, acceptance, _recorded(row.get("recorded"), where))


def _is_text(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(i) is int and i >= 0 for i in value)
    return isinstance(value, str) and bool(value)


def _recorded(value: Any, where: str) -> Recorded | None:
    if value is None:
        return None
    right = value.get("right") if isinstance(value, dict) and value.keys() == {"k", "right"} else 0
    if not isinstance(right, dict) or not all(isinstance(digits, str) for digits in right.values()):
        raise UserError(f'--script: {where}: "recorded" must be {RECORDED}')
    k = value["k"]
    if type(k) is not int or not 1 <= k <= MAX_DRAFT:
        raise UserError(f'--script: {where}: "k" of "recorded" must be 1 to {MAX_DRAFT}')
    try:
        found = {name: recorded_right(digits) for name, digits in right.items()}
    except UserError as problem:
        raise UserError(f"--script: {where}: {problem}") from None
    if any(counts.max(initial=0) > k for counts in found.values()):
        raise UserError(f'--script: {where}: more guesses are "right" than the {k} of a draft')
    return Recorded(k, found)


def _acceptance(value: Any, where: str) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(x) in (int, float) for x in value):
        raise UserError(f'--script: {where}: "acceptance" must be a list of numbers')
    return checked_acceptance(value, f"--script: {where}")


def checked_acceptance(shares: Seqs[float], where: str) -> tuple[float, ...]:
    """Raises UserError that begins with `where`."""
    try:
        drawn_right(shares, 0, seed=0)
    except UserError as problem:
        raise UserError(f"{where}: {problem}") from None
    return tuple(shares)

"""The folder of a receipt in the making: one file for each section that is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.core.alone import forget_unfinished
from specdec.core.errors import UserError
from specdec.core.writing import write_whole

Section = dict[str, Any]

TEACHER = "teacher"
"""Name of what is kept for parity: token ids and log-probabilities of a few answers. It goes once
parity is measured, as ids are answers."""


class Parts:
    """Sections by name. A file is written whole, so what is there was measured to its end."""

    def __init__(self, out: Path, key: str) -> None:
        """key: digest of all that a section depends on. Raises UserError for a folder with sections
        of another key."""
        self.folder, self._key = out / "parts", key
        self._found = {file.stem: self._read(file) for file in self.folder.glob("*.json")}
        self.folder.mkdir(parents=True, exist_ok=True)
        forget_unfinished(self.folder)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> Section:
        return self._found[name]["section"]

    def seconds(self, name: str) -> float:
        """How long the section took to measure."""
        return self._found[name]["seconds"]

    def put(self, name: str, section: Section, seconds: float) -> None:
        text = json.dumps({"key": self._key, "seconds": seconds, "section": section}, indent=1)
        write_whole(self._file(name), text)
        self._found[name] = json.loads(text)  # as a restart reads it

    def drop(self, name: str) -> None:
        self._found.pop(name, None)
        self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            key, _, _ = (document[name] for name in ("key", "seconds", "section"))
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{file} is damaged: delete it, and it is measured again") from None
        if key != self._key:
            raise UserError(
                f"--out: {self.folder} has sections of other options, weights, prompts, version or "
                "machine: name another folder, or delete this one"
            )
        return document

"""A folder's manifest: what decided its contents, written once and compared when a run returns to
it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec.core.errors import UserError
from specdec.core.writing import write_whole


def agree(
    file: Path,
    described: dict[str, Any],
    refusal: Callable[[str], str],
    noted: tuple[str, ...] = (),
    added: tuple[str, ...] = (),
) -> None:
    """Write `described` as JSON, beside and renamed, or check that this is what stands there.

    noted: what is written for the reader, and not compared. added: what files of earlier versions
    lack; it is compared where it is there.
    Raises UserError with `refusal` of the names, by commas, in which they differ, and where it
    can't be written.
    """
    wanted = json.loads(json.dumps(described))
    if file.exists():
        found = json.loads(file.read_text())
        compared = [name for name in wanted if name not in noted]
        older = {name: wanted[name] for name in added}
        differing = [name for name in compared if (older | found).get(name) != wanted[name]]
        if differing:
            raise UserError(refusal(", ".join(differing)))
        return
    write_whole(file, json.dumps(wanted, indent=1))


def recall(file: Path, refusal: Callable[[Exception], str]) -> dict[str, Any]:
    """What `agree` wrote. Raises UserError with `refusal` of the problem."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as problem:
        raise UserError(refusal(problem)) from None

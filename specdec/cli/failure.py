"""How a command fails: one line on stderr."""

from __future__ import annotations

from rich.console import Console


def say_failure(problem: object) -> None:
    message = " ".join(str(problem).split())
    Console(stderr=True, highlight=False).print(f"specdec: {message}", soft_wrap=True, markup=False)

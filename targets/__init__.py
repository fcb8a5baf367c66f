"""Targets: the model that decides every token, one contract for every backend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import UserError

if TYPE_CHECKING:
    from targets.jax.load import JaxOptions
    from targets.jax.target import JaxTarget

BACKENDS = ("jax",)


def load(
    path: Path, backend: str, options: JaxOptions, suppress: tuple[int, ...] = ()
) -> JaxTarget:
    """The checkpoint in `path` on `backend`, imported only now. Raises UserError."""
    if backend != "jax":
        raise UserError(f"unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    from targets.jax.load import load_target

    return load_target(path, options, suppress)

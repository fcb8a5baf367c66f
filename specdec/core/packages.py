"""Checks that packages are there: those of this distribution, not shadowed by others of the same
name, and those that a command needs."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from specdec.core.errors import UserError

BESIDE = ("drafters", "targets", "training", "serve")
HOME = Path(__file__).parents[2]


def check_packages() -> None:
    """Raise UserError if Python would import another project's package for one of ours: a script's
    own folder comes first on the path, and many projects have a `training/`."""
    for name in BESIDE:
        spec = find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not any(Path(place).resolve() == (HOME / name).resolve() for place in places):
            found = places[0] if places else (spec.origin if spec else "nowhere")
            raise UserError(
                f"Python finds the package {name} in {found}, not in {HOME / name}: "
                "run from another folder, or rename yours"
            )


def missing(names: Iterable[str]) -> list[str]:
    """Those of these packages that are not installed. None is imported."""
    return [name for name in names if find_spec(name) is None]

"""Tiny checkpoints, written once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import VARIANTS, write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint folder per variant."""
    root = tmp_path_factory.mktemp("tiny")
    for variant in VARIANTS:
        write_tiny(root / variant, variant)
    return {variant: root / variant for variant in VARIANTS}

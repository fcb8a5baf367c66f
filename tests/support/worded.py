"""A tiny random model with the tokenizer of mini: it reads and writes words, for commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from targets import mini
from tests.support.tiny import VARIANTS, write_tiny

WORDS = 4096
"""Ids of mini's tokenizer."""
LAYERS = ["sliding_attention", "full_attention"]


def write_worded(path: Path, groups: int = 2) -> None:
    """groups: of two layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VARIANTS["31b"], "layer_types", LAYERS * groups)
        patch.setitem(VARIANTS["31b"], "vocab_size", WORDS)
        write_tiny(path, "31b")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(mini.path("mini") / file, path)

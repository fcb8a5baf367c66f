"""specdec: lossless speculative decoding for Gemma 4. Start reading at `specdec/core/cycle.py`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specdec.core.version import VERSION as __version__

if TYPE_CHECKING:
    from specdec.llm import LLM, load
    from specdec.llm_async import AsyncLLM, load_async
    from specdec.llm_types import Answer, Chunk, SamplingParams, ToolCall

__all__ = [
    "LLM",
    "Answer",
    "AsyncLLM",
    "Chunk",
    "SamplingParams",
    "ToolCall",
    "__version__",
    "load",
    "load_async",
]
AWAITED = ("AsyncLLM", "load_async")
"""Names of the door for event loops."""


def __getattr__(name: str) -> Any:
    """Import the public API on first access, as every module of this distribution imports this one
    first."""
    if name not in __all__:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    from specdec.core.packages import check_packages

    check_packages()
    home = import_module("specdec.llm_async" if name in AWAITED else "specdec.llm")
    globals()[name] = found = getattr(home, name)  # the next access finds it here
    return found

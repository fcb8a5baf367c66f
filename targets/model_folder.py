"""A checkpoint folder's architecture: its config.json, and whether its files have a head beside the
embedding."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdec.core.errors import UserError
from targets.arch import Arch, parse_arch, read_config
from targets.checkpoint import PREFIXES, head_name, same_tensors
from targets.shards import has_weights, open_shards


def read_arch(path: Path) -> Arch:
    """Raises UserError for a folder without a Gemma 4 config.json, with damaged weights, or, if
    config.json has `tie_word_embeddings` false, without a head."""
    config = read_config(path)
    return replace(parse_arch(config), own_head=has_own_head(path, config))


def has_own_head(path: Path, config: dict[str, Any]) -> bool:
    """Whether there is an `lm_head` that differs from the embedding. The files decide, not
    `tie_word_embeddings`, as in transformers 5.24 and vLLM; a folder without weights has none.
    Raises UserError if config.json has it untied and there is no head."""
    if not has_weights(path):
        return False
    if _untied(config) and _head_of(path)[0] is None:
        raise UserError(
            f"{path}: config.json has tie_word_embeddings=false but there is no lm_head.weight: "
            "download the missing shards"
        )
    return _differs(path, tuple(sorted((f.name, f.stat().st_mtime_ns) for f in path.iterdir())))


def _untied(config: dict[str, Any]) -> bool:
    parts = (config, config.get("text_config") or {})
    return any(part.get("tie_word_embeddings") is False for part in parts)


def _head_of(path: Path) -> tuple[str | None, dict[str, Any]]:
    where = {name: shard for shard in open_shards(path) for name in shard.names}
    return head_name(where), where


@lru_cache(maxsize=8)
def _differs(path: Path, _stamp: tuple[tuple[str, int], ...]) -> bool:
    """Cached by the files' times: tables of gigabytes that are equal are read whole to compare
    them."""
    head, where = _head_of(path)
    if head is None:
        return False
    tables = (f"{prefix}embed_tokens" for prefix in PREFIXES)
    table = next((name for name in tables if f"{name}.weight" in where), None)
    return table is None or not same_tensors(where, table, head.removesuffix(".weight"))

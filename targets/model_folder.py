"""A checkpoint folder's architecture: its config.json, and whether its files have a head beside the
embedding."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdec.core.errors import UserError
from targets.arch import Arch, parse_arch, read_config
from targets.checkpoint import head_name, prefix_of, same_tensors
from targets.shards import has_weights, tensors_of


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
    stamp = tuple(sorted((f.name, f.stat().st_mtime_ns) for f in path.iterdir()))
    own = _own_head(path, stamp)
    if own is None and _untied(config):
        raise UserError(
            f"{path}: config.json has tie_word_embeddings=false but there is no lm_head.weight: "
            "download the missing shards"
        )
    return bool(own)


def _untied(config: dict[str, Any]) -> bool:
    parts = (config, config.get("text_config") or {})
    return any(part.get("tie_word_embeddings") is False for part in parts)


@lru_cache(maxsize=8)
def _own_head(path: Path, _stamp: tuple[tuple[str, int], ...]) -> bool | None:
    """Whether the head differs from the embedding; None without a head. Cached by the files' times:
    tables of gigabytes that are equal are read whole to compare them."""
    where = tensors_of(path)
    head, prefix = head_name(where), prefix_of(where)
    if head is None:
        return None
    if prefix is None:
        return True
    return not same_tensors(where, f"{prefix}embed_tokens", head.removesuffix(".weight"))

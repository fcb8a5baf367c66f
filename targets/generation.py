"""A checkpoint's generation_config.json: ids that end an answer, ids that are never chosen, and the
default sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specdec.core.errors import UserError
from specdec.core.types import Sampling

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")
ID_KEYS = ("eos_token_id", "suppress_tokens")


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def sampling_defaults(generation: dict[str, Any]) -> dict[str, float | int]:
    """Its sampling parameters; temperature 0 where do_sample is false."""
    defaults = {key: generation[key] for key in SAMPLING_KEYS if generation.get(key) is not None}
    return defaults | ({"temperature": 0.0} if generation.get("do_sample") is False else {})


def check_generation(values: dict[str, Any], file: Path, vocab: int) -> None:
    """Raise UserError, naming file and key, for values that make no sense to a model of `vocab`
    tokens; keys that specdec doesn't read are not looked at."""
    for key in ID_KEYS:
        _check_ids(values.get(key), f"{file}: {key}", vocab)
    if type(values.get("do_sample", True)) is not bool:
        raise _refusal(f"{file}: do_sample must be true or false", values["do_sample"])
    for key in SAMPLING_KEYS:
        value = values.get(key)
        if value is None:
            continue
        kinds = (int,) if key == "top_k" else (int, float)
        if type(value) not in kinds:  # true is an int to Python
            kind = "a whole number" if key == "top_k" else "a number"
            raise _refusal(f"{file}: {key} must be {kind}", value)
        try:
            Sampling(**{key: value})
        except UserError as problem:
            raise UserError(f"{file}: {problem}: correct it, or download it again") from None


def _check_ids(value: Any, what: str, vocab: int) -> None:
    ids: Iterable[Any] = as_ids(value)
    if not all(type(i) is int and 0 <= i < vocab for i in ids):
        raise _refusal(f"{what} must be token ids from 0 to {vocab - 1}", value)


def _refusal(rule: str, value: Any) -> UserError:
    return UserError(f"{rule}, got {value!r}: correct it, or download it again")

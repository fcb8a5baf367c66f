"""Checks top-level names of a request that have no field in its schema.

Names that would change the answer or request output that this server does not produce are refused.
Names in HINTS have no effect and are accepted. Any other name is refused, and the error suggests
the closest accepted name, as it is often a misspelling. null counts as absent everywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from serve.errors import ApiError

ANY: tuple[Any, ...] = (object(),)
"""Marks a hint that may have any value."""

HINTS: dict[str, tuple[Any, ...]] = {
    "user": ANY,
    "metadata": ANY,
    "store": (False,),
    "service_tier": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "prompt_cache_retention": ANY,
    "prompt_cache_options": ANY,
    "priority": ANY,
    "request_id": ANY,
    "session_id": ANY,
    "chat_id": ANY,
    "client_metadata": ANY,
    "spaces_between_special_tokens": ANY,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "documents": ([],),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "verbosity": ("medium",),
    "reasoning_format": ("auto", "deepseek"),
    "include_reasoning": (True,),
    "no_stop_trim": (False,),  # this one and the next three: vllm-router writes them into requests
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "return_hidden_states": (False,),
    "add_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "detokenize": (True,),
}
"""Accepted names -> the values without effect; any other value is refused."""

REFUSED: dict[str, str] = {
    "audio": "this server writes text alone",
    "web_search_options": "this server has no web search",
    "chat_template": "the checkpoint's own template is used",
    "grammar": "use structured_outputs: {grammar}",
    "json_schema": "use response_format: {type: json_schema} or structured_outputs: {json}",
    "regex": "use structured_outputs: {regex}",
    "choice": "use structured_outputs: {choice}",
    "format": "use response_format",
    "thinking": "use reasoning_effort, thinking_token_budget or "
    "chat_template_kwargs: {enable_thinking}",
    "enable_thinking": "use chat_template_kwargs: {enable_thinking} or reasoning_effort",
    "n_predict": "use max_tokens",
    "max_output_tokens": "use max_tokens",
    "num_predict": "use max_tokens",
    "repeat_penalty": "use repetition_penalty",
    "options": "this is OpenAI's API: send each option by its own name",
    "extra_body": "this is an argument of the Python client: send what is in it at the top",
}
"""Names that other servers accept -> what to use here instead."""


def check_names(
    sent: dict[str, Any],
    known: Iterable[str],
    hints: Mapping[str, tuple[Any, ...]] = HINTS,
    refused: Mapping[str, str] = REFUSED,
    place: str = "",
) -> None:
    """sent: names without a field, and their values. known: names of fields. hints, refused: the
    API's tables. place: the object that holds the names, "" for the request itself. Raises ApiError
    400 for the first name that isn't accepted."""
    inside = f"{place}." if place else ""
    for name, value in sent.items():
        if value is None:
            continue
        if name in hints:
            _check_hint(inside + name, value, hints[name])
        elif name in refused:
            raise ApiError(400, f"{name} is not supported: {refused[name]}", param=name)
        else:
            message = _unknown(name, [*known, *hints], place)
            raise ApiError(400, message, param=inside + name)


def _check_hint(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if allowed is not ANY and value not in allowed:
        message = f"{name} is not supported: leave it out"
        raise ApiError(400, message, param=name)


def _unknown(name: str, known: list[str], place: str) -> str:
    short = name if len(name) <= 80 else name[:77] + "..."
    near = difflib.get_close_matches(name[:80], known, 1, 0.6)
    message = f"unknown parameter {short!r}" + (f" in {place}" if place else "")
    return message + (f": did you mean {near[0]!r}?" if near else "")

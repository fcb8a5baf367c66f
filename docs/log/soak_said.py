"""What an answer says, the same whether it was streamed or whole: for `soak.py`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

Json = dict[str, Any]
Said = dict[str, str]
"""Parts of an answer, as `0.content` or `1.arguments`, -> their text so far."""


async def events(answer: httpx.Response) -> AsyncIterator[Json]:
    """The JSON of each server-sent event."""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def failure(event: Json) -> str | None:
    """What an event of failure says."""
    if event.get("error") or event.get("type") in ("error", "response.failed"):
        return json.dumps(event)[:300]
    return None


def spoken(route: str, event: Json, said: Said) -> None:
    """Add an event, or a whole answer, to what was said."""
    match route.removeprefix("/v1/"):
        case "messages":
            _messages(event, said)
        case "responses":
            _responses(event, said)
        case _:
            for choice in event["choices"]:
                _choice(choice, said)


def ended(said: Said) -> Said:
    """The same, with arguments of calls in one form."""
    return {
        name: _normal(text) if name.endswith("arguments") else text for name, text in said.items()
    }


def is_beginning(said: Said, known: Said) -> bool:
    """Whether each part begins as the known answer's does; calls' arguments are not looked at."""
    parts = {name: text for name, text in said.items() if not name.endswith("arguments")}
    return all(known.get(name, "").startswith(text) for name, text in parts.items())


def _normal(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments))
    except ValueError:  # cut by max_tokens
        return arguments


def _add(said: Said, name: str, text: str | None) -> None:
    if text:
        said[name] = said.get(name, "") + text


def _choice(choice: Json, said: Said) -> None:
    at = choice["index"]
    part = choice.get("message") or choice.get("delta") or choice
    _add(said, f"{at}.content", part.get("content") or part.get("text"))
    _add(said, f"{at}.thought", part.get("reasoning_content"))
    for place, call in enumerate(part.get("tool_calls") or ()):
        name = f"{at}.{call.get('index', place)}"
        _add(said, f"{name}.name", call["function"].get("name"))
        _add(said, f"{name}.arguments", call["function"].get("arguments"))
    _add(said, f"{at}.finish", choice.get("finish_reason"))
    _add(said, f"{at}.logprobs", _logprobs(choice.get("logprobs") or {}))


def _logprobs(told: Json) -> str:
    if "content" in told:
        each = ((one["token"], one["logprob"], _best(one)) for one in told["content"] or ())
    else:
        tops = told.get("top_logprobs") or [None] * len(told.get("tokens", ()))
        each = zip(told.get("tokens", ()), told.get("token_logprobs", ()), tops, strict=True)
    return "".join(f"{one}\n" for one in each)


def _best(token: Json) -> list[tuple[str, float]]:
    return [(other["token"], other["logprob"]) for other in token["top_logprobs"]]


def _messages(event: Json, said: Said) -> None:
    match event["type"]:
        case "message":
            for at, block in enumerate(event["content"]):
                _block(at, block, said)
                if block["type"] == "tool_use":
                    _add(said, f"{at}.arguments", json.dumps(block["input"]))
            _add(said, "finish", event["stop_reason"])
        case "content_block_start":
            _block(event["index"], event["content_block"], said)
        case "content_block_delta":
            delta, at = event["delta"], event["index"]
            _add(said, f"{at}.text", delta.get("text"))
            _add(said, f"{at}.thinking", delta.get("thinking"))
            _add(said, f"{at}.arguments", delta.get("partial_json"))
        case "message_delta":
            _add(said, "finish", event["delta"]["stop_reason"])
        case _:
            pass


def _block(at: int, block: Json, said: Said) -> None:
    for name in ("name", "text", "thinking"):
        _add(said, f"{at}.{name}", block.get(name))


def _responses(event: Json, said: Said) -> None:
    kind = event.get("type", "")
    at = event.get("output_index")
    if event.get("object") == "response":
        for place, item in enumerate(event["output"]):
            _add(said, f"{place}.name", item.get("name"))
            _add(said, f"{place}.arguments", item.get("arguments"))
            for part in item.get("content") or ():
                _add(said, f"{place}.{part['type']}", part["text"])
        _add(said, "finish", event["status"])
    elif kind == "response.output_item.added":
        _add(said, f"{at}.name", event["item"].get("name"))
    elif kind == "response.function_call_arguments.delta":
        _add(said, f"{at}.arguments", event["delta"])
    elif kind.endswith("_text.delta"):
        _add(said, f"{at}.{kind.split('.')[1]}", event["delta"])
    elif kind in ("response.completed", "response.incomplete"):
        _add(said, "finish", event["response"]["status"])

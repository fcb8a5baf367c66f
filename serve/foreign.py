"""Turns parts of a conversation that this server can't read (pictures, documents, items of other
providers) into lines of text, so that a conversation begun on another server can go on here."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence as Seqs
from typing import Any, NoReturn

from serve.errors import ApiError

log = logging.getLogger("specdec.serve")

READABLE = ("text", "input_text", "output_text", "refusal")
PICTURES = ("image_url", "input_image", "image")
"""Types of pictures, by OpenAI's two APIs and Anthropic's. Models that take none get a line."""
HEARD = ("input_audio", "audio_url", "audio", "input_video", "video_url", "video")
"""Types of sounds and videos."""
BLOCKS = ("thinking", "redacted_thinking", "tool_use", "tool_result")
"""Block types of Anthropic's API that its own schema handles."""
UNTOLD = ("type", "id", "status", "cache_control", "signature", "encrypted_content")
"""Fields left out of the text: they mean nothing to a model."""
DATA = re.compile(
    r"data:(?=[\w;])(?:[\w.+-]+/[\w.+-]+)?(?:;[\w.+=-]+)*,[\w.~!$&*%+/=-]*"
    r"|(?<![\w+/=-])[\w+/=-]{501,}",
    re.ASCII,
)
"""Data in a text: a data URL, or more letters of base64 in a row than a text has. Languages without
blanks have none of them, and lines of CSV or code have other signs between."""
DEEPEST = 12


def line_of(item: Mapping[str, Any]) -> str:
    """The item as one line: its type and its fields as JSON, with data replaced by its length."""
    kind = item["type"]
    log.info("a part of type %.80r can't be read here: it became a line of text", kind)
    held = {name: value for name, value in item.items() if name not in UNTOLD}
    text = json.dumps(_shown(held), ensure_ascii=False)
    return f"[{kind}: {text}]" if held else f"[{kind}]"


def kind_of(part: Any, known: Collection[str]) -> str | None:
    """The type of a part, as a dict or a parsed object: its name if it is in `known`, `foreign` if
    not, None if the part has no type."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return kind if kind in known else "foreign" if isinstance(kind, str) else None


def is_foreign(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind not in READABLE


def is_foreign_call(call: Any) -> bool:
    """Whether it calls anything but a function."""
    kind = call.get("type") if isinstance(call, dict) else None
    return isinstance(kind, str) and kind != "function"


def check_newest(messages: Any, param: str) -> None:
    """Refuse a new message of the user that holds a document, a sound or a video, since its text,
    or the next one's, may be about it. Pictures: `pictures.refuse_newest`.

    messages: as sent, in the form of any API. Raises ApiError 400.
    """
    if not isinstance(messages, list):
        return
    for at in newest([_role(message) for message in messages]):
        content = messages[at].get("content")
        parts = filter(is_foreign, content if isinstance(content, list) else ())
        for kind in (part["type"] for part in parts):
            if kind not in (*BLOCKS, *PICTURES):
                refuse_part(f"{param}[{at}].content", kind, param)


def newest(roles: Seqs[str]) -> list[int]:
    """The places of the user's new messages: all behind the last of the model or a tool. Clients
    send a picture and its question as two, or append a reminder of the system. But not the one
    right after a tool's result: agents attach things there and send them with each request."""
    found: list[int] = []
    for at in reversed(range(len(roles))):
        if roles[at] == "user":
            found.append(at)
        elif roles[at] not in ("system", "developer"):
            if roles[at] == "tool":
                del found[-1:]
            break
    return found[::-1]


def _role(message: Any) -> str:
    """The role of a message, or of an item that has none: the model's, or a tool's. In Anthropic's
    API a tool's result is a block of a user's message."""
    role = message.get("role", "assistant") if isinstance(message, dict) else "assistant"
    content = message.get("content") if role == "user" else None
    results = any(map(_is_result, content)) if isinstance(content, list) else False
    return "tool" if results or _is_result(message) else str(role)


def refuse_part(where: str, kind: str, param: str) -> NoReturn:
    """Raise ApiError 400 for a part of this type in the newest message."""
    message = f"{where} has a part of type {kind[:80]!r}, but this server"
    if kind in HEARD:
        raise ApiError(400, f"{message} takes no audio or video, not yet", param=param)
    if kind in PICTURES:
        message += "'s model reads text alone: images are not supported, nor are documents"
        raise ApiError(400, message, param=param)
    raise ApiError(400, f"{message} reads no documents: send their text", param=param)


def _is_result(part: Any) -> bool:
    """Whether it is a tool's result, as a message, an item or a block."""
    if not isinstance(part, dict):
        return False
    return part.get("role") in ("tool", "function") or str(part.get("type")).endswith(
        ("_output", "tool_result")
    )


def _shown(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return DATA.sub(lambda run: f"({len(run[0])} characters of data)", value)
    if isinstance(value, (dict, list)) and depth >= DEEPEST:
        return "(more)"
    if isinstance(value, dict):
        return {name: _shown(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shown(inner, depth + 1) for inner in value]
    return value

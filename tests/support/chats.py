"""Random chats, and texts that mean to write control tokens."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import strategies as st

from serve.anthropic.schema import MessagesRequest
from serve.anthropic.translate import chat_of as messages_chat
from serve.chat_schema import ChatRequest
from serve.prompts import chat_ids
from serve.responses.schema import ResponsesRequest
from serve.responses.translate import chat_of as responses_chat
from serve.schema import parse
from targets.tokenizer import Tokenizer
from tests.support.constrained import mini_tokenizer

CONTROL = sorted(
    token.content
    for token in mini_tokenizer()._backend.get_added_tokens_decoder().values()
    if token.special
)
ATTACKS = st.lists(
    st.sampled_from(
        [*CONTROL, *(token[:-1] for token in CONTROL), *(token[1:] for token in CONTROL)]
        + [*"<>|\n \"'{}:,", "turn", "user\n", "model\n", "x", "\ue000", "\ue001"]
    ),
    min_size=1,
    max_size=6,
).map("".join)
IDS = st.sampled_from(["a", "b", "c", None])


def controls(ids: list[int]) -> list[str]:
    """The control tokens among them."""
    words = map(mini_tokenizer()._backend.id_to_token, ids)
    return [word for word in words if word in CONTROL]


def results_in(messages: list[dict[str, Any]]) -> set[str]:
    """The words of what tools answered."""
    return {word for m in messages if m["role"] == "tool" for word in words_of(m["content"])}


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages in any order: orphans, several calls of one id, texts between, several systems."""
    found: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 9))):
        role = draw(st.sampled_from(["tool", "tool", "assistant", "assistant", "user", "system"]))
        message: dict[str, Any] = {"role": role, "content": f"{role}{number}"}
        if role == "tool":
            message |= {"content": f"R{number}", "tool_call_id": draw(IDS)}
        if role == "assistant" and draw(st.booleans()):
            ids = draw(st.lists(IDS, min_size=1, max_size=3))
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": "f", "arguments": {"n": number}}}
                for i in ids
            ]
            message["content"] = draw(st.sampled_from(["", message["content"]]))
        found.append(message)
    return found


def chat_of_body(api: str, body: dict[str, Any]) -> ChatRequest:
    """The chat that a body of any of the three APIs means. Raises ApiError."""
    data = json.dumps(body).encode()
    if api == "responses":
        return responses_chat(parse(ResponsesRequest, data))
    if api == "messages":
        return messages_chat(parse(MessagesRequest, data))
    return parse(ChatRequest, data)


def prompt_of(api: str, body: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """The ids of the prompt that it makes."""
    return chat_ids(chat_of_body(api, body), tokenizer, 100_000)

"""Translates a request of Anthropic's API to a `ChatRequest`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from serve.anthropic.schema import (
    AnthropicMessage,
    AnthropicToolChoice,
    ForeignBlock,
    MessagesRequest,
    PromptRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ThinkingConfig,
    ToolResultBlock,
    ToolUseBlock,
)
from serve.chat_schema import ChatRequest
from serve.errors import ApiError
from serve.foreign import PICTURES, check_newest, line_of
from serve.schema import translated

log = logging.getLogger("specdec.serve")

ATTRIBUTION = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""The first line of Claude Code's system prompt. It is removed: it differs in each request, so the
prefix cache could reuse nothing after it."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(wire: PromptRequest) -> ChatRequest:
    """Raises ApiError 400 for what `ChatRequest` refuses."""
    values = wire.sampling_wishes | {"messages": _messages(wire)} | _thinking(wire.thinking)
    if wire.tools:
        values["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in wire.tools
        ]
    if wire.tool_choice is not None:
        values |= _choice(wire.tool_choice)
    form = wire.output_format or (wire.output_config and wire.output_config.format)
    if form:
        schema = {"name": "output", "schema": form.schema_}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    if wire.messages[-1].role == "assistant":
        _check_beginning(wire.messages[-1])
        check_newest([turn.model_dump() for turn in wire.messages[:-1]], "messages")
        values["continue_final_message"] = True
    if isinstance(wire, MessagesRequest):
        values |= {"stream": wire.stream, "stop": wire.stop_sequences or None}
        values["max_tokens"] = wire.max_tokens
    return translated(ChatRequest, values)


def _messages(wire: PromptRequest) -> list[dict[str, Any]]:
    messages = [message for turn in wire.messages for message in _of_message(turn)]
    text = _joined(wire.system or [])
    line = ATTRIBUTION.match(text)
    system = text[line.end() :] if line else text
    return [{"role": "system", "content": system}, *messages] if system else messages


def _of_message(message: AnthropicMessage) -> Iterator[dict[str, Any]]:
    """The chat messages of one message: one for all blocks of an assistant; for a user one per tool
    result and one per run of other blocks between them."""
    if message.role == "assistant":
        yield _of_assistant(message)
        return
    texts: list[TextBlock | ForeignBlock] = []
    for block in message.content:
        if isinstance(block, (TextBlock, ForeignBlock)):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": message.role, "content": _content(texts)}
            texts = []
            yield _of_result(block)
    if texts or not message.content:
        yield {"role": message.role, "content": _content(texts)}


def _of_assistant(message: AnthropicMessage) -> dict[str, Any]:
    blocks = message.content
    calls = [
        {
            "id": block.id,
            "function": {"name": block.name, "arguments": block.partial_json or block.input},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if any(isinstance(block, RedactedThinkingBlock) for block in blocks):
        log.info("/v1/messages: left out a thought that another server sealed")
    thought = "\n".join(b.thinking for b in blocks if isinstance(b, ThinkingBlock))
    return {
        "role": "assistant",
        "content": _joined(b for b in blocks if isinstance(b, (TextBlock, ForeignBlock))) or None,
        "tool_calls": calls or None,
        "reasoning_content": thought or None,
    }


def _of_result(block: ToolResultBlock) -> dict[str, Any]:
    content = _content(block.content or [])
    if block.is_error:
        error = {"type": "text", "text": "Error:"}
        content = f"Error: {content}" if isinstance(content, str) else [error, *content]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _content(blocks: Sequence[TextBlock | ForeignBlock]) -> str | list[dict[str, Any]]:
    """A text; with pictures, parts, of which the pictures are as they were sent."""
    if not any(block.type in PICTURES for block in blocks):
        return _joined(blocks)
    parts = (
        block.model_dump() if block.type in PICTURES else {"type": "text", "text": _joined([block])}
        for block in blocks
    )
    return list(parts)


def _joined(blocks: Iterable[TextBlock | ForeignBlock]) -> str:
    return "\n".join(
        block.text if isinstance(block, TextBlock) else line_of(block.model_dump())
        for block in blocks
    )


def _thinking(config: ThinkingConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    if config.type == "disabled":
        return {"reasoning_effort": "none"}
    return {"reasoning_effort": "high", "thinking_token_budget": config.budget_tokens}


def _choice(choice: AnthropicToolChoice) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": choice.name}}
    wish = named if choice.type == "tool" else CHOICES[choice.type]
    single = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {"tool_choice": wish} | single


def _check_beginning(last: AnthropicMessage) -> None:
    """An assistant's message at the end is a prefix of the answer: only text is allowed."""
    if not last.content or any(not isinstance(block, TextBlock) for block in last.content):
        message = "a last message of the assistant begins the answer: it can hold text alone"
        raise ApiError(400, message, param="messages")

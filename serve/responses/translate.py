"""Translates a request of OpenAI's Responses API to a `ChatRequest`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence as Seqs
from typing import Any

from serve.chat_schema import ChatRequest
from serve.errors import ApiError
from serve.fields import check_names
from serve.foreign import line_of
from serve.responses.namespaces import Names, functions_and_namespaces
from serve.responses.schema import (
    ROLES,
    ForeignItem,
    Format,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    ToolsItem,
)
from serve.responses.thoughts import opened
from serve.schema import translated

log = logging.getLogger("specdec.serve")

CHOICES = {
    "function": ("type", "name", "namespace"),
    "namespace": ("type", "name"),
    "allowed_tools": ("type", "mode", "tools"),
}
"""Types of a tool_choice object -> the names that it may have."""


def chat_of(wire: ResponsesRequest) -> ChatRequest:
    """Raises ApiError 400 for what `ChatRequest` refuses."""
    values = wire.sampling_wishes | {
        "model": wire.model,
        "messages": _messages(wire),
        "max_tokens": wire.max_output_tokens,
        "parallel_tool_calls": wire.parallel_tool_calls,
        "thinking_token_budget": wire.thinking_token_budget,
        "tool_choice": _choice(wire.tool_choice, wire.names),
        "stream": wire.stream,
    }
    if tools := list(wire.names.functions()):
        values["tools"] = tools
    elif values["tool_choice"] == "auto":
        values["tool_choice"] = None
    if wire.reasoning is not None:
        values["reasoning_effort"] = wire.reasoning.effort
    if wire.text is not None and wire.text.format is not None:
        values["response_format"] = _format(wire.text.format)
    return translated(ChatRequest, values)


def _messages(wire: ResponsesRequest) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": wire.instructions}] if wire.instructions else []
    return [*first, *_of_items(wire.input, wire.names)]


def _of_items(items: Seqs[Item], names: Names) -> Iterator[dict[str, Any]]:
    """The chat messages of the items. Consecutive items of the assistant (a thought, a text, calls)
    become one message."""
    turn: dict[str, Any] = {}
    for item in map(_readable, items):
        if isinstance(item, ToolsItem):
            continue
        if isinstance(item, FunctionOutputItem):
            yield from _ended(turn)
            turn = {}
            call = item.call_id or ""
            yield {"role": "tool", "tool_call_id": call, "content": item.output or ""}
        elif isinstance(item, MessageItem) and item.role != "assistant":
            yield from _ended(turn)
            turn = {}
            yield {"role": item.role, "content": item.content}
        else:
            if _begins_anew(turn, item):
                yield from _ended(turn)
                turn = {}
            _add(turn, item, names)
    yield from _ended(turn)


def _readable(item: Item) -> Item:
    """Replace a foreign item by a message with its text, of its own role if it has one: else
    results of tools are of role `user`, all others of role `assistant`."""
    if not isinstance(item, ForeignItem):
        return item
    role = (item.model_extra or {}).get("role")
    if role not in ROLES:
        role = "user" if item.type.endswith("_output") else "assistant"
    return MessageItem(type="message", role=role, content=line_of(item.model_dump()))


def _begins_anew(turn: dict[str, Any], item: Item) -> bool:
    """Whether an item begins a new message: a thought or a text does after a text or a call."""
    has_content = "content" in turn or "tool_calls" in turn
    return has_content and not isinstance(item, FunctionCallItem)


def _ended(turn: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if turn:
        yield {"role": "assistant", **turn}


def _add(turn: dict[str, Any], item: Item, names: Names) -> None:
    match item:
        case FunctionCallItem():
            name = names.in_chat(item.namespace, item.name)
            call = {"name": name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "function": call})
        case MessageItem():
            turn["content"] = item.content
        case ReasoningItem():
            if thought := _thought(item):
                before = turn.get("reasoning_content")
                turn["reasoning_content"] = thought if before is None else f"{before}\n{thought}"


def _thought(item: ReasoningItem) -> str | None:
    """The thought's full text, else its summary."""
    if item.content:
        return "\n".join(part.text for part in item.content)
    if item.encrypted_content:
        if thought := opened(item.encrypted_content):
            return thought
        log.info("/v1/responses: left out a thought that another server sealed")
    return "\n".join(part.text for part in item.summary or ()) or None


def _choice(choice: str | dict[str, Any] | None, names: Names) -> Any:
    """The tool_choice in the chat's form, where a function's name is one level deeper."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind in CHOICES:
        sent = {name: value for name, value in choice.items() if name not in CHOICES[kind]}
        check_names(sent, CHOICES[kind], {}, {}, "tool_choice")
    if kind == "function":
        return _function(_chosen(choice, names)[0])
    if kind == "namespace":
        return _allowed("required", _chosen(choice, names))
    if kind == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ApiError(400, "tool_choice: tools must be a list of tools", param="tool_choice")
        offered = functions_and_namespaces(tools)
        chosen = [name for tool in offered for name in _chosen(tool, names)]
        return _allowed(choice.get("mode"), chosen)
    message = "tool_choice must be none, auto, required, or name a function: this server runs none"
    raise ApiError(400, message, param="tool_choice")


def _chosen(tool: dict[str, Any], names: Names) -> list[Any]:
    """The chat's names of a function, or of a namespace's functions."""
    name, namespace = tool.get("name"), tool.get("namespace")
    if not isinstance(name, str) or not isinstance(namespace, str | None):
        message = f"tool_choice: a {tool.get('type')} needs a name"
        raise ApiError(400, message, param="tool_choice")
    if tool.get("type") == "function":
        return [names.in_chat(namespace, name)]
    if not (found := names.of_namespace(name)):
        message = f"tool_choice names the namespace {name[:80]!r}, which has no functions here"
        raise ApiError(400, message, param="tool_choice")
    return found


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _allowed(mode: Any, names: Seqs[str]) -> dict[str, Any]:
    allowed = {"mode": mode, "tools": [_function(name) for name in names]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _format(form: Format) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type, "schema": form.schema_}
    if form.schema_ is None:
        raise ApiError(400, "text.format of type json_schema needs a schema", param="text")
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}

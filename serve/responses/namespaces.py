"""Maps functions in namespaces (Codex sends the tools of each MCP server as one) to flat names for
the chat, and back."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence as Seqs
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from serve.chat_schema import MAX_TOOLS
from serve.errors import ApiError
from serve.schema import STRICT

log = logging.getLogger("specdec.serve")

LONGEST = 128
"""Characters of a function's name in the chat."""
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.\-]")


class FunctionTool(BaseModel):
    model_config = STRICT

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def only_functions(value: Any) -> Any:
    """Drop tools of other types, which would run on OpenAI's servers or need its formats."""
    return _of_types(value, ("function",))


class NamespaceTool(BaseModel):
    """The model gets the functions' descriptions, not the namespace's."""

    model_config = STRICT

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: Annotated[str, BeforeValidator(lambda given: given or "")] = ""
    """null as absent; replies repeat it, and there it is required."""
    tools: Annotated[list[FunctionTool], BeforeValidator(only_functions)] = []


def functions_and_namespaces(value: Any) -> Any:
    return _of_types(value, ("function", "namespace"))


def _of_types(value: Any, types: tuple[str, ...]) -> Any:
    if not isinstance(value, list):
        return value
    kept = []
    for tool in value:
        if isinstance(tool, dict) and tool.get("type") not in types:
            name = tool.get("name") or tool.get("server_label") or ""
            kind = tool.get("type")
            log.info("/v1/responses: left out the tool %.80r, of type %.80r", name, kind)
        else:
            kept.append(tool)
    return kept


class Names:
    """A one-to-one map between (namespace or None, name) of one request's functions and their names
    in the chat."""

    def __init__(self, tools: Seqs[FunctionTool | NamespaceTool]) -> None:
        """Raises ApiError 400 for more functions than a chat may have."""
        count = sum(len(t.tools) if isinstance(t, NamespaceTool) else 1 for t in tools)
        if count > MAX_TOOLS:
            message = f"tools have {count} functions: at most {MAX_TOOLS} are allowed"
            raise ApiError(400, message, param="tools")
        self._own: dict[str, tuple[str | None, str]] = {}  # by the chat's name
        self._in_chat: dict[tuple[str | None, str], str] = {}
        self._functions: list[tuple[str, FunctionTool]] = []
        self._inner: dict[str, list[str]] = {}  # chat's names in namespaces, by own name
        for tool in tools:
            if isinstance(tool, FunctionTool):
                self._add(None, tool)
        for tool in tools:
            if isinstance(tool, NamespaceTool):
                for function in tool.tools:
                    self._add(tool.name, function)

    def functions(self) -> Iterator[dict[str, Any]]:
        """The chat's tools."""
        for name, tool in self._functions:
            function = tool.model_dump(exclude={"type"}) | {"name": name}
            yield {"type": "function", "function": function}

    def in_chat(self, namespace: str | None, name: str) -> str:
        """The chat's name of a function. A function with a namespace that is not among the tools
        gets the name that it would have; one without is looked up in all namespaces, and found if
        exactly one has its name."""
        known = self._in_chat.get((namespace or None, name))
        if known is not None:
            return known
        if namespace:
            return _qualified(namespace, name)
        inner = self._inner.get(name, [])
        return inner[0] if len(inner) == 1 else name

    def of_namespace(self, namespace: str) -> list[str]:
        """The chat's names of a namespace's functions."""
        return [chat_name for (space, _), chat_name in self._in_chat.items() if space == namespace]

    def own(self, name: str) -> tuple[str | None, str]:
        """(namespace, name) of what the chat calls `name`."""
        return self._own.get(name, (None, name))

    def _add(self, namespace: str | None, tool: FunctionTool) -> None:
        key = namespace, tool.name
        chat_name = self._in_chat.get(key)
        if chat_name is None:
            chat_name = (
                tool.name if namespace is None else self._free(_qualified(namespace, tool.name))
            )
            self._in_chat[key], self._own[chat_name] = chat_name, key
            if namespace is not None:
                self._inner.setdefault(tool.name, []).append(chat_name)
        self._functions.append((chat_name, tool))

    def _free(self, name: str) -> str:
        number, free = 1, name
        while free in self._own:
            number += 1
            free = f"{name[: LONGEST - 5]}_{number}"
        return free


def _qualified(namespace: str, name: str) -> str:
    return NOT_IN_A_NAME.sub("_", f"{namespace}.{name}")[:LONGEST]

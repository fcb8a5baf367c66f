"""A chat's messages in an order and in forms that chat templates can write.

Clients send a tool's result wherever it came in: behind a text, another call, the next question.
Templates write it where it stands directly behind its call, and many leave it out elsewhere.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("specdec.chat")

Message = dict[str, Any]
DEEPEST = 100
"""Objects and arrays in each other, in a call's arguments; templates go a few hundred deep."""


@dataclass
class _Call:
    id: str | None
    name: str | None
    cut: str = ""
    """The call as text, where its arguments are no object; templates have no form for that."""
    results: list[Message] = field(default_factory=list)


class _Pairs:
    """Which results belong to which calls: by id; where one of both has none, to a call of the
    last message that calls. Fed with messages in their order, each once."""

    def __init__(self) -> None:
        self.turns: dict[int, list[_Call]] = {}
        """The calls of each message that calls, by its place."""
        self.found: set[int] = set()
        """Places of the results that have a call."""
        self._by_order: dict[tuple[bool, str | None], deque[_Call]] = {}
        """Calls of the last message with calls, by (whether only those without an id, name or None
        for all)."""
        self._waiting: dict[str, list[list[_Call]]] = {}  # by id: a list for each message
        self._answered: dict[str, _Call] = {}
        self._early: dict[str, list[tuple[int, Message]]] = {}  # results that came before a call

    def add_calls(self, at: int, calls: Iterable[Mapping[str, Any]]) -> None:
        self.turns[at] = turn = [
            _Call(
                call.get("id"),
                call["function"].get("name"),
                written_call(call) if isinstance(call["function"].get("arguments"), str) else "",
            )
            for call in calls
        ]
        self._by_order = {}
        here: dict[str, list[_Call]] = {}
        for call in turn:
            for name in (None, call.name):
                for without_id in (False, True) if call.id is None else (False,):
                    self._by_order.setdefault((without_id, name), deque()).append(call)
            if call.id is None:
                continue
            here.setdefault(call.id, []).append(call)
            for place, index in self._early.pop(call.id, ()):
                self._pair(place, index, call)
        for own, found in here.items():
            if waiting := [call for call in found if not call.results]:
                self._waiting.setdefault(own, []).append(waiting)

    def add_result(self, at: int, result: Message) -> None:
        """Ids may come again in later turns: the nearest call that waits, else the last one that
        was answered."""
        own = result.get("tool_call_id")
        if own is not None and (waiting := self._waiting.get(own)):
            self._pair(at, result, waiting[-1].pop(0))
            if not waiting[-1]:
                waiting.pop()
        elif own is not None and own in self._answered:
            self._pair(at, result, self._answered[own])
        elif (call := self._next(own is not None, result.get("name"))) is not None:
            self._pair(at, result, call)
        elif own is not None:
            self._early.setdefault(own, []).append((at, result))

    def _next(self, without_id: bool, name: str | None) -> _Call | None:
        """The first that waits, else the last."""
        calls = self._by_order.get((without_id, name), deque[_Call]())
        while len(calls) > 1 and calls[0].results:
            calls.popleft()
        return calls[0] if calls else None

    def _pair(self, at: int, result: Message, call: _Call) -> None:
        if result.get("tool_call_id") is None or call.id is None:
            # templates find a result's function by these
            result = {"name": call.name, **result, "tool_call_id": call.id}
        call.results.append(result)
        self.found.add(at)
        if call.id is not None:
            self._answered[call.id] = call


def paired(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """With each tool result directly behind the message that calls it, in the order of its calls;
    what stood between follows. A result without a call becomes a line of text, and so does a call
    that was cut, with its result."""
    history, pairs = [with_arguments(message) for message in messages], _Pairs()
    for at, message in enumerate(history):
        if message.get("role") == "tool":
            pairs.add_result(at, message)
        elif calls := message.get("tool_calls"):
            pairs.add_calls(at, calls)
    return list(_in_order(history, pairs))


def _in_order(history: list[Message], pairs: _Pairs) -> Iterator[Message]:
    for at, message in enumerate(history):
        if message.get("role") != "tool":
            calls = pairs.turns.get(at, [])
            yield _with_cut_calls(message, calls)
            for call in calls:
                yield from () if call.cut else call.results
            for call in calls:
                yield from (_in_words(result, call.name) for result in call.results if call.cut)
        elif at not in pairs.found:
            log.info("a tool's result has no call among the messages: it became text")
            yield _orphan(message)


def with_arguments(message: Mapping[str, Any]) -> Message:
    """Arguments that came as text, read."""
    found = dict(message)
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**function, "arguments": read_arguments(arguments)}}
            for call in calls
            for function in [call.get("function") or {}]
            for arguments in [function.get("arguments") or {}]
        ]
    return found


def read_arguments(value: str | dict[str, Any]) -> str | dict[str, Any]:
    """An object; what isn't one is returned as it was written."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return {}
    try:
        read = json.loads(value)
        if "\\u" in value:
            json.dumps(read, ensure_ascii=False).encode()  # half of a character can't be
    except (ValueError, RecursionError):
        return value
    deep = value.count("{") + value.count("[") > DEEPEST and _deeper(read, DEEPEST)
    return read if isinstance(read, dict) and not deep else value


def _deeper(value: Any, levels: int) -> bool:
    """Whether objects and arrays stand in each other deeper than that."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper(one, levels - 1) for one in inner)


def _with_cut_calls(message: Message, calls: list[_Call]) -> Message:
    cut = [call.cut for call in calls if call.cut]
    if not cut:
        return message
    log.info("a call became text: its arguments are no object")
    whole = [c for c, call in zip(message["tool_calls"], calls, strict=True) if not call.cut]
    found = {name: value for name, value in message.items() if name != "tool_calls"}
    found["content"] = "\n".join(filter(None, [text_of(message.get("content")), *cut]))
    return found | ({"tool_calls": whole} if whole else {})


def _in_words(result: Message, name: str | None) -> Message:
    """A result as text."""
    content = f"Result of {name or 'a tool'}: {text_of(result.get('content'))}"
    return {"role": "user", "content": content}


def _orphan(result: Message) -> Message:
    of = result.get("name") or result.get("tool_call_id")
    note = f"Result of a tool call that is not in this conversation{f' ({of})' if of else ''}: "
    return {"role": "user", "content": note + text_of(result.get("content"))}


def alternating(messages: Iterable[Message]) -> list[Message]:
    """For templates that allow one system message at most, first, and then user and assistant in
    turns, the user first. Tool results stay behind their calls."""
    runs: list[list[Message]] = []
    begun = False  # whether anything but the system was there
    for message in messages:
        role = message.get("role")
        if role in ("system", "developer"):
            role = "user" if begun else "system"
        elif role == "assistant" and not begun:
            runs.append([{"role": "user", "content": ""}])
        begun = begun or role != "system"
        if runs and runs[-1][-1]["role"] == role != "tool":
            runs[-1].append({**message, "role": role})
        else:
            runs.append([{**message, "role": role}])
    return [_joined(run) for run in runs]


def in_words(messages: Iterable[Message]) -> list[Message]:
    """For templates without a form for tools: calls and results are text, and user and assistant
    alternate, with the system's text in the user's first."""
    found: list[Message] = []
    names: dict[Any, str] = {}
    for message in messages:
        role, content = message.get("role"), text_of(message.get("content"))
        if role == "tool":
            found.append(
                _in_words(message, names.get(message.get("tool_call_id")) or message.get("name"))
            )
        elif calls := message.get("tool_calls"):
            names |= {call.get("id"): call["function"].get("name") for call in calls}
            lines = [content, *map(written_call, calls)]
            changes = {"content": "\n".join(filter(None, lines)), "tool_calls": None}
            found.append({**message, **changes})
        else:
            role = "user" if role in ("system", "developer") else role
            found.append({**message, "role": role})
    return alternating(found)


def written_call(call: Mapping[str, Any]) -> str:
    """A call as text: `call:name{"city": "Paris"}`."""
    function = call["function"]
    value = function.get("arguments") or {}
    arguments = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"call:{function.get('name')}{arguments}"


def text_of(content: Any) -> str:
    """A content's text, whichever form it has."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping):
        return json.dumps(content, ensure_ascii=False)
    return "".join(part.get("text", "") for part in content)


def _joined(run: list[Message]) -> Message:
    """Messages of one role as one."""
    if len(run) == 1:
        return run[0]
    found: Message = {}
    for message in run:
        found |= message
    found["content"] = "\n".join(filter(None, (text_of(m.get("content")) for m in run)))
    for name in ("reasoning", "reasoning_content"):
        if thoughts := [m[name] for m in run if m.get(name)]:
            found[name] = "\n".join(thoughts)
    if calls := [call for m in run for call in m.get("tool_calls") or ()]:
        found["tool_calls"] = calls
    return found

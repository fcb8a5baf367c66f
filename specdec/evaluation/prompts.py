"""Prompts for evaluation, from JSON lines in common forms.

| form        | a line                                             |
|-------------|----------------------------------------------------|
| plain       | `"text"`, `{"prompt": "text"}`, `{"text": "text"}` |
| chat        | `{"messages": [{"role": "user", "content": …}]}`   |
| HumanEval   | `{"task_id": …, "prompt": "def f(…"}`              |
| Spec-Bench  | `{"question_id": …, "category": …, "turns": [...]}`|

SPEED-Bench's lines are as Spec-Bench's. Only the first turn of such a question is used: the second
would need the model's own answer to the first. `id` and `category` are optional.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specdec.core.errors import UserError
from targets.tokenizer import check_characters

FORMS = 'a string, or an object with "prompt", "text", "messages" or "turns"'


@dataclass(frozen=True)
class Prompt:
    """One prompt. A plain one has `text`, a chat has `messages`."""

    id: str
    category: str
    kind: Literal["plain", "chat"]
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    thinking: bool = False
    """Of a chat: whether the model thinks before it answers."""

    def encode(
        self, encode: Callable[[str], list[int]], encode_chat: Callable[..., list[int]]
    ) -> list[int]:
        """Token ids. encode, encode_chat: the tokenizer's methods for texts and chats."""
        if self.kind == "plain":
            return encode(self.text)
        options = {"enable_thinking": True} if self.thinking else {}
        return encode_chat(list(self.messages), **options)


def thinking_prompts(prompts: Seqs[Prompt]) -> list[Prompt]:
    """The same chats with thinking. Raises UserError where there is a prompt that is not a chat."""
    if plain := next((prompt for prompt in prompts if prompt.kind == "plain"), None):
        raise UserError(
            f'--thinking is of chats: prompt {plain.id} is a plain text, give it as "messages"'
        )
    return [replace(prompt, thinking=True) for prompt in prompts]


def read_prompts(
    path: str | Path, limit: int | None = None, category: str | None = None
) -> list[Prompt]:
    """Read a JSONL file, at most `limit` prompts; blank lines are skipped. category: of lines that
    name none; by default the file's name.

    Raises UserError that names the file and the invalid line, if any.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # JSON may hold other line ends
    except (OSError, UnicodeDecodeError) as failure:
        raise UserError(f"can't read prompts from {path}: {failure}") from failure
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(prompts) >= limit:
            break
        if line.strip():
            prompts.append(_read_line(line, f"{path}:{number}", str(number), category or path.stem))
    if not prompts:
        raise UserError(f"{path} holds no prompts: each line must be {FORMS}")
    return prompts


def _read_line(line: str, where: str, number: str, stem: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as failure:
        raise UserError(f"{where} is not valid JSON: {failure}") from failure
    record = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(record, dict):
        raise UserError(f"{where} must be {FORMS}")
    name = next((str(record[key]) for key in ("id", "task_id", "question_id") if key in record), "")
    category = str(record.get("category", "humaneval" if "task_id" in record else stem))
    if "messages" in record:
        messages = _check_messages(record["messages"], where)
        return Prompt(name or number, category, "chat", messages=messages)
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise UserError(f'{where}: "turns" must be a list of at least one string')
        message = {"role": "user", "content": _check_text(turns[0], "turns[0]", where)}
        return Prompt(name or number, category, "chat", messages=(message,))
    for key in ("prompt", "text"):
        if key in record:
            text = _check_text(record[key], key, where)
            return Prompt(name or number, category, "plain", text=text)
    raise UserError(f"{where} must be {FORMS}")


def _check_text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise UserError(f'{where}: "{key}" must be a string that isn\'t empty')
    check_characters(value, where)
    return value


def _check_messages(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    good = isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value
    )
    if not good or not value:
        raise UserError(f'{where}: "messages" must be a list of objects with role and content')
    return tuple(m | {"content": _text_of(m["content"], where)} for m in value)


def _text_of(content: Any, where: str) -> str:
    """The text of a message's content; parts are joined as in the server. Anything else is refused,
    as a template would write its Python representation."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str)
        for p in parts
    ):
        raise UserError(
            f'{where}: the content of "messages" must be a string or a list of '
            '{"type": "text", "text": ...} parts'
        )
    text = "\n".join(part["text"] for part in parts)
    check_characters(text, where)
    return text

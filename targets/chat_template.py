"""A checkpoint's chat template: where it stands, and chats written with it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from specdec.core.errors import UserError
from targets.json_files import read_object

PROBE = "specdecprobe"
"""A part's text, for `ChatTemplate.reads_parts`."""


class RenderedTooLong(UserError):
    """A chat's text is longer than its caller has room for: rendering stopped there."""


class ChatTemplate:
    def __init__(self, text: str | None) -> None:
        """text: in Jinja's language; None: the checkpoint has no template."""
        self.text = text
        self._reads_parts: dict[str, bool] = {}

    def render(
        self,
        messages: list[dict[str, Any]],
        values: dict[str, Any],
        max_characters: int | None = None,
    ) -> str:
        """The prompt text of a chat, with the header of the model's turn unless the values turn it
        off. Raises UserError where there is no template or it refuses the messages, and
        RenderedTooLong once the text has more than `max_characters`."""
        if self.text is None:
            raise UserError(
                "this checkpoint has no chat template (no chat_template.jinja, no chat_template "
                "in tokenizer_config.json): use plain completion, or add the template file"
            )
        # templates test these by `is not none`, as transformers gives them
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **values}
        try:
            return _joined(self._compiled.generate(messages=messages, **values), max_characters)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(
                f"the checkpoint's chat template refuses these messages: {error}; "
                "check their roles, order and contents"
            ) from error

    def reads_parts(self, role: str) -> bool:
        """Whether a message of this role may have a list of parts as its content: whether a part's
        text is rendered, and not the list as Python prints it."""
        if role not in self._reads_parts:
            self._reads_parts[role] = self._renders_a_part(role)
        return self._reads_parts[role]

    def _renders_a_part(self, role: str) -> bool:
        messages: list[dict[str, Any]] = [
            {"role": role, "content": [{"type": "text", "text": PROBE}]}
        ]
        if role != "user":
            messages.append({"role": "user", "content": "x"})
        try:
            text = self.render(messages, {"bos_token": "", "eos_token": ""})
        except UserError:
            return False
        return PROBE in text and "'text'" not in text

    @cached_property
    def _compiled(self) -> jinja2.Template:
        """Compiled once: that takes longer than rendering most chats."""
        return _environment().from_string(self.text or "")


def _joined(parts: Iterable[str], most: int | None) -> str:
    kept, size = [], 0
    for part in parts:
        kept.append(part)
        size += len(part)
        if most is not None and size > most:
            raise RenderedTooLong(f"the rendered chat has more than {most} characters")
    return "".join(kept)


def read_template(path: Path, settings: dict[str, Any]) -> str | None:
    """`chat_template.jinja` first, then `chat_template.json` (of processors), then the tokenizer's
    settings: one text, or a list of named ones. Raises UserError."""
    own_file, processors = path / "chat_template.jinja", path / "chat_template.json"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    if processors.is_file():
        settings = read_object(processors)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}` around an assistant's text: marks it for training;
    ignored in prompts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The environment that transformers gives a chat template: sandboxed, with three helpers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

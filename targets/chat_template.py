"""A checkpoint's chat template: where it stands, and chats written with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import BuiltinMethodType, CodeType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from specdec.core.errors import UserError
from targets.json_files import read_object

PROBE = "specdecprobe"
"""A part's text, for `ChatTemplate.reads_parts`."""
MOST_STEPS = 8_000_000
"""Steps that rendering may take, some 3 seconds of a core. Google's template looks at all messages
anew for each one that is no tool's: 1,000 turns with a tool take 3 million."""
LOOK_EVERY = 1024
"""Steps between two looks at the budget."""
READING = {
    dict: frozenset({"get", "items", "keys", "values"}),
    str: frozenset({"endswith", "lower", "replace", "split", "startswith", "strip", "upper"}),
}
"""Methods of plain types that templates call all the time; they change nothing."""
JINJAS_OWN = frozenset({"_loop_vars", "_block_vars"})
"""Arguments that compiled loops add to every call, for functions of Jinja's."""

_given_up: ContextVar[Callable[[], bool]] = ContextVar("given_up", default=lambda: False)


class RenderedTooLong(UserError):
    """A chat's text is longer than its caller has room for: rendering stopped there."""


class TooManySteps(RenderedTooLong):
    """The chat template takes longer for these messages than any chat may."""


class Abandoned(Exception):
    """The chat's text is not needed any more: rendering stopped."""


@contextmanager
def abandoned_when(asked: Callable[[], bool]) -> Iterator[None]:
    """Within this block rendering raises Abandoned soon after `asked` returns True, as when another
    thread has noticed that the client left."""
    token = _given_up.set(asked)
    try:
        yield
    finally:
        _given_up.reset(token)


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
        off. Raises UserError where there is no template or it refuses the messages,
        RenderedTooLong once the text has more than `max_characters`, TooManySteps where the
        template is not done within its budget, and Abandoned (see `abandoned_when`)."""
        if self.text is None:
            raise UserError(
                "this checkpoint has no chat template (no chat_template.jinja, no chat_template "
                "in tokenizer_config.json): use plain completion, or add the template file"
            )
        # templates test these by `is not none`, as transformers gives them
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **values}
        try:
            template = self._for_one_render()
            return _joined(template.generate(messages=messages, **values), max_characters)
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

    def _for_one_render(self) -> jinja2.Template:
        """The template in an environment of its own, which counts the steps of one render."""
        environment, code = self._compiled
        own = environment.overlay()
        assert isinstance(own, _Environment)
        own.begin()
        return jinja2.Template.from_code(own, code, own.make_globals(None))

    @cached_property
    def _compiled(self) -> tuple[jinja2.Environment, CodeType]:
        """Compiled once: that takes longer than rendering most chats."""
        environment = _environment()
        return environment, environment.compile(self.text or "")


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


class _Names(dict[str, Any], jinja2.utils.Namespace):
    """`namespace(...)` of templates. Jinja's own takes several times as long to read."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which counts the look-ups and calls of one render: loops that take long have
    some in each turn. With short ways for plain values: the sandbox's checks were most of the
    time, as a further call in each would be."""

    _steps = 0
    _asked: Callable[[], bool]

    def begin(self) -> None:
        self._steps, self._asked = 0, _given_up.get()

    def _look(self) -> None:
        if self._steps > MOST_STEPS:
            raise TooManySteps(
                "the chat template takes too many steps for these messages: send fewer messages "
                "and tool calls"
            )
        if self._asked():
            raise Abandoned

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._steps += 1
        if not self._steps % LOOK_EVERY:
            self._look()
        if type(obj) is _Names and attribute in obj:
            return obj[attribute]
        if type(obj) is dict and attribute == "get":
            return obj.get
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._steps += 1
        if not self._steps % LOOK_EVERY:
            self._look()
        try:
            return obj[argument]
        except (TypeError, LookupError):
            return super().getitem(obj, argument)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._steps += 1
        if not self._steps % LOOK_EVERY:
            self._look()
        # `getattr` hands out no method that changes a value
        if type(function) is BuiltinMethodType and type(function.__self__) in READING:
            for name in JINJAS_OWN.intersection(kwargs):
                del kwargs[name]
            return function(*args, **kwargs)
        return super().call(context, function, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        kind = type(obj)
        if kind is jinja2.runtime.LoopContext and not attr.startswith("_"):
            return True
        return attr in READING.get(kind, ()) or super().is_safe_attribute(obj, attr, value)


def _environment() -> _Environment:
    """The environment that transformers gives a chat template: sandboxed, with three helpers."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["namespace"] = _Names
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

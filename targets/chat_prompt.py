"""A chat's prompt in pieces that are encoded one by one: control tokens are the template's alone,
no tool's result is lost, and an answer that was begun is gone on with where it ends."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from specdec.core.errors import UserError
from targets.chat_history import Message, alternating, in_words, paired, text_of
from targets.chat_template import RenderedTooLong
from targets.chat_text import ControlTokens

log = logging.getLogger("specdec.chat")

Render = Callable[..., str]
PICTURE = {"type": "image"}
"""A picture among the parts of a content."""
RESPONSE_END = "<tool_response|>"
"""The control token behind which the pictures of a tool's result stand."""
FORMS: dict[str, Callable[[list[Message]], list[Message]]] = {
    "as they are": list,
    "with user and assistant in turns": alternating,
    "with tools as text": in_words,
}
"""How messages are written, best first: a template may refuse the first ones, or leave out what
tools answered."""


class ChatPrompt:
    """The prompt of one request."""

    def __init__(
        self,
        render: Render,
        control: ControlTokens,
        values: Mapping[str, Any],
        goes_on: bool,
        reads_parts: Callable[[str], bool],
        picture: str | None = None,
    ) -> None:
        """goes_on: the last message's text begins the answer. reads_parts: of a role, whether the
        template reads a list of parts as a content. picture: the control token that stands for a
        picture; None: no content has any."""
        self._render, self._control, self._goes_on = render, control, goes_on
        self._reads_parts, self._picture = reads_parts, picture
        self._marks: dict[str, bool] = {}
        """The character that stands for each picture, in the messages' order, and whether a tool's
        result has it."""
        self.order: list[int] = []
        """The pictures by number, in the order in which they stand in the prompt: a tool's result
        may move behind its call. Written by `pieces`."""
        self._values = dict(values)

    def pieces(self, messages: list[Message]) -> list[str]:
        """Raises UserError where the template refuses every form."""
        if self._picture is not None:
            count = sum(_pictures_of(message) for message in messages)
            marks = iter(self._control.marks_for((messages, self._values), count))
            messages = [self._with_marks(message, marks) for message in messages]
        messages = [self._readable(message) for message in messages]
        last = messages[-1:] if self._goes_on else []
        messages = [*paired(messages[: len(messages) - len(last)]), *last]
        refused: UserError | None = None
        for name, form in FORMS.items():
            try:
                pieces = self._pieces(form(messages))
            except RecursionError:
                raise UserError("the messages or the tools are nested too deeply") from None
            except RenderedTooLong:
                raise
            except UserError as problem:
                refused = refused or problem
                continue
            if refused is not None:
                log.info("messages were written %s: %s", name, refused)
            return pieces
        assert refused is not None
        raise refused

    def _with_marks(self, message: Message, marks: Iterator[str]) -> Message:
        """With its parts as one text, if there are pictures among them, and a mark for each. Texts
        are trimmed, and nothing stands between them, as in Gemma's own template, but a tool's
        result stays as it is, before its pictures."""
        count, of_tool = _pictures_of(message), bool(message.get("role") == "tool")
        if not count:
            return message
        parts, own = message["content"], list(islice(marks, count))
        self._marks |= dict.fromkeys(own, of_tool)
        if of_tool:
            return {**message, "content": text_of(parts) + "".join(own)}
        coming = iter(own)
        texts = (next(coming) if part == PICTURE else text_of([part]).strip() for part in parts)
        return {**message, "content": "".join(texts)}

    def _with_pictures(self, text: str) -> str:
        """A rendered text with the picture's control token in place of each mark; those of a tool's
        result behind its response."""
        if self._picture is None:
            return text
        if shown := "".join(mark for mark, of_tool in self._marks.items() if of_tool):
            behind = rf"([{shown}]+)(.*?{re.escape(RESPONSE_END)})"
            text = re.sub(behind, r"\2\1", text, flags=re.DOTALL)
        numbers = {mark: number for number, mark in enumerate(self._marks)}
        self.order = [numbers[letter] for letter in text if letter in numbers]
        if sorted(self.order) != list(numbers.values()):
            raise UserError("the chat template leaves out a picture, or writes it twice")
        return text.translate({ord(mark): self._picture for mark in numbers})

    def _readable(self, message: Message) -> Message:
        """With its parts as one text, if the template reads no parts in messages of its role. As
        in Gemma's own template nothing stands between them, and a system's parts are trimmed."""
        role, parts = str(message.get("role")), message.get("content")
        if not isinstance(parts, list) or self._reads_parts(role):
            return message
        if role in ("system", "developer"):
            parts = [{"text": text_of([part]).strip()} for part in parts]
        return {**message, "content": text_of(parts)}

    def _pieces(self, messages: list[Message]) -> list[str]:
        control, inputs = self._control, (messages, self._values)
        mark, witness, end = control.marks_for(inputs, 3)
        safe, values = control.broken(inputs, mark)
        begun = ""
        if self._goes_on:
            begun, safe[-1]["content"] = text_of(safe[-1].get("content")), end
            values["add_generation_prompt"] = False
        count = _witnessed(safe, witness)
        text = self._render(safe, **values)
        if text.count(witness) < count:
            raise UserError("the chat template leaves out what a tool answered: send it as text")
        if self._goes_on:
            text = _up_to(text, end) + begun
        return control.pieces(self._with_pictures(text.replace(witness, "")), mark)


def _pictures_of(message: Message) -> int:
    parts = message.get("content")
    return parts.count(PICTURE) if isinstance(parts, list) else 0


def _witnessed(messages: list[Message], witness: str) -> int:
    """Put a sign into each tool's result, where trimming doesn't reach it; returns how many."""
    count = 0
    for message in messages:
        content = message.get("content")
        if message.get("role") == "tool" and isinstance(content, str) and content.strip():
            at = len(content) - len(content.lstrip()) + 1
            message["content"] = content[:at] + witness + content[at:]
            count += 1
    return count


def _up_to(rendered: str, end: str) -> str:
    """What stands before the last message's text."""
    before, found, _ = rendered.rpartition(end)
    if not found:
        raise UserError("the chat template leaves out the last message: it can't be continued")
    return before

"""Splits Gemma 4's output, while it is generated, into answer, reasoning and tool calls.

The parser reads token ids and recognises control tokens by id, so text that merely looks like a
marker is never taken for one, whatever the cycles' drafts were.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Protocol

from serve.gemma.arguments import ArgumentsToJson
from serve.served_tokenizer import Decoder
from serve.stream import CallArguments, CallBegan, Content, Part, Reasoning, ThoughtEnded

HEADER = re.compile(
    r"""\s*call:\s*(?P<name>[\w\-.]+(:[\w\-.]+)*)\s*(
        \{                                                  # f{a:1}
      | \(\s*( \{                                          # f({a:1})
            | (?P<python>(?=\)|[A-Za-z_]\w*\s*[=:])) )      # f(a=1)
    )""",
    re.VERBOSE,
)
MAY_BECOME_HEADER = re.compile(
    r"\s*(c(a(l(l(:\s*([\w\-.]+(:[\w\-.]*)*\s*(\(\s*([A-Za-z_]\w*\s*)?)?)?)?)?)?)?)?"
)
LONGEST_HEADER = 1000
"""Characters; a longer one is text."""
CHANNEL_NAME = re.compile(r"\s*[\w\-]{0,32}")


class MarkedTokenizer(Protocol):
    """The part of `targets.tokenizer.Tokenizer` that is used here."""

    def token_id(self, token: str) -> int | None: ...

    def stream(self) -> Decoder: ...


class _In(Enum):
    CONTENT = auto()
    CHANNEL_NAME = auto()
    THOUGHT = auto()
    CALL_HEADER = auto()
    CALL = auto()


class GemmaOutput:
    """One choice's output. Feed it every token but the one that ended the turn, then `finish`.

    tools: whether to parse calls. If not, a call is content: its text without markers.
    names: names of the request's tools; a call may name one by its last part (see `offered`).
    thinking_open: whether the prompt ended inside a thought (`<|channel>thought` and a newline).

    Control tokens are in no part's text. A thought's channel name, and the one newline that the
    chat template writes before the thought's end, are not part of its text, so a thought that is
    sent back renders as it was generated. Text after a thought is left as it is, as vLLM does.
    """

    def __init__(
        self,
        tokenizer: MarkedTokenizer,
        *,
        tools: bool,
        names: Collection[str] = (),
        thinking_open: bool = False,
    ) -> None:
        self.calls = 0
        """Number of calls that have begun."""
        self.reasoning_tokens = 0
        """Tokens between a thought's two markers: the channel's name counts, the markers don't."""
        self._tokenizer, self._decoder = tokenizer, tokenizer.stream()
        self._in = _In.THOUGHT if thinking_open else _In.CONTENT
        self._held = ""  # a channel's name, a call's header, or the newline that may end a thought
        self._arguments = ArgumentsToJson()
        self._names = names
        self._markers = self._by_id(tools)

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token belongs to a thought."""
        return self._in in (_In.CHANNEL_NAME, _In.THOUGHT)

    def feed(self, token: int) -> list[Part]:
        """Add one token; return the parts that are now certain."""
        marker = self._markers.get(token)
        was_reasoning = self.in_reasoning
        if marker is None:
            parts = self._text(self._decoder.step(token))
        else:
            parts = [*self._flush(), *marker()]
        self.reasoning_tokens += was_reasoning and self.in_reasoning
        return parts

    def finish(self, complete: bool = True) -> list[Part]:
        """End the output.

        complete: whether the model ended it. Then a call without its end marker is closed. A call
        that was cut (for example by max_tokens) is not: its arguments are not valid JSON.
        """
        parts = self._flush()
        if complete or self._in is not _In.CALL:
            parts += self._leave()
        return parts

    def _by_id(self, tools: bool) -> dict[int, Callable[[], list[Part]]]:
        """The action for each control token of this vocabulary, by token id."""
        actions: dict[str, Callable[[], list[Part]]] = {
            "<|channel>": self._begin_channel,
            "<channel|>": self._end_channel,
            "<|tool_call>": self._begin_call if tools else self._ignore,
            "<tool_call|>": self._end_call,
            '<|"|>': self._quote,
            "<|tool_response>": self._leave,
            "<turn|>": self._leave,
        }
        ids = {name: self._tokenizer.token_id(name) for name in actions}
        return {i: actions[name] for name, i in ids.items() if i is not None}

    def _flush(self) -> list[Part]:
        """Take the decoder's remaining text: an incomplete character before a marker or at the end
        becomes U+FFFD."""
        text, self._decoder = self._decoder.finish(), self._tokenizer.stream()
        return self._text(text)

    def _text(self, text: str) -> list[Part]:
        if not text:
            return []
        match self._in:
            case _In.CONTENT:
                return [Content(text)]
            case _In.CHANNEL_NAME:
                return self._channel_name(text)
            case _In.THOUGHT:
                return self._thought(text)
            case _In.CALL_HEADER:
                return self._header(text)
            case _In.CALL:
                return self._of_call(self._arguments.text(text))

    def _channel_name(self, text: str) -> list[Part]:
        self._held += text
        name, newline, rest = self._held.partition("\n")
        if CHANNEL_NAME.fullmatch(name) and not newline:
            return []
        nameless = not CHANNEL_NAME.fullmatch(name)
        thought, self._held = (self._held if nameless else rest), ""
        self._in = _In.THOUGHT
        return self._thought(thought)

    def _thought(self, text: str) -> list[Part]:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        text = text.removesuffix("\n")
        return [Reasoning(text)] if text else []

    def _header(self, text: str) -> list[Part]:
        self._held += text
        found = HEADER.match(self._held)
        name = None if found is None else offered(found["name"], self._names)
        if found is not None and name is not None:
            rest, self._held = self._held[found.end() :], ""
            python = found["python"] is not None
            self._in, self._arguments = _In.CALL, ArgumentsToJson(")" if python else "}")
            self.calls += 1
            began = CallBegan(self.calls - 1, name)
            return [began, *self._of_call(self._arguments.text(rest))]
        may_grow = found is None and len(self._held) < LONGEST_HEADER
        if may_grow and MAY_BECOME_HEADER.fullmatch(self._held):
            return []
        return self._leave()

    def _of_call(self, text: str) -> list[Part]:
        return [CallArguments(self.calls - 1, text)] if text else []

    def _begin_channel(self) -> list[Part]:
        parts = self._leave()
        self._in = _In.CHANNEL_NAME
        return parts

    def _end_channel(self) -> list[Part]:
        if self._in is _In.CONTENT:
            return [ThoughtEnded()]
        return self._leave() if self.in_reasoning else []

    def _begin_call(self) -> list[Part]:
        parts = self._leave()
        self._in = _In.CALL_HEADER
        return parts

    def _end_call(self) -> list[Part]:
        return self._leave() if self._in in (_In.CALL_HEADER, _In.CALL) else []

    def _quote(self) -> list[Part]:
        if self._in is _In.CALL:
            return self._of_call(self._arguments.quote())
        return self._leave() if self._in is _In.CALL_HEADER else []

    def _ignore(self) -> list[Part]:
        return []

    def _leave(self) -> list[Part]:
        """End the open thought or call; what follows is content."""
        left, held = self._in, self._held
        self._in, self._held = _In.CONTENT, ""
        if left is _In.CALL:
            return self._of_call(self._arguments.finish())
        if left is _In.CALL_HEADER and held:
            return [Content(held)]
        if left is _In.CHANNEL_NAME and held.strip() not in ("", "thought"):
            return [Reasoning(held)]
        return []


def offered(written: str, names: Collection[str]) -> str | None:
    """The name of the tool that a call means: `written` if a tool has that name, else the name of
    the only tool with the same last part (`server:f` or `f` for `server.f`), else `written` itself.
    None if that can't be a tool's name."""
    dotted = written.replace(":", ".")
    last = dotted.rpartition(".")[2]
    for name in (dotted, last):
        if name in names:
            return name
    inner = [name for name in names if name.endswith(f".{last}")]
    if len(inner) == 1:
        return inner[0]
    return None if ":" in written else written

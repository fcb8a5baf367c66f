"""From token ids to pieces that can be sent: decodes, parses, and cuts at stop strings, holding
back text that may begin one."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence as Seqs
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from serve.cycle_reports import ReportedCycle
from serve.runner import Update
from serve.served_tokenizer import ServedTokenizer
from specdec.core.types import TokenLogprob

log = logging.getLogger("specdec.serve")

NEVER_CLOSED = (
    "the model's thought never ended, so there is no answer: allow more tokens, or bound the "
    "thought with thinking_token_budget"
)
TOO_AMBIGUOUS = (
    "grammar_limit: the grammar has too many readings of this text to follow it any further; write "
    "it without ambiguity, and lists with * or +"
)
ChoiceFinish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of a thought."""

    text: str


@dataclass(frozen=True)
class CallBegan:
    """A tool call begins; its name is complete. `index` counts the calls of this choice, from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments; a call's pieces together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class ThoughtEnded:
    """The end marker of a thought without a begin marker: the content before it was the thought. In
    a stream that content has already been sent."""


Part = Content | Reasoning | CallBegan | CallArguments | ThoughtEnded


@dataclass(frozen=True)
class Call:
    """A whole tool call."""

    id: str
    name: str
    arguments: str
    """A JSON object; its beginning where the answer was cut."""


def text_of(parts: Iterable[Part]) -> str:
    """The text beside thoughts and calls."""
    return "".join(part.text for part in parts if isinstance(part, Content))


def thought_of(parts: Iterable[Part]) -> str:
    """The text of thoughts."""
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def calls_of(parts: Iterable[Part]) -> list[Call]:
    """The calls of a whole answer."""
    calls: list[Call] = []
    for part in parts:
        if isinstance(part, CallBegan):
            calls.append(Call(call_id(), part.name, ""))
        elif isinstance(part, CallArguments):
            call = calls[part.index]
            calls[part.index] = replace(call, arguments=call.arguments + part.text)
    return calls


def call_id() -> str:
    """A new one, in OpenAI's form."""
    return f"call_{uuid.uuid4().hex[:24]}"


THOUGHTS_NAME = re.compile(r"\A\s*thought[ \t]*(\n|\Z)")


def with_unopened_thoughts(parts: Iterable[Part]) -> Iterator[Part]:
    """A whole answer's parts; content before a `ThoughtEnded` becomes `Reasoning`."""
    held: list[Part] = []
    for part in parts:
        if isinstance(part, Content):
            held.append(part)
            continue
        if isinstance(part, ThoughtEnded):
            text = "".join(p.text for p in held if isinstance(p, Content))
            text = THOUGHTS_NAME.sub("", text, count=1).removesuffix("\n")
            held = [Reasoning(text)] if text else []
        yield from held
        held = []
        if not isinstance(part, ThoughtEnded):
            yield part
    yield from held


class Output(Protocol):
    """Splits a model's output into parts, token by token."""

    calls: int
    reasoning_tokens: int

    @property
    def in_reasoning(self) -> bool: ...

    def feed(self, token: int) -> list[Part]: ...

    def finish(self, complete: bool = True) -> list[Part]: ...


class PlainOutput:
    """Output without thoughts and calls: all text is content."""

    calls = reasoning_tokens = 0

    @property
    def in_reasoning(self) -> bool:
        return False

    def __init__(self, tokenizer: ServedTokenizer, skip_special: bool = True) -> None:
        self._decoder = tokenizer.stream() if skip_special else tokenizer.stream(False)

    def feed(self, token: int) -> list[Part]:
        return _content(self._decoder.step(token))

    def finish(self, complete: bool = True) -> list[Part]:
        return _content(self._decoder.finish())


def _content(text: str) -> list[Part]:
    return [Content(text)] if text else []


@dataclass(frozen=True)
class Alternative:
    """A candidate token at one position."""

    text: str
    data: bytes
    """The token's bytes; for an incomplete character they can't be recovered from the text."""
    logprob: float | None
    """None for a prompt's first token, which nothing precedes."""


@dataclass(frozen=True)
class TokenText(Alternative):
    """The chosen token at one position, and the best alternatives, best first."""

    offset: int
    """Where it begins in the choice's text, in characters."""
    top: tuple[Alternative, ...]


def token_text(
    tokenizer: ServedTokenizer, token: int, logprob: TokenLogprob | None, offset: int
) -> TokenText:
    """logprob: None for a prompt's first token."""

    text, data = tokenizer.decode([token]), tokenizer.token_bytes(token)
    if logprob is None:
        return TokenText(text, data, None, offset, ())
    top = tuple(
        Alternative(tokenizer.decode([i]), tokenizer.token_bytes(i), finite(value))
        for i, value in logprob.top
    )
    return TokenText(text, data, finite(logprob.logprob), offset, top)


@dataclass(frozen=True)
class Piece:
    """The part of a choice that one update added."""

    parts: tuple[Part, ...]
    tokens: tuple[TokenText, ...]
    finish: ChoiceFinish | None
    stop: str | None = None
    """The stop string that ended it, if one did."""
    cycle_reports: tuple[ReportedCycle, ...] = ()
    """The cycles that produced it, if the request sets `include_speculation`."""
    notice: str | None = None
    """A warning about an answer that has ended, for its client."""
    receipt: dict[str, Any] | None = None
    """Of an answer that has ended, if the request sets `include_receipt`: JSON values."""

    @property
    def notice_field(self) -> dict[str, str]:
        """The notice as a field of a JSON object, if there is one."""
        return {} if self.notice is None else {"notice": self.notice}

    @property
    def receipt_field(self) -> dict[str, Any]:
        """The receipt as a field of a JSON object, if there is one."""
        return {} if self.receipt is None else {"receipt": self.receipt}

    @property
    def text(self) -> str:
        """The text of its content parts."""
        return text_of(self.parts)


class ChoiceText:
    """One choice's text. Feed it updates until a piece has a `finish`; then feed it no more."""

    def __init__(
        self,
        tokenizer: ServedTokenizer,
        stops: Seqs[str] = (),
        output: Output | None = None,
        keep_stop: bool = False,
    ) -> None:
        """output: splits the text into parts; by default all of it is content. Stop strings are
        searched in content only, not in thoughts and calls. keep_stop: send the one that is
        found."""
        self.token_count = 0
        """Number of completion tokens, including the one that ended it."""
        self.output = PlainOutput(tokenizer) if output is None else output
        self._tokenizer, self._stops, self._keep_stop = tokenizer, stops, keep_stop
        self._held = ""  # content that is not sent yet
        self._sent = 0  # characters of content
        self._stopped_by: str | None = None
        self._ready: list[Part] = []
        self._content: list[str] = []  # the last of what is ready, if that is content
        self._waiting: list[TokenText] = []  # tokens; their text is not sent yet

    def feed(self, update: Update) -> Piece:
        """Add an update's tokens, one by one: the result doesn't depend on how they were grouped.

        A stop id has no text; a stop string is cut off, and what lies beyond it is discarded.
        """
        for i, token in enumerate(update.tokens):
            self.token_count += 1
            if update.finish == "stop" and i == len(update.tokens) - 1:
                break
            if update.logprobs is not None:
                self._waiting.append(self._describe(token, update.logprobs[i]))
            if self._take(self.output.feed(token)):
                return self._piece("stop")
        if update.finish is None:
            return self._piece(None)
        thinks = self.output.in_reasoning
        if self._take(self.output.finish(complete=update.finish == "stop")):
            return self._piece("stop")
        self._send(len(self._held))
        # The last token counts as sent even without text of its own (an incomplete character).
        piece = self._piece("stop" if update.finish == "stop" else "length", all_tokens=True)
        if update.finish == "grammar_limit":
            log.warning("an answer was cut: %s", TOO_AMBIGUOUS)
            piece = replace(piece, notice=TOO_AMBIGUOUS)
        if thinks and not self._sent and not self.output.calls:
            log.warning("an answer is empty: %s", NEVER_CLOSED)
            piece = replace(piece, notice=NEVER_CLOSED)
        return piece

    def _take(self, parts: list[Part]) -> bool:
        """Add the parts of one token; returns True if a stop string ends the answer."""
        for part in parts:
            if not isinstance(part, Content):
                self._send(len(self._held))
                self._close_content()
                self._ready.append(part)
                continue
            if not self._stops:
                self._put(part.text)
                continue
            self._held += part.text
            if (stop := self._stop_at()) is not None:
                at, length = stop
                self._stopped_by = self._held[at : at + length]
                self._send(at + length if self._keep_stop else at)
                return True
            self._send(len(self._held) - held_back(self._held, self._stops))
        return False

    def _stop_at(self) -> tuple[int, int] | None:
        """Where the first stop string begins, and its length."""
        found = [(at, len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found, default=None)

    def _send(self, count: int) -> None:
        text, self._held = self._held[:count], self._held[count:]
        self._put(text)

    def _put(self, text: str) -> None:
        self._sent += len(text)
        if text:
            self._content.append(text)

    def _close_content(self) -> None:
        if self._content:
            self._ready.append(Content("".join(self._content)))
            self._content = []

    def _piece(self, finish: ChoiceFinish | None, all_tokens: bool = False) -> Piece:
        if finish == "stop" and self.output.calls:
            finish = "tool_calls"
        self._close_content()
        parts, self._ready = tuple(self._ready), []
        outside = (
            all_tokens
            or self.output.in_reasoning
            or any(not isinstance(part, Content) for part in parts)
        )
        complete = [t for t in self._waiting if outside or t.offset < self._sent]
        self._waiting = self._waiting[len(complete) :]
        return Piece(parts, tuple(complete), finish, self._stopped_by)

    def _describe(self, token: int, chosen: TokenLogprob) -> TokenText:
        return token_text(self._tokenizer, token, chosen, self._sent + len(self._held))


def held_back(text: str, stops: Seqs[str]) -> int:
    """Length of the longest suffix of `text` that may still grow into one of `stops`."""
    return max((_begun(text, stop) for stop in stops), default=0)


def _begun(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that `stop` begins with, but for all of it."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0


def finite(logprob: float) -> float:
    """JSON has no -inf; vLLM sends -9999 in its place."""
    return max(logprob, -9999.0)

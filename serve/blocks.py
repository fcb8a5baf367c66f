"""An answer as blocks that follow one another: thoughts, texts and calls. APIs that send blocks
word these; /v1/chat/completions sends their parts as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from serve.stream import CallArguments, CallBegan, Content, Part, Reasoning, ThoughtEnded

Kind = Literal["thought", "text", "call"]


@dataclass
class Block:
    """One of an answer's blocks."""

    index: int
    """Counts the answer's blocks, from 0."""
    kind: Kind
    name: str = ""
    """Of the function that a call calls."""
    text: str = ""
    """So far; a call's arguments, as JSON."""


@dataclass(frozen=True)
class Began:
    block: Block


@dataclass(frozen=True)
class Grew:
    block: Block
    text: str


@dataclass(frozen=True)
class Ended:
    block: Block


Change = Began | Grew | Ended


class Blocks:
    """Feed it an answer's parts in order, then `end` it."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def feed(self, parts: Iterable[Part]) -> Iterator[Change]:
        """What the parts change. A part of another kind ends the block that is open."""
        for part in parts:
            match part:
                case CallBegan(_, name):
                    yield from self._begin("call", name)
                case CallArguments(_, text):
                    yield from self._grow(text)
                case Reasoning(text):
                    yield from self._add("thought", text)
                case Content(text):
                    yield from self._add("text", text)
                case ThoughtEnded():  # of what is out as text already
                    pass

    def end(self) -> Iterator[Change]:
        """There is nothing more."""
        if self._open is not None:
            yield Ended(self._open)
        self._open = None

    def _add(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        yield from self._grow(text)

    def _begin(self, kind: Kind, name: str = "") -> Iterator[Change]:
        yield from self.end()
        self._open = Block(len(self.all), kind, name)
        self.all.append(self._open)
        yield Began(self._open)

    def _grow(self, text: str) -> Iterator[Change]:
        assert self._open is not None
        self._open.text += text
        yield Grew(self._open, text)


def blocks_of(parts: Iterable[Part]) -> list[Block]:
    """Of a whole answer."""
    blocks = Blocks()
    for _ in blocks.feed(parts):
        pass
    return blocks.all

"""From token ids to text that may be sent: decode, hold back what may begin a stop string, cut."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from serve.runner import Update
from specdec.core.types import TokenLogprob

ChoiceFinish = Literal["stop", "length"]


class Decoder(Protocol):
    """Incremental detokeniser of one sequence."""

    def step(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Tokenizer(Protocol):
    """What the server needs of `targets.tokenizer.Tokenizer`."""

    stop_ids: tuple[int, ...]
    defaults: dict[str, float | int]
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]: ...

    def decode(self, ids: Seqs[int]) -> str: ...

    def stream(self) -> Decoder: ...


@dataclass(frozen=True)
class TokenText:
    """One token's text and log-probability, and the best alternatives, best first."""

    text: str
    offset: int
    """Where it begins in the choice's text, in characters."""
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Piece:
    """What one update added to a choice."""

    text: str
    tokens: tuple[TokenText, ...]
    finish: ChoiceFinish | None


class ChoiceText:
    """One choice's text. Feed it updates until a piece says `finish`; then feed it no more."""

    def __init__(self, tokenizer: Tokenizer, stops: Seqs[str] = ()) -> None:
        self.token_count = 0
        """Tokens that count as the completion's: up to and with the one that ended it."""
        self._tokenizer, self._decoder, self._stops = tokenizer, tokenizer.stream(), stops
        self._held = ""  # decoded, not yet sent
        self._sent = 0  # characters
        self._waiting: list[TokenText] = []  # tokens whose text is not yet sent

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
            self._held += self._decoder.step(token)
            if (cut := self._stop_at()) is not None:
                return self._send(cut, "stop")
        if update.finish is None:
            return self._send(len(self._held) - held_back(self._held, self._stops), None)
        self._held += self._decoder.finish()
        if (cut := self._stop_at()) is not None:
            return self._send(cut, "stop")
        piece = self._send(len(self._held), "stop" if update.finish == "stop" else "length")
        # A last token without text of its own (half a character, say) still counts as sent.
        return Piece(piece.text, (*piece.tokens, *self._waiting), piece.finish)

    def _stop_at(self) -> int | None:
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found, default=None)

    def _send(self, count: int, finish: ChoiceFinish | None) -> Piece:
        text, self._held = self._held[:count], self._held[count:]
        self._sent += count
        ready = [token for token in self._waiting if token.offset < self._sent]
        self._waiting = self._waiting[len(ready) :]
        return Piece(text, tuple(ready), finish)

    def _describe(self, token: int, chosen: TokenLogprob) -> TokenText:
        top = tuple((self._tokenizer.decode([i]), _finite(value)) for i, value in chosen.top)
        offset = self._sent + len(self._held)
        return TokenText(self._tokenizer.decode([token]), offset, _finite(chosen.logprob), top)


def held_back(text: str, stops: Seqs[str]) -> int:
    """Length of the longest suffix of `text` that may still grow into one of `stops`."""
    longest = max(map(len, stops), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return len(text) - start
    return 0


def _finite(logprob: float) -> float:
    """JSON has no -inf; vLLM sends -9999 in its place."""
    return max(logprob, -9999.0)

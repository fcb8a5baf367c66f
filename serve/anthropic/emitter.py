"""Anthropic's answers: one message of content blocks, whole or as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence as Seqs

from serve.answer import anthropic_failure, event, keep_alive
from serve.blocks import Began, Block, Blocks, Change, Ended, Grew, blocks_of
from serve.errors import ApiError
from serve.generation import Generation
from serve.replies import Json
from serve.stream import TOO_AMBIGUOUS, Piece, with_unopened_thoughts

SIGNATURE = "specdec"
"""Signature of every thinking block. Clients send it back with the thought; it is not checked."""


class AnthropicEmitter:
    """The `serve.answer.Emitter` of /v1/messages."""

    def __init__(
        self, request_id: str, model: str, max_tokens: int, generation: Generation
    ) -> None:
        """model, max_tokens: as in the request."""
        self._id, self._model, self._max_tokens = request_id, model, max_tokens
        self._generation = generation
        self._blocks = Blocks()
        self._began = False
        self._last = Piece((), (), "length")

    def document(self, arrivals: Seqs[tuple[int, Piece]]) -> Json:
        pieces = [piece for _, piece in arrivals]
        parts = with_unopened_thoughts(part for piece in pieces for part in piece.parts)
        message = self._message([_block(block, whole=True) for block in blocks_of(parts)])
        return message | self._stop(pieces[-1]) | self._extras(pieces[-1])

    def opening(self) -> Iterable[bytes]:
        return ()  # message_start contains the cached token count, known with the first token

    def events(self, index: int, piece: Piece) -> Iterable[bytes]:
        if not self._began:
            self._began = True
            yield _event("message_start", message=self._message([]))
            yield _event("ping")
        for change in self._blocks.feed(piece.parts):
            yield from _changed(change)
        self._last = piece

    def waiting(self) -> bytes:
        return _event("ping") if self._began else keep_alive()

    def closing(self) -> Iterable[bytes]:
        for change in self._blocks.end():
            yield from _changed(change)
        ending = {"delta": self._stop(self._last), "usage": self._usage()}
        yield _event("message_delta", **ending, **self._extras(self._last))
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return anthropic_failure(error)

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _stop(self, last: Piece) -> Json:
        reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
        reason = "stop_sequence" if last.stop is not None else reasons[last.finish or "stop"]
        cut = self._generation.plan.choices[0].max_tokens < self._max_tokens
        if reason == "max_tokens" and cut and last.notice != TOO_AMBIGUOUS:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": last.stop}

    def _extras(self, last: Piece) -> Json:
        """Extensions of this server, once the answer has ended."""
        return last.notice_field | last.receipt_field | self._generation.seed_field

    def _usage(self) -> Json:
        """`input_tokens` does not include the tokens read from the cache."""
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }


def _changed(change: Change) -> Iterator[bytes]:
    block = change.block
    match change:
        case Began():
            content = _block(block, whole=False)
            yield _event("content_block_start", index=block.index, content_block=content)
        case Grew(text=text):
            yield _event("content_block_delta", index=block.index, delta=_delta(block, text))
        case Ended():
            if block.kind == "thought":
                delta = {"type": "signature_delta", "signature": SIGNATURE}
                yield _event("content_block_delta", index=block.index, delta=delta)
            yield _event("content_block_stop", index=block.index)


def _block(block: Block, whole: bool) -> Json:
    """whole: include the text; the event at a block's start has none."""
    text = block.text if whole else ""
    if block.kind == "thought":
        return {"type": "thinking", "thinking": text, "signature": SIGNATURE if whole else ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    call_id = f"toolu_{uuid.uuid4().hex[:24]}"
    return {"type": "tool_use", "id": call_id, "name": block.name} | _input(text)


def _delta(block: Block, text: str) -> Json:
    if block.kind == "thought":
        return {"type": "thinking_delta", "thinking": text}
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}


def _input(arguments: str) -> Json:
    """The `input` object of a call. Arguments that are no JSON (the call was cut at max_tokens, see
    `stop_reason`) are sent as `partial_json` beside an empty input; clients send them back with the
    history."""
    try:
        return {"input": json.loads(arguments)}
    except ValueError:
        return {"input": {}, "partial_json": arguments} if arguments else {"input": {}}


def _event(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, kind)

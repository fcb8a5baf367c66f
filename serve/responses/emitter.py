"""Answers of OpenAI's Responses: one response of output items, whole or as numbered events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence as Seqs

from serve.answer import event, keep_alive
from serve.blocks import Began, Block, Blocks, Change, Ended, Grew, blocks_of
from serve.errors import ApiError
from serve.generation import Generation
from serve.replies import Json
from serve.responses.items import called, item_id, item_of, part_of
from serve.responses.schema import ResponsesRequest
from serve.stream import Piece, with_unopened_thoughts

CODES = {
    "context_length_exceeded": "context_length_exceeded",
    "queue_full": "rate_limit_exceeded",
}
"""An ApiError's code -> the code of the failed response that Codex recognises. Any other error gets
server_error or invalid_prompt, by its status."""
PARTS = {"thought": "response.reasoning_text", "text": "response.output_text"}
ARGUMENTS = "response.function_call_arguments"


class ResponsesEmitter:
    """The `serve.answer.Emitter` of /v1/responses. Without a generation only `opening` and `failed`
    may be called."""

    def __init__(
        self,
        request_id: str,
        model: str,
        wire: ResponsesRequest,
        generation: Generation | None = None,
    ) -> None:
        self._id, self._model, self._wire = request_id, model, wire
        self._generation = generation
        self._created = int(time.time())
        self._blocks = Blocks()
        self._number = -1
        self._last = Piece((), (), None)

    def document(self, arrivals: Seqs[tuple[int, Piece]]) -> Json:
        pieces = [piece for _, piece in arrivals]
        self._last = pieces[-1]
        parts = with_unopened_thoughts(part for piece in pieces for part in piece.parts)
        return self._ended(blocks_of(parts))

    def opening(self) -> Iterable[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def events(self, index: int, piece: Piece) -> Iterable[bytes]:
        for change in self._blocks.feed(piece.parts):
            yield from self._changed(change)
        self._last = piece

    def waiting(self) -> bytes:
        return keep_alive()

    def closing(self) -> Iterable[bytes]:
        for change in self._blocks.end():
            yield from self._changed(change)
        response = self._ended(self._blocks.all)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> Iterable[bytes]:
        kind = "server_error" if error.status >= 500 else "invalid_prompt"
        code = CODES.get(error.code or "", kind)
        message = f"{error.message}: try again in 1s" if code.startswith("rate") else error.message
        response = self._response("failed") | {"error": {"code": code, "message": message}}
        yield self._event("response.failed", response=response)

    def _changed(self, change: Change) -> Iterator[bytes]:
        block = change.block
        at = {"output_index": block.index}
        match change:
            case Began():
                item = self._item(block, "in_progress")
                yield self._event("response.output_item.added", **at, item=item)
                if block.kind != "call":
                    part = part_of(block.kind, "")
                    yield self._of_part("response.content_part.added", block, part=part)
            case Grew(text=text):
                if block.kind == "call":
                    where = at | {"item_id": self._item_id(block)}
                    yield self._event(f"{ARGUMENTS}.delta", **where, delta=text)
                else:
                    yield self._of_part(f"{PARTS[block.kind]}.delta", block, delta=text)
            case Ended():
                yield from self._done(block)

    def _done(self, block: Block) -> Iterator[bytes]:
        at = {"output_index": block.index}
        if block.kind == "call":
            content = called(block, self._wire.names) | {"arguments": block.text}
            yield self._event(f"{ARGUMENTS}.done", **at, item_id=self._item_id(block), **content)
        else:
            yield self._of_part(f"{PARTS[block.kind]}.done", block, text=block.text)
            part = part_of(block.kind, block.text)
            yield self._of_part("response.content_part.done", block, part=part)
        item = self._item(block, self._status(block, self._blocks.all))
        yield self._event("response.output_item.done", **at, item=item)

    def _of_part(self, name: str, block: Block, **fields: object) -> bytes:
        if block.kind == "text" and not name.startswith("response.content_part"):
            fields["logprobs"] = []
        where = {"item_id": self._item_id(block), "output_index": block.index, "content_index": 0}
        return self._event(name, **where, **fields)

    def _item(self, block: Block, status: str) -> Json:
        wire = self._wire
        return item_of(self._id, block, status, wire.shows_thoughts, wire.names)

    def _item_id(self, block: Block) -> str:
        return item_id(self._id, block)

    @property
    def _cut(self) -> bool:
        return self._last.finish == "length"

    def _status(self, block: Block, blocks: Seqs[Block]) -> str:
        """The last block of an answer that was cut is incomplete, all others are completed."""
        return "incomplete" if self._cut and block is blocks[-1] else "completed"

    def _ended(self, blocks: Seqs[Block]) -> Json:
        response = self._response("incomplete" if self._cut else "completed")
        response["output"] = [self._item(block, self._status(block, blocks)) for block in blocks]
        if self._cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        assert self._generation is not None
        response |= self._last.notice_field | self._last.receipt_field
        response |= self._generation.seed_field
        usage = self._generation.usage
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return response | {"completed_at": int(time.time()), "metrics": usage.metrics()}

    def _response(self, status: str) -> Json:
        """The response object. It repeats the request's own options."""
        wire = self._wire
        asked = wire.model_dump(
            by_alias=True, exclude_none=True, include={"tools", "text", "reasoning"}
        )
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "model": self._model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "instructions": wire.instructions,
            "max_output_tokens": wire.max_output_tokens,
            "parallel_tool_calls": wire.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": asked.get("reasoning", {"effort": None, "summary": None}),
            "store": False,
            "temperature": self._sampling("temperature"),
            "top_p": self._sampling("top_p"),
            "text": {"format": {"type": "text"}} | asked.get("text", {}),
            "tool_choice": wire.tool_choice or "auto",
            "tools": asked.get("tools", []),
            "truncation": "disabled",
            "metadata": (wire.model_extra or {}).get("metadata") or {},
        }

    def _sampling(self, name: str) -> float | None:
        """The effective value: the request's, the checkpoint's or the default."""
        if self._generation is None:
            return getattr(self._wire, name)
        return getattr(self._generation.plan.choices[0].sampling, name)

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

"""From a generation to the HTTP response, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence as Seqs
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from serve.chat_schema import ChatRequest
from serve.errors import ApiError
from serve.generation import Context, Generation, begin
from serve.prompt_report import PromptReport, report
from serve.replies import Json, Reply
from serve.schema import CompletionRequest
from serve.stream import Piece, Tokenizer


async def answer(
    context: Context, request: Request, wire: ChatRequest | CompletionRequest, reply: Reply
) -> Response:
    """Serve a validated request: a stream of events, or one document."""
    _check_stream(wire)
    generation = await begin(context, wire, reply.request_id, request.state.caller)
    request.state.usage = generation.usage  # for the log
    served = Served(context.tokenizer, wire, generation, reply)
    if wire.stream:
        return _TokenStream(generation, _chunks(served))
    try:
        body = await _unless_disconnected(request, _collect(served))
    finally:
        generation.cancel()
    return JSONResponse(body)


def _check_stream(wire: ChatRequest | CompletionRequest) -> None:
    """What is said of a prompt comes with the whole answer, as vLLM has it."""
    tells = wire.prompt_logprobs is not None or (wire.echo and wire.logprob_count is not None)
    if wire.stream and (tells or wire.limit == 0):
        name = "prompt_logprobs" if wire.prompt_logprobs is not None else "echo"
        raise ApiError(400, f"{name} with log-probabilities can't be streamed", param=name)


@dataclass(frozen=True)
class Served:
    """A generation, and how it is worded."""

    tokenizer: Tokenizer
    wire: ChatRequest | CompletionRequest
    generation: Generation
    reply: Reply

    @property
    def count(self) -> int:
        """Choices of the reply."""
        return len(self.generation.plan.prompts) * (self.wire.n or 1)

    def prompt_of(self, index: int) -> PromptReport:
        """What choice `index` says of its prompt."""
        number = index // (self.wire.n or 1)
        given = self.wire.prompt[number] if isinstance(self.wire, CompletionRequest) else None
        text = given if isinstance(given, str) else None
        prompt, recited = self.generation.plan.prompts[number], self.generation.recited[number]
        return report(self.wire, prompt, text, recited, self.tokenizer)


async def _collect(served: Served) -> Json:
    pieces: list[list[Piece]] = [[] for _ in range(served.count)]
    async for arrival in served.generation.pieces():
        if arrival is not None:
            index, piece = arrival
            pieces[index].append(piece)
    choices = [
        served.reply.whole(index, _joined(own), served.prompt_of(index))
        for index, own in enumerate(pieces)
    ]
    usage = served.generation.usage
    body = served.reply.envelope(choices, streaming=False)
    return {**body, "usage": usage.to_json(), "metrics": usage.metrics()}


def _joined(pieces: Seqs[Piece]) -> Piece:
    """A choice's pieces as one; one that was not to say anything ended at its limit."""
    parts = tuple(part for piece in pieces for part in piece.parts)
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return Piece(parts, tokens, pieces[-1].finish if pieces else "length")


async def _chunks(served: Served) -> AsyncIterator[bytes]:
    """Server-sent events: a chunk for each thing that an emission says."""
    reply, include_usage = served.reply, served.wire.include_usage
    no_usage = {"usage": None} if include_usage else {}  # as OpenAI does
    opened: set[int] = set()
    try:
        async for arrival in served.generation.pieces():
            if arrival is None:
                yield KEEPALIVE_COMMENT
                continue
            index, piece = arrival
            choices = [] if index in opened else reply.opening(index, served.prompt_of(index))
            opened.add(index)
            for choice in [*choices, *reply.chunks(index, piece)]:
                yield _event({**reply.envelope([choice], streaming=True), **no_usage})
        if include_usage:
            usage = served.generation.usage
            totals = {"usage": usage.to_json(), "metrics": usage.metrics()}
            yield _event({**reply.envelope([], streaming=True), **totals})
    except ApiError as error:  # too late for a status: OpenAI's clients raise on this event
        yield _event(error.body)
    yield format_sse_event(data_str="[DONE]")


class _TokenStream(EventSourceResponse):
    """Frees the request's slots however the stream ends, even if it never began."""

    def __init__(self, generation: Generation, content: AsyncIterator[bytes]) -> None:
        # Proxies must pass chunks on as they come.
        super().__init__(content, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Json]) -> Json:
    """Run `work`, but give up as soon as the client has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client has gone")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _event(body: Json) -> bytes:
    return format_sse_event(data_str=json.dumps(body, ensure_ascii=False, separators=(",", ":")))

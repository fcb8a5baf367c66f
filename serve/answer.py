"""From a generation to the HTTP response, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence as Seqs
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from serve.chat_schema import ChatRequest
from serve.errors import ApiError
from serve.generation import Context, Generation, begin
from serve.replies import Json
from serve.schema import CompletionRequest
from serve.stream import Piece


class Emitter(Protocol):
    """How one API words what is generated, once, for one request."""

    def document(self, arrivals: Seqs[tuple[int, Piece]]) -> Json:
        """The whole answer, of all pieces with the numbers of their choices."""
        ...

    def opening(self) -> Iterable[bytes]:
        """The stream's events before there is anything to tell."""
        ...

    def events(self, index: int, piece: Piece) -> Iterable[bytes]:
        """Of a piece of choice `index`."""
        ...

    def waiting(self) -> bytes:
        """When nothing came for a while."""
        ...

    def closing(self) -> Iterable[bytes]:
        """When all of it was told."""
        ...

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """In place of `closing`, where it is too late for a status."""
        ...


async def answer(
    context: Context,
    request: Request,
    wire: ChatRequest | CompletionRequest,
    request_id: str,
    emitter_of: Callable[[Generation], Emitter],
) -> Response:
    """Serve a validated request: a stream of events, or one document."""
    generation = await begin(context, wire, request_id, request.state.caller)
    request.state.generation = generation  # for the log and the trace
    emitter = emitter_of(generation)
    if wire.stream:
        return TokenStream(generation, _events(generation, emitter))
    try:
        body = await _unless_disconnected(request, _collect(generation, emitter))
    finally:
        generation.cancel()
    return JSONResponse(body)


async def _collect(generation: Generation, emitter: Emitter) -> Json:
    arrivals = [arrival async for arrival in generation.pieces() if arrival is not None]
    return emitter.document(arrivals)


async def _events(generation: Generation, emitter: Emitter) -> AsyncIterator[bytes]:
    try:
        for event in emitter.opening():
            yield event
        async for arrival in generation.pieces():
            if arrival is None:
                yield emitter.waiting()
                continue
            for event in emitter.events(*arrival):
                yield event
        for event in emitter.closing():
            yield event
    except ApiError as error:
        for event in emitter.failed(error):
            yield event


class EventStream(EventSourceResponse):
    """Server-sent events that proxies pass on as they come."""

    def __init__(self, content: Any) -> None:
        super().__init__(content, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})


class TokenStream(EventStream):
    """Frees the request's slots however the stream ends, even if it never began."""

    def __init__(self, generation: Generation, content: AsyncIterator[bytes]) -> None:
        super().__init__(content)
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


def event(body: Json, name: str | None = None) -> bytes:
    """One server-sent event, with its name where an API has names for them."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return format_sse_event(data_str=text, event=name)


def keep_alive() -> bytes:
    """A comment, which every client skips."""
    return KEEPALIVE_COMMENT

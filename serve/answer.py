"""From a generation to the HTTP response, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence as Seqs
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from serve.chat_schema import ChatRequest
from serve.errors import CLIENT_LEFT, ApiError
from serve.generation import PING_SECONDS, Context, Generation, Sender, begin
from serve.replies import Json
from serve.schema import CompletionRequest
from serve.stream import Piece
from specdec.core.errors import UserError

LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Ends of a line to Python's `splitlines`, by which clients cut events, though not to JSON."""
HEADERS_SECONDS = 2.0
"""How long a stream waits for its request to begin before it sends headers, then comments."""
Made = TypeVar("Made")
log = logging.getLogger("specdec.serve")


class Emitter(Protocol):
    """Formats one request's output for one API, as a document or as a stream of events."""

    def document(self, arrivals: Seqs[tuple[int, Piece]]) -> Json:
        """The whole answer as one JSON object. arrivals: (choice index, piece) in arrival order."""
        ...

    def opening(self) -> Iterable[bytes]:
        """The events with which the stream begins, before any piece."""
        ...

    def events(self, index: int, piece: Piece) -> Iterable[bytes]:
        """The events for one piece of choice `index`."""
        ...

    def waiting(self) -> bytes:
        """A keep-alive event, sent when no piece has come for PING_SECONDS."""
        ...

    def closing(self) -> Iterable[bytes]:
        """The last events, after all pieces."""
        ...

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Events sent in place of `closing` if the request fails after the HTTP status was sent."""
        ...


async def answer(
    context: Context,
    request: Request,
    wire: ChatRequest | CompletionRequest,
    request_id: str,
    emitter_of: Callable[[Generation], Emitter],
    refusal: Callable[[ApiError], Iterable[bytes]],
) -> Response:
    """Serve a validated request: a stream of events, or one document. refusal: the events of a
    stream that fails before the request has begun."""
    begun = asyncio.create_task(begin(context, wire, request_id, _sender(request)))
    begun.add_done_callback(partial(_note, request))
    if wire.stream:
        if not await _soon(begun, HEADERS_SECONDS):
            return TokenStream(begun, _late(begun, emitter_of, refusal))
        generation = begun.result()
        return TokenStream(begun, _events(generation, emitter_of(generation)))
    try:
        generation = await _unless_disconnected(request, begun)
        return await _unless_disconnected(request, _whole(generation, emitter_of(generation)))
    finally:
        _drop(begun)


def _sender(request: Request) -> Sender:
    caller = request.state.caller
    host = request.client.host if request.client else ""
    return Sender(caller, f"{caller} {host}", request.state.size, request.state.arrived)


def _note(request: Request, begun: asyncio.Task[Generation]) -> None:
    """Store the generation in the request's state, for the access log and the trace."""
    if not begun.cancelled() and begun.exception() is None:
        request.state.generation = begun.result()


async def _soon(begun: asyncio.Task[Generation], seconds: float) -> bool:
    """Whether the request begins within `seconds`; raises the exception of `begun`, if it has
    one."""
    done, _ = await asyncio.wait({begun}, timeout=seconds)
    if done:
        begun.result()
    return bool(done)


def _drop(begun: asyncio.Task[Generation]) -> None:
    """Cancel a request, whether it is still being prepared or already generates."""
    begun.cancel()
    if begun.done() and not begun.cancelled() and begun.exception() is None:
        begun.result().cancel()


async def _late(
    begun: asyncio.Task[Generation],
    emitter_of: Callable[[Generation], Emitter],
    refusal: Callable[[ApiError], Iterable[bytes]],
) -> AsyncIterator[bytes]:
    """The stream of a request that has not begun yet (it waits for its grammar's trial): comments
    until it begins, then its events."""
    yield KEEPALIVE_COMMENT
    try:
        while not await _soon(begun, PING_SECONDS):
            yield KEEPALIVE_COMMENT
    except Exception as problem:
        for part in refusal(_api_error(problem)):
            yield part
        return
    generation = begun.result()
    async for part in _events(generation, emitter_of(generation)):
        yield part


def _api_error(problem: Exception) -> ApiError:
    """The error as a stream sends it: its status has been sent."""
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, UserError):
        return ApiError(400, str(problem))
    log.error("a stream failed", exc_info=problem)
    return ApiError(500, f"the server failed ({type(problem).__name__}): its log says more")


def openai_failure(error: ApiError) -> list[bytes]:
    """The last events of a stream of choices that failed. OpenAI's clients raise on the first."""
    return [event(error.body), done()]


def anthropic_failure(error: ApiError) -> list[bytes]:
    """The last event of a stream of /v1/messages that failed."""
    return [event(error.anthropic_body, "error")]


async def _whole(generation: Generation, emitter: Emitter) -> Response:
    arrivals = [arrival async for arrival in generation.pieces() if arrival is not None]
    request = generation.request
    if request.logprob_count is None and request.prompt_logprobs is None:
        return JSONResponse(emitter.document(arrivals))
    # with 20 alternatives a token it takes seconds, in which streams would stand still
    return await asyncio.to_thread(lambda: JSONResponse(emitter.document(arrivals)))


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
    except Exception as problem:
        for event in emitter.failed(_api_error(problem)):
            yield event


class EventStream(EventSourceResponse):
    """Server-sent events that proxies pass on as they come."""

    def __init__(self, content: Any) -> None:
        super().__init__(content, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})


class TokenStream(EventStream):
    """Frees the request's slots however the stream ends, even if it never began."""

    def __init__(self, begun: asyncio.Task[Generation], content: AsyncIterator[bytes]) -> None:
        super().__init__(content)
        self._begun = begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _drop(self._begun)


async def _unless_disconnected(request: Request, work: Awaitable[Made]) -> Made:
    """Run `work`, but give up as soon as the client has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(CLIENT_LEFT, "the client has gone")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def event(body: Json, name: str | None = None) -> bytes:
    """One server-sent event, with its name where an API has names for them."""
    data = to_json(body).decode()
    if not data.isascii():
        data = data.translate(LINE_ENDS)
    return format_sse_event(data_str=data, event=name)


def done() -> bytes:
    """The last event of a stream of choices."""
    return format_sse_event(data_str="[DONE]")


def keep_alive() -> bytes:
    """A comment, which every client skips."""
    return KEEPALIVE_COMMENT

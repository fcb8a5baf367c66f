"""From a generation to the HTTP response, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from serve.errors import ApiError
from serve.generation import Context, Generation, begin
from serve.replies import Json, Reply
from serve.schema import ChatRequest, CompletionRequest
from serve.stream import TokenText


async def answer(
    context: Context, request: Request, wire: ChatRequest | CompletionRequest, reply: Reply
) -> Response:
    """Serve a validated request: a stream of events, or one document."""
    generation = await begin(context, wire, reply.request_id)
    if wire.stream:
        return _TokenStream(generation, _chunks(generation, reply, wire.include_usage))
    try:
        body = await _unless_disconnected(request, _collect(generation, reply))
    finally:
        generation.cancel()
    return JSONResponse(body)


async def _collect(generation: Generation, reply: Reply) -> Json:
    texts: dict[int, list[str]] = {}
    tokens: dict[int, list[TokenText]] = {}
    choices: dict[int, Json] = {}
    async for arrival in generation.pieces():
        if arrival is None:
            continue
        index, piece = arrival
        texts.setdefault(index, []).append(piece.text)
        tokens.setdefault(index, []).extend(piece.tokens)
        if piece.finish is not None:
            choices[index] = reply.whole(index, "".join(texts[index]), tokens[index], piece.finish)
    body = reply.envelope([choices[index] for index in sorted(choices)], streaming=False)
    return {**body, "usage": generation.usage.to_json()}


async def _chunks(
    generation: Generation, reply: Reply, include_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events: one chunk per emission that has something to say."""
    no_usage = {"usage": None} if include_usage else {}  # as OpenAI does
    opened: set[int] = set()
    try:
        async for arrival in generation.pieces():
            if arrival is None:
                yield KEEPALIVE_COMMENT
                continue
            index, piece = arrival
            choices = []
            if index not in opened and (opening := reply.opening(index)):
                choices.append(opening)
            opened.add(index)
            if piece.text or piece.tokens or piece.finish is not None:
                choices.append(reply.part(index, piece.text, piece.tokens, piece.finish))
            for choice in choices:
                yield _event({**reply.envelope([choice], streaming=True), **no_usage})
        if include_usage:
            usage = generation.usage.to_json()
            yield _event({**reply.envelope([], streaming=True), "usage": usage})
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

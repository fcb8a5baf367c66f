"""/v1/responses."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial

from fastapi import APIRouter, Request, Response

from serve.answer import EventStream, answer
from serve.body import body_schema, errors_of, read_request
from serve.errors import ApiError
from serve.generation import Context
from serve.responses.emitter import CODES, ResponsesEmitter
from serve.responses.schema import ResponsesRequest
from serve.responses.translate import chat_of


def responses_routes(context: Context, max_body: int) -> APIRouter:
    errors = errors_of(400, 401, 403, 404, 413, 415, 429, 500, 503)
    router = APIRouter(prefix="/v1", responses=errors)

    @router.post("/responses", openapi_extra=body_schema(ResponsesRequest))
    async def responses(request: Request) -> Response:
        wire = await read_request(request, ResponsesRequest, context, max_body)
        request_id = f"resp_{uuid.uuid4().hex}"
        emitter = partial(ResponsesEmitter, request_id, context.model_name, wire)
        refusal = partial(_refusal, emitter)
        try:
            chat = await context.lanes.translate(request.state.size, chat_of, wire)
            return await answer(context, request, chat, request_id, emitter, refusal)
        except ApiError as error:
            if wire.stream and error.code in CODES:
                return EventStream(_stream(refusal(error)))
            raise

    return router


def _refusal(emitter_of: Callable[[], ResponsesEmitter], error: ApiError) -> list[bytes]:
    """A stream that fails before it begins. OpenAI reports these errors of streaming requests as an
    event, and only then does Codex compact its history or try again."""
    emitter = emitter_of()
    return [*list(emitter.opening())[:1], *emitter.failed(error)]


async def _stream(events: list[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event

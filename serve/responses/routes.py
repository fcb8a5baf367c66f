"""/v1/responses."""

from __future__ import annotations

import uuid
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
        try:
            return await answer(context, request, chat_of(wire), request_id, emitter)
        except ApiError as error:
            if wire.stream and error.code in CODES:
                return EventStream(_failure(emitter(), error))
            raise

    return router


async def _failure(emitter: ResponsesEmitter, error: ApiError):
    """A stream that fails before it begins. OpenAI reports these errors of streaming requests as an
    event, and only then does Codex compact its history or try again."""
    for event in [*list(emitter.opening())[:1], *emitter.failed(error)]:
        yield event

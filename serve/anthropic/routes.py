"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
import uuid
from functools import partial

from fastapi import APIRouter, Depends, Request, Response

from serve.answer import answer, anthropic_failure
from serve.anthropic.emitter import AnthropicEmitter
from serve.anthropic.schema import MessagesRequest, PromptRequest
from serve.anthropic.translate import chat_of
from serve.body import body_schema, errors_of, read_request
from serve.errors import AnthropicErrorBody, ApiError
from serve.generation import Context
from serve.prompts import chat_prompt, check_sizes
from serve.replies import Json

OLDEST = "2023-06-01"
"""Of the API's versions: the one before had other events. Later ones added names."""


def anthropic_routes(context: Context, max_body: int) -> APIRouter:
    errors = errors_of(400, 401, 403, 413, 415, 429, 500, 503, form=AnthropicErrorBody)
    router = APIRouter(
        prefix="/v1/messages", responses=errors, dependencies=[Depends(_check_version)]
    )

    @router.post("", openapi_extra=body_schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        wire = await read_request(request, MessagesRequest, context, max_body)
        request_id = f"msg_{uuid.uuid4().hex}"
        emitter = partial(AnthropicEmitter, request_id, wire.model, wire.max_tokens)
        chat = await context.lanes.translate(request.state.size, chat_of, wire)
        return await answer(context, request, chat, request_id, emitter, anthropic_failure)

    @router.post("/count_tokens", openapi_extra=body_schema(PromptRequest))
    async def count_tokens(request: Request) -> Json:
        wire = await read_request(request, PromptRequest, context, max_body)
        lanes, sight = context.lanes, context.sight
        fetches = sight is not None and sight.fetch is not None
        prepare = lanes.prepare_pictures if fetches else partial(lanes.prepare, request.state.size)
        return {"input_tokens": await prepare(_count, context, wire)}

    return router


def _count(context: Context, wire: PromptRequest) -> int:
    chat = chat_of(wire)
    check_sizes(chat, context.tokenizer, context.max_len)
    return len(chat_prompt(chat, context.tokenizer, context.max_len, context.sight).ids)


async def _check_version(request: Request) -> None:
    sent = request.headers.get("anthropic-version", OLDEST)
    if sent < OLDEST or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", sent):
        message = f"anthropic-version {sent[:40]!r} is not supported: send {OLDEST} or a later one"
        raise ApiError(400, message)

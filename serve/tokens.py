"""vLLM's /tokenize, /detokenize and /tokenizer_info: what a prompt is to the model."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from serve.body import body_schema, errors_of, parse_bounded, read_body, read_request
from serve.chat_schema import ChatRequest
from serve.generation import Context
from serve.overrides import MAX_LIST
from serve.prompts import chat_prompt, check_ids, check_size, check_sizes
from serve.replies import Json
from serve.schema import parse
from targets.tokenizer import bare_ids


class TokenizeText(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    tokens: Annotated[list[int], Field(max_length=MAX_LIST)]
    model: str | None = None


def token_routes(context: Context, max_body: int) -> APIRouter:
    router, tokenizer = APIRouter(responses=errors_of(400, 401, 413, 415)), context.tokenizer

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeText))
    async def tokenize(request: Request) -> Json:
        body = await read_body(request, max_body)
        lanes, sight = context.lanes, context.sight
        fetches = sight is not None and sight.fetch is not None
        prepare = lanes.prepare_pictures if fetches else partial(lanes.prepare, len(body))
        ids, strings = await prepare(_tokenized, context, body)
        return {
            "count": len(ids),
            "max_model_len": context.max_len,
            "tokens": ids,
            "token_strs": strings,
        }

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Json:
        wire = await read_request(request, DetokenizeRequest, context, max_body)
        context.check_model(wire.model)
        check_ids(wire.tokens, tokenizer, "tokens")
        return {"prompt": tokenizer.decode(wire.tokens, skip_special=False)}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Json:
        return dict(tokenizer.info)

    return router


def _tokenized(context: Context, body: bytes) -> tuple[list[int], list[str] | None]:
    tokenizer = context.tokenizer
    if parse_bounded(_Either, body, context.max_len).messages is not None:
        chat = parse(ChatRequest, body)
        context.check_model(chat.model)
        check_sizes(chat, tokenizer, context.max_len)
        return chat_prompt(chat, tokenizer, context.max_len, context.sight).ids, None
    wire = parse(TokenizeText, body)
    context.check_model(wire.model)
    check_size(len(wire.prompt.encode()), tokenizer, context.max_len, "prompt")
    bare = wire.add_special_tokens is False
    ids = bare_ids(wire.prompt, tokenizer) if bare else tokenizer.encode(wire.prompt)
    strings = [tokenizer.decode([i], skip_special=False) for i in ids]
    return ids, strings if wire.return_token_strs else None


class _Either(BaseModel):
    messages: Any = None

"""/v1/models, in OpenAI's form, and in Anthropic's for requests with an `anthropic-version`."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from fastapi import APIRouter, Request

from serve.body import errors_of
from serve.generation import Context
from serve.replies import Json


def model_routes(context: Context) -> APIRouter:
    router = APIRouter(prefix="/v1", responses=errors_of(401, 404, 503))
    created = int(time.time())

    @router.get("/models")
    async def models(request: Request) -> Json:
        cards = [_card(context, name, created, request) for name in context.model_names]
        if not _is_anthropic(request):
            return {"object": "list", "data": cards}
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return {"data": cards, "has_more": False, **ends}

    @router.get("/models/{model:path}")
    async def model(model: str, request: Request) -> Json:
        context.check_model(model)
        return _card(context, model, created, request)

    return router


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _card(context: Context, name: str, created: int, request: Request) -> Json:
    if _is_anthropic(request):
        when = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
        card = {"type": "model", "id": name, "display_name": name, "created_at": when}
        return card | {"capabilities": {"image_input": {"supported": context.sight is not None}}}
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "specdec",
        "max_model_len": context.max_len,
        "input_modalities": ["text"] if context.sight is None else ["text", "image"],
    }

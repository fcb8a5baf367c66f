"""The HTTP surface: OpenAI's and Anthropic's routes on one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from serve import spare_memory
from serve.answer import answer, openai_failure
from serve.anthropic.routes import anthropic_routes
from serve.anthropic.schema import MessagesRequest, PromptRequest
from serve.body import body_schema, describe_bodies, errors_of, read_request
from serve.chat_schema import ChatRequest
from serve.choices import Choices, check_stream
from serve.cycle_reports import Speculating
from serve.docs import docs_routes
from serve.errors import install_error_handlers
from serve.generation import Context
from serve.keys import Keys
from serve.lifecycle import Lifecycle, lifecycle_routes
from serve.metrics import Metrics
from serve.models import model_routes
from serve.picture_urls import fetcher
from serve.pictures import PICTURE_BODY
from serve.prompts import Sight
from serve.replies import ChatReply, CompletionReply, Json, Reply
from serve.responses.routes import responses_routes
from serve.responses.schema import ResponsesRequest
from serve.runner import EngineRunner
from serve.schema import CompletionRequest
from serve.served_tokenizer import ServedTokenizer
from serve.tokens import DetokenizeRequest, TokenizeText, token_routes
from serve.ui.routes import ui_routes
from specdec.audit.making import Identity
from specdec.constraints.grammar import first_line
from specdec.core.errors import UserError
from specdec.core.version import VERSION
from targets.vision.spec import VisionSpec

log = logging.getLogger("specdec.serve")
MAX_BODY = 8 * 2**20
BODIES = [
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    PromptRequest,
    TokenizeText,
    DetokenizeRequest,
]


def create_app(
    runner: EngineRunner,
    tokenizer: ServedTokenizer,
    model_name: str,
    *,
    drafter: str = "drafter",
    k: int | None = None,
    api_keys: Collection[str] = (),
    max_body: int = MAX_BODY,
    lifecycle: Lifecycle | None = None,
    share_cache: bool = False,
    engine_label: str = "0",
    aliases: Collection[str] = (),
    identity: Identity | None = None,
    vision: VisionSpec | None = None,
    image_hosts: Collection[str] = (),
) -> FastAPI:
    """The server for `runner`'s engine; the app's lifespan starts and closes the runner.

    drafter: the drafter's name. k: draft tokens per cycle (default: the target's largest).
    api_keys: clients must send one of them on /v1 routes; if empty, no key is required.
    share_cache: whether callers with different keys reuse each other's prompts.
    aliases: further names of the model in the API.
    identity: the model and arithmetic that receipts name; None: there are no receipts.
    vision: how the model sees; None: it takes no pictures.
    image_hosts: the hosts from which pictures are fetched; none: pictures come as data alone.
    lifecycle: the stage of the server that runs this app; by default a new one.
    engine_label: the metrics' label `engine`, where several engines serve one model.
    """
    lifecycle = lifecycle or Lifecycle()
    k = runner.engine.target.max_draft if k is None else k
    speculating = Speculating(drafter, k)
    metrics = Metrics(runner, model_name, speculating, engine_label)
    context = Context(
        runner,
        tokenizer,
        metrics,
        model_name,
        speculating,
        share_cache,
        tuple(aliases),
        identity,
        _sight(vision, image_hosts),
    )
    if vision is not None:
        max_body = max(max_body, PICTURE_BODY)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        lifecycle.doing = "reading the vocabulary"
        await asyncio.to_thread(_read_vocabulary, context)
        runner.start()
        lifecycle.runner = runner
        async with spare_memory.given_back():
            yield
        await asyncio.to_thread(runner.close)

    app = FastAPI(
        title="specdec", version=VERSION, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.metrics = metrics
    install_error_handlers(app)
    guarded = [Depends(Keys(api_keys)), Depends(_open(lifecycle))]
    for routes in (_openai_routes, responses_routes, anthropic_routes, token_routes):
        app.include_router(routes(context, max_body), dependencies=guarded)
    app.include_router(model_routes(context), dependencies=guarded)
    app.include_router(docs_routes(app))
    app.include_router(lifecycle_routes(lifecycle))
    app.include_router(ui_routes())
    app.include_router(_operator_routes(context))
    describe_bodies(app, BODIES)
    return app


def _sight(vision: VisionSpec | None, image_hosts: Collection[str]) -> Sight | None:
    """Raises UserError for hosts where no pictures are taken."""
    if vision is None:
        if image_hosts:
            raise UserError("--image-hosts is for models that take pictures: leave it out")
        return None
    return Sight(vision, fetcher(image_hosts) if image_hosts else None)


def _read_vocabulary(context: Context) -> None:
    """Build the tokenizer's tables that requests need. For Gemma this takes seconds in which no
    other thread runs, so it must not happen within a request."""
    assert context.tokenizer.longest_token
    try:
        context.vocabulary.load()
    except Exception as problem:  # noqa: B036 - llguidance's own; other requests work without
        log.warning("no grammar can be used with this tokenizer: %s", first_line(str(problem)))


def _openai_routes(context: Context, max_body: int) -> APIRouter:
    errors = errors_of(400, 401, 403, 404, 413, 415, 429, 500, 503)
    router = APIRouter(prefix="/v1", responses=errors)

    @router.post("/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat(request: Request) -> Response:
        wire = await read_request(request, ChatRequest, context, max_body)
        name = wire.model or context.model_name
        reply = ChatReply(name, bool(wire.logprobs), context.fingerprint)
        return await _in_choices(context, request, wire, reply)

    @router.post("/completions", openapi_extra=body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        wire = await read_request(request, CompletionRequest, context, max_body)
        name = wire.model or context.model_name
        reply = CompletionReply(name, wire.logprobs is not None, context.fingerprint)
        return await _in_choices(context, request, wire, reply)

    return router


async def _in_choices(
    context: Context, request: Request, wire: ChatRequest | CompletionRequest, reply: Reply
) -> Response:
    check_stream(wire)
    emitter = partial(Choices, context.tokenizer, wire, reply)
    return await answer(context, request, wire, reply.request_id, emitter, openai_failure)


def _operator_routes(context: Context) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> Json:
        return {"version": VERSION}

    return router


def _open(lifecycle: Lifecycle):
    """A dependency that raises ApiError 503 while the server takes no requests."""

    async def check() -> None:
        lifecycle.check()

    return check

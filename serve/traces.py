"""An OpenTelemetry span for each request: its parameters, its usage and its acceptance, without any
content. A caller's `traceparent` (W3C) makes the span a part of its trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.chat_schema import ChatRequest
from serve.outcome import Outcome
from specdec.core.errors import UserError
from specdec.core.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from serve.generation import Generation

Around = Callable[[ASGIApp], ASGIApp]
PATH = "/v1/traces"
"""The path where collectors take spans, added to an endpoint without a path."""
SECONDS = 3
"""Time limit for sending spans to a collector, retries included; shutdown waits no longer."""


@contextmanager
def traced(endpoint: str | None) -> Iterator[Around]:
    """Yields a function that wraps an app in tracing middleware; without an endpoint it returns the
    app unchanged. Spans are sent to the endpoint as OTLP over HTTP. Raises UserError."""
    if endpoint is None:
        yield lambda app: app
        return
    provider = _provider(_checked(endpoint))
    try:
        yield lambda app: Traces(app, provider.get_tracer("specdec", VERSION))
    finally:
        provider.shutdown()  # sends the remaining spans first


def _checked(endpoint: str) -> str:
    """The endpoint's full URL. Raises UserError."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise UserError(
            f"--otlp-traces-endpoint must be a URL such as http://127.0.0.1:4318{PATH}, got "
            f"{endpoint!r}"
        )
    return endpoint if url.path.strip("/") else endpoint.rstrip("/") + PATH


def _provider(endpoint: str) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise UserError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install '.[otel]' in specdec's "
            "clone, or the wheel with [otel] behind its name"
        ) from None
    named = Resource.create({"service.name": "specdec", "service.version": VERSION})
    provider = TracerProvider(resource=named)
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=SECONDS))
    )
    return provider


class Traces:
    """ASGI middleware that records a span per request. If the app has set `state["generation"]`,
    the span includes its parameters and usage."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._span(scope) as span:
            outcome = Outcome()

            async def noted(message: Message) -> None:
                outcome.sent(message)
                await send(message)

            try:
                await self._app(scope, receive, noted)
                outcome.returned()
            finally:
                _note_status(span, outcome.status)
                generation = scope.get("state", {}).get("generation")
                if generation is not None:
                    _note_generation(span, generation)

    def _span(self, scope: Scope) -> Any:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        caller = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope)))
        asked = {"http.request.method": "POST", "url.path": scope["path"]}
        return self._tracer.start_as_current_span(
            f"POST {scope['path']}", context=caller, kind=SpanKind.SERVER, attributes=asked
        )


def _note_status(span: Span, status: int) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)


def _note_generation(span: Span, generation: Generation) -> None:
    from opentelemetry.trace import StatusCode

    model = generation.context.model_name
    operation = "chat" if isinstance(generation.request, ChatRequest) else "text_completion"
    span.update_name(f"{operation} {model}")
    known = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "specdec",
        "gen_ai.request.model": generation.request.model or model,
        "gen_ai.response.model": model,
        **_asked(generation),
        **_became(generation),
    }
    span.set_attributes({name: value for name, value in known.items() if value is not None})
    if "error" in generation.usage.finish_reasons:  # too late for a status of HTTP
        span.set_status(StatusCode.ERROR)


def _asked(generation: Generation) -> dict[str, Any]:
    wire = generation.request
    return {
        "gen_ai.request.max_tokens": wire.limit,
        "gen_ai.request.temperature": wire.temperature,
        "gen_ai.request.top_p": wire.top_p,
        "gen_ai.request.top_k": wire.top_k,
        "gen_ai.request.choice.count": wire.n,
    }


def _became(generation: Generation) -> dict[str, Any]:
    usage, speculating = generation.usage, generation.context.speculating
    return {
        "gen_ai.response.finish_reasons": usage.finish_reasons,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.latency.time_in_queue": usage.queued,
        "gen_ai.latency.time_to_first_token": usage.first_token,
        "specdec.drafter": speculating.drafter,
        "specdec.k": speculating.k,
        "specdec.tau": usage.tau,
        "specdec.verify_passes": sum(usage.cycles),
        "specdec.draft_tokens": sum(usage.drafted),
        "specdec.accepted_tokens": sum(usage.accepted),
    }

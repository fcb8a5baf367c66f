"""Gives every request an id, and logs a line when it has ended, without any content."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import is_anthropic
from serve.outcome import Outcome

if TYPE_CHECKING:
    from serve.generation import Generation
    from serve.usage import Usage

log = logging.getLogger("specdec.access")
HEADER = "X-Request-Id"
ANTHROPIC_HEADER = "Request-Id"
"""The same id in the header that Anthropic's SDK reads, on Anthropic's routes."""
LONGEST = 128
PROBES = ("/health", "/ready", "/metrics")
"""Monitoring requests these every few seconds: successes are logged only with --log-level debug."""


class RequestLog:
    """ASGI middleware: sets X-Request-Id on every response (the client's own id if it sent one) and
    `state["arrived"]`, and logs a line per request, with waits and token counts if the app has set
    `state["generation"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _sent_id(Headers(scope=scope).get(HEADER, "")) or uuid.uuid4().hex
        state = scope.setdefault("state", {})
        began, outcome = time.monotonic(), Outcome()
        state["arrived"] = began

        async def named(message: Message) -> None:
            outcome.sent(message)
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                if is_anthropic(scope["path"]):
                    headers[ANTHROPIC_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, named)
            outcome.returned()
        finally:
            took = 1000 * (time.monotonic() - began)
            generation: Generation | None = state.get("generation")
            usage = None if generation is None else generation.usage
            _write(scope, outcome.status, took, request_id, usage)


def _sent_id(sent: str) -> str:
    """A client's own id, fit for a header and a line."""
    return re.sub(r"[^\x21-\x7e]", "", sent)[:LONGEST]


def _write(scope: Scope, status: int, took: float, request_id: str, usage: Usage | None) -> None:
    # The path as sent, percent-encoded, so that it can't break the line; without the query.
    path = scope.get("raw_path", b"").decode("ascii", "replace")
    level = logging.DEBUG if status == 200 and path in PROBES else logging.INFO
    method, counts = scope["method"], "" if usage is None else _counts(usage)
    log.log(level, "%s %s %d %.0f ms id=%s%s", method, path, status, took, request_id, counts)


def _counts(usage: Usage) -> str:
    counts: Any = usage.to_json()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    waits = _wait("queue", usage.queued) + _wait("first", usage.first_token)
    return (
        f"{waits} prompt={usage.prompt_tokens} completion={usage.completion_tokens} "
        f"cached={cached} tau={usage.tau:.2f}"
    )


def _wait(name: str, seconds: float | None) -> str:
    return "" if seconds is None else f" {name}={1000 * seconds:.0f}ms"

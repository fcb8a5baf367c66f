"""A name for every request, and a line in the log when it has ended: never of what was said."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import is_anthropic

if TYPE_CHECKING:
    from serve.generation import Generation
    from serve.usage import Usage

log = logging.getLogger("specdec.access")
HEADER = "X-Request-Id"
ANTHROPIC_HEADER = "Request-Id"
"""The same on Anthropic's routes, where its SDK reads it."""
LONGEST = 128
PROBES = ("/health", "/ready", "/metrics")
"""Asked every few seconds by machines: their successes are for --log-level debug."""
LEFT = 499
"""What nginx calls the status of a client that was gone before its answer."""


class RequestLog:
    """Around an app: X-Request-Id on every response, the client's own where it sent one, and a line
    per request. What an app leaves in `state["generation"]` is told too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given(Headers(scope=scope).get(HEADER, "")) or uuid.uuid4().hex
        state = scope.setdefault("state", {})
        began, status = time.monotonic(), LEFT

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                if is_anthropic(scope["path"]):
                    headers[ANTHROPIC_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            took = 1000 * (time.monotonic() - began)
            generation: Generation | None = state.get("generation")
            usage = None if generation is None else generation.usage
            _write(scope, status, took, request_id, usage)


def _given(sent: str) -> str:
    """A client's own id, fit for a header and a line."""
    return re.sub(r"[^\x21-\x7e]", "", sent)[:LONGEST]


def _write(scope: Scope, status: int, took: float, request_id: str, usage: Usage | None) -> None:
    # as it was sent: percent-encoded, so that no path breaks the line; without the query
    path = scope.get("raw_path", b"").decode("ascii", "replace")
    level = logging.DEBUG if status == 200 and path in PROBES else logging.INFO
    method, counts = scope["method"], "" if usage is None else _counts(usage)
    log.log(level, "%s %s %d %.0f ms id=%s%s", method, path, status, took, request_id, counts)


def _counts(usage: Usage) -> str:
    counts: Any = usage.to_json()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return (
        f" prompt={usage.prompt_tokens} completion={usage.completion_tokens} cached={cached} "
        f"tau={usage.tau:.2f}"
    )

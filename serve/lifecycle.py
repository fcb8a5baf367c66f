"""A server's lifecycle stage (loading, ready, draining or failed), and the routes that report
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from serve.errors import ApiError
from serve.runner import EngineRunner

Shown = Callable[[str], AbstractContextManager[Any]]
"""A context manager's factory: shows a text while the block runs."""
Status = Literal["loading", "ready", "draining", "failed"]
RETRY_SECONDS = {"loading": 5, "draining": 5}
"""Retry-After by status; by then another server may have taken over."""


class Lifecycle:
    """Written by the thread that starts and ends the server, read by its requests."""

    def __init__(self, doing: str = "starting") -> None:
        """doing: the current step of starting up, worded as a progress line."""
        self.doing = doing
        self.runner: EngineRunner | None = None
        self.draining = False

    def telling(self, shown: Shown) -> Shown:
        """`shown`, extended to record the text in `doing`."""

        @contextmanager
        def recorded(doing: str) -> Iterator[None]:
            self.doing = doing
            with shown(doing):
                yield

        return recorded

    @property
    def status(self) -> Status:
        if self.draining:
            return "draining"
        if self.runner is None:
            return "loading"
        return "ready" if self.runner.failure is None else "failed"

    def report(self) -> dict[str, Any]:
        """The body of /health and /ready."""
        status, runner = self.status, self.runner
        if status == "ready":
            return {"status": status}
        if status == "draining" and runner is not None:
            doing = f"{runner.running} running, {runner.waiting} waiting"
            return {"status": status, "doing": doing}
        failure = runner and runner.failure
        return {"status": status, "doing": failure or self.doing}

    def check(self) -> None:
        """Raise ApiError 503 while the server loads or drains."""
        status = self.status
        if status not in RETRY_SECONDS:
            return  # requests to a failed engine get an error with its cause from `submit`
        why = {
            "loading": f"the server is still loading ({self.doing}): retry in a moment",
            "draining": "the server is shutting down and takes no new requests: retry elsewhere",
        }[status]
        raise ApiError(503, why, code=status, headers={"Retry-After": str(RETRY_SECONDS[status])})


def lifecycle_routes(lifecycle: Lifecycle) -> APIRouter:
    """/health and /ready: 200, or 503 with the current status."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """Whether the server works; 503 while it loads or drains, and where its engine has
        failed."""
        report = lifecycle.report()
        if report["status"] == "ready":
            return JSONResponse({"status": "ok"})
        return JSONResponse(report, 503)

    @router.get("/ready")
    async def ready() -> Response:
        """Whether to send requests here."""
        report = lifecycle.report()
        return JSONResponse(report, 200 if report["status"] == "ready" else 503)

    return router

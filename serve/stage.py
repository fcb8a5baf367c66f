"""Where a server is in its life, and what it says of that: loading, ready, draining or failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from serve.errors import ApiError
from serve.runner import EngineRunner

Shown = Callable[[str], AbstractContextManager[Any]]
"""Shows what is being done for as long as it is done."""
Status = Literal["loading", "ready", "draining", "failed"]
RETRY_SECONDS = {"loading": 5, "draining": 5}
"""When to ask again: another server may have taken over by then."""


class Stage:
    """Written by the thread that starts and ends the server, read by its requests."""

    def __init__(self, doing: str = "starting") -> None:
        """doing: what keeps it from answering, in the words of a progress line."""
        self.doing = doing
        self.runner: EngineRunner | None = None
        self.draining = False

    def telling(self, shown: Shown) -> Shown:
        """`shown` that notes down, too, what is being done."""

        @contextmanager
        def told(doing: str) -> Iterator[None]:
            self.doing = doing
            with shown(doing):
                yield

        return told

    @property
    def status(self) -> Status:
        if self.draining:
            return "draining"
        if self.runner is None:
            return "loading"
        return "ready" if self.runner.failure is None else "failed"

    def report(self) -> dict[str, Any]:
        """For /health and /ready."""
        status, runner = self.status, self.runner
        if status == "ready":
            return {"status": status}
        if status == "draining" and runner is not None:
            doing = f"{runner.running} running, {runner.waiting} waiting"
            return {"status": status, "doing": doing}
        failure = runner and runner.failure
        return {"status": status, "doing": failure or self.doing}

    def check(self) -> None:
        """Raises ApiError 503 where no request can be taken."""
        status = self.status
        if status not in RETRY_SECONDS:
            return  # a failed engine says itself why
        why = {
            "loading": f"the server is still loading ({self.doing}): retry in a moment",
            "draining": "the server is shutting down and takes no new requests: retry elsewhere",
        }[status]
        raise ApiError(503, why, code=status, headers={"Retry-After": str(RETRY_SECONDS[status])})


def stage_routes(stage: Stage) -> APIRouter:
    """/health and /ready: 200, or 503 with what is going on."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """Whether the server works; 503 while it loads or drains, and where its engine has
        failed."""
        report = stage.report()
        if report["status"] == "ready":
            return JSONResponse({"status": "ok"})
        return JSONResponse(report, 503)

    @router.get("/ready")
    async def ready() -> Response:
        """Whether to send requests here."""
        report = stage.report()
        return JSONResponse(report, 200 if report["status"] == "ready" else 503)

    return router

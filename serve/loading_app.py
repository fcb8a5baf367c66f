"""The ASGI app that listens from the start: until the model is loaded it reports the stage of
loading, then it passes requests on to the server's app."""

from __future__ import annotations

from contextlib import AsyncExitStack

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.connections import CROWDED
from serve.errors import ApiError, install_error_handlers
from serve.lifecycle import Lifecycle, lifecycle_routes
from serve.request_log import PROBES
from serve.ui.routes import ui_routes

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
RETRY_SECONDS = 2


class LoadingApp:
    """An ASGI app that listens before the engine exists. All but `in_flight` belongs to one asyncio
    loop."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._app: ASGIApp = _loading_routes(lifecycle)
        self._opened = AsyncExitStack()
        self.in_flight = 0
        """Number of requests without a complete response."""

    async def open(self, app: FastAPI) -> None:
        """Start the lifespan of `app` and pass all requests to it from now on."""
        await self._opened.enter_async_context(app.router.lifespan_context(app))
        self._app = app

    async def close(self) -> None:
        """End the lifespan of the opened app, if any."""
        await self._opened.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn sends the head alone
        self.in_flight += 1
        try:
            await self._app_for(scope)(scope, receive, send)
        finally:
            self.in_flight -= 1

    def _app_for(self, scope: Scope) -> ASGIApp:
        most = scope.get("state", {}).get(CROWDED)
        if most is None or scope["path"] in PROBES:
            return self._app
        refusal = ApiError(
            503,
            f"{most} connections are open, which is the most that this server holds: retry in a "
            "moment",
            code="too_many_connections",
            headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"},
        )
        return refusal.response(scope["path"])


def _loading_routes(lifecycle: Lifecycle) -> FastAPI:
    app = FastAPI(title="specdec, loading", docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    app.include_router(lifecycle_routes(lifecycle))
    app.include_router(ui_routes())

    @app.api_route("/{path:path}", methods=METHODS)
    async def later(path: str) -> None:
        lifecycle.check()

    return app

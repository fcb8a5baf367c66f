"""All errors of requests, in OpenAI's form, or in Anthropic's on Anthropic's routes."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from specdec.core.errors import UserError

log = logging.getLogger("specdec.serve")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error form, for /docs."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """Anthropic's error form, for /docs."""

    type: str
    error: AnthropicErrorDetail


CLIENT_LEFT = 499
"""nginx's status for a client that disconnected before the response's end."""
ANTHROPIC_ROUTES = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Error types by HTTP status; any other is invalid_request_error, or api_error from 500 on."""


class ApiError(Exception):
    """One clear sentence for the client, with its HTTP status and OpenAI's machine-read fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        fields = {
            "message": self.message,
            "type": kinds.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": fields}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        message = self.message
        if self.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # clients compact the history on these words
        error: dict[str, Any] = {"type": ANTHROPIC_TYPES.get(self.status, kind), "message": message}
        if self.code is not None:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error}

    def response(self, path: str) -> JSONResponse:
        """The HTTP response. path: the route's; it determines the API and so the error's form."""
        body = self.anthropic_body if is_anthropic(path) else self.body
        return JSONResponse(body, self.status, self.headers)


def _hint(app: FastAPI, path: str) -> str:
    """The likely remedy for a path without a route: SDKs append it to a base URL."""
    paths = app.openapi()["paths"]
    if f"/v1{path}" in paths:
        return "the base URL of OpenAI's clients ends in /v1"
    if path.removeprefix("/v1") in paths:
        return "the base URL of Anthropic's clients ends without /v1"
    return "/docs lists what there is"


def is_anthropic(path: str) -> bool:
    """Whether a route is of Anthropic's API."""
    return path == ANTHROPIC_ROUTES or path.startswith(f"{ANTHROPIC_ROUTES}/")


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of `app`, the framework's own included, come out in its route's form."""

    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.url.path)

    @app.exception_handler(UserError)
    async def bad_input(request: Request, error: UserError) -> JSONResponse:
        return ApiError(400, str(error)).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path}"
        message = {
            404: f"no such route: {where}; {_hint(app, request.url.path)}",
            405: f"method not allowed: {where}; /docs lists what there is",
        }.get(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
        refusal = ApiError(error.status_code, message, headers=headers)
        return refusal.response(request.url.path)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        failure = ApiError(500, f"internal error: {type(error).__name__}; see the log")
        return failure.response(request.url.path)

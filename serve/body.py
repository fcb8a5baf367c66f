"""Request bodies: read without FastAPI, to limit their size and parse strictly, and described for
/docs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect

from serve.errors import CLIENT_LEFT, ApiError, ErrorBody
from serve.lanes import MEDIUM_BYTES
from serve.schema import Wire, parse

if TYPE_CHECKING:
    from serve.generation import Context

STRING_OR_CONTAINER = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]', re.DOTALL)
"""A string of JSON, or the beginning of an object or array."""
QUOTE = ord('"')
SPARE_CONTAINERS = 50_000
"""Objects and arrays that a body may hold beyond the tokens of a context: each message, tool or
property that a prompt shows is at least one token of it."""
DRAINED = 64 * 2**20
"""How much of a body that is too large is read and thrown away, so that its sender reads the 413
instead of a reset connection."""
PLACE = "#/components/schemas/{model}"


async def read_body(request: Request, limit: int) -> bytes:
    """The JSON body; more than `limit` bytes are counted but never kept."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send the body as Content-Type: application/json")
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif size > DRAINED:
                break
    except ClientDisconnect as left:
        raise ApiError(CLIENT_LEFT, "the client has gone") from left
    if size > limit:
        raise ApiError(413, f"the body is larger than {limit} bytes: send a shorter prompt")
    return b"".join(chunks)


async def read_request(request: Request, model: type[Wire], context: Context, limit: int) -> Wire:
    """The request's body, validated. Its size and the number of its parts are checked first; a
    large one is parsed on a thread. Raises ApiError."""
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else None
    with context.lanes.admitted(size, request.state.caller):
        body = await read_body(request, limit)
        request.state.size = len(body)
        if len(body) <= MEDIUM_BYTES:
            return parse(model, body)
        return await context.lanes.run(len(body), parse_bounded, model, body, context.max_len)


def parse_bounded(model: type[Wire], body: bytes, max_len: int) -> Wire:
    """`parse`, after a count of the body's objects and arrays. max_len: the context, in tokens."""
    most = max_len + SPARE_CONTAINERS
    if body.lstrip()[:1] == b"{" and _holds_more_than(most, body):
        raise ApiError(
            400,
            f"the body holds more than {most} objects and arrays, the most that a request to this "
            "server may have: send fewer messages, tools or properties",
            code="context_length_exceeded",
        )
    return parse(model, body)


def _holds_more_than(most: int, body: bytes) -> bool:
    """Whether the body has more objects and arrays. Its loop is Python's, so that other threads
    run between two matches."""
    if body.count(b"{") + body.count(b"[") <= most:
        return False
    count = 0
    for found in STRING_OR_CONTAINER.finditer(body):
        count += body[found.start()] != QUOTE
        if count > most:
            return True
    return False


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a body that a route reads itself, for `openapi_extra`."""
    content = {"application/json": {"schema": {"$ref": PLACE.format(model=model.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def errors_of(*statuses: int, form: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of a route's error responses, for `responses`."""
    return {status: {"model": form} for status in statuses}


def describe_bodies(app: FastAPI, models: list[type[BaseModel]]) -> None:
    """Put the schemas that `body_schema` refers to where /openapi.json has its schemas."""
    original = app.openapi

    def with_bodies() -> dict[str, Any]:
        document = original()
        _, definitions = models_json_schema(
            [(model, "validation") for model in models], ref_template=PLACE
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(definitions["$defs"])
        return document

    app.openapi = with_bodies

"""Serves the page at / and its static files. They need no API key, as they contain no secret; the
page sends the key that the user enters with its API requests."""

from __future__ import annotations

from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Forbids inline scripts and styles, anything from other hosts, and framing."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # cached, but revalidated by ETag
}


class _File(NamedTuple):
    body: bytes
    media_type: str
    tag: str


def _read() -> dict[str, _File]:
    found = {}
    for entry in files(__package__ or "").joinpath("static").iterdir():
        kind = TYPES.get(entry.name.rpartition(".")[2])
        if kind is None:  # an editor's copy, or a desktop's notes
            continue
        body = entry.read_bytes()
        found[entry.name] = _File(body, kind, f'"{sha256(body).hexdigest()[:16]}"')
    return found


def ui_routes() -> APIRouter:
    """Routes / and /ui/…, the same while the model loads."""
    router, static = APIRouter(include_in_schema=False), _read()

    def answer(request: Request, file: _File) -> Response:
        headers = HEADERS | {"ETag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)

    @router.get("/")
    async def page(request: Request) -> Response:
        return answer(request, static["index.html"])

    def add(name: str) -> None:
        async def part(request: Request) -> Response:
            return answer(request, static[name])

        router.get(f"/ui/{name}")(part)

    for name in static:
        add(name)
    return router

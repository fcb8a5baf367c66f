"""/docs: the routes and their bodies as a page without scripts, made of the OpenAPI schema."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse

STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;"
    "margin:2rem auto;padding:0 1rem}code,pre{font:14px/1.4 ui-monospace,monospace}"
    "pre{overflow:auto}summary{cursor:pointer;padding:.3rem 0}"
)


def docs_routes(app: FastAPI) -> APIRouter:
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()))

    return router


def page(schema: dict[str, Any]) -> str:
    """An HTML document: each route with its body, then the bodies' fields."""
    routes = [
        _route(method.upper(), path, operation)
        for path, operations in sorted(schema["paths"].items())
        for method, operation in operations.items()
    ]
    bodies = schema.get("components", {}).get("schemas", {})
    models = [_details(name, name, bodies[name]) for name in sorted(bodies)]
    title = f"{escape(schema['info']['title'])} {escape(schema['info']['version'])}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>"
        f"<h1>{title}</h1><p>The same as a schema: <a href=/openapi.json>/openapi.json</a></p>"
        f"<h2>Routes</h2>{''.join(routes)}<h2>Bodies</h2>{''.join(models)}</html>"
    )


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    return _details("", f"{method} {path}", operation)


def _details(anchor: str, name: str, content: Any) -> str:
    text = escape(json.dumps(content, indent=1, ensure_ascii=False))
    mark = f" id='{escape(anchor)}'" if anchor else ""
    return (
        f"<details{mark}><summary><code>{escape(name)}</code></summary><pre>{text}</pre></details>"
    )

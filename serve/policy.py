"""Access from browsers: checks the Host header, and sets CORS headers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import ApiError

WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(frozen=True)
class AccessPolicy:
    """Which Host headers are accepted (checked by a server without keys), and CORS origins."""

    hosts: frozenset[str] | None = None
    """Accepted names in the Host header, beside this machine's own; None: any name."""
    listens: str = "127.0.0.1"
    """The address on which the server listens."""
    cors_origins: Collection[str] = field(default_factory=tuple)
    """Origins with pages that may read responses; * is any."""

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app` with the middleware that enforces this policy."""
        if self.cors_origins:
            app = CORSMiddleware(
                app,
                allow_origins=list(self.cors_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        return app if self.hosts is None else _HostCheck(app, self.hosts, self.listens)


class _HostCheck:
    """Refuses requests with another name in the Host header. Any site can resolve its own name to
    127.0.0.1 (DNS rebinding); the browser then treats its pages and this server as one site."""

    def __init__(self, app: ASGIApp, names: frozenset[str], listens: str) -> None:
        self._app, self._names = app, {_plain(name) for name in {*names, listens, "localhost"}}
        self._any_address = listens in WILDCARDS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if scope["type"] != "http" or not host or self._knows(_plain(host)):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            403,
            f"the Host header names {host[:100]!r}, which is not this server's name: pages reach "
            "local servers by such names; start it with --allowed-host NAME, or with an API key",
            code="host_not_allowed",
        )
        await refusal.response(scope["path"])(scope, receive, send)

    def _knows(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return self._any_address or address.is_loopback  # DNS can't rebind an IP address


def _plain(host: str) -> str:
    """The host in lower case, without port, brackets and a final dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return (name if name and ":" not in name and port.isdigit() else host).rstrip(".")


def is_loopback(host: str) -> bool:
    """Whether an address can be reached only from this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

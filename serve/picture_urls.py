"""Fetches pictures that are sent as URLs, from hosts that the operator allows, and no others.

https alone; a host's name is resolved once, and its address must be public: the connection goes to
that very address. No redirect is followed, nothing of the environment is used, and no more than a
picture's bytes are read.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from urllib.parse import urlsplit

from serve.errors import ApiError
from serve.pictures import PARAM, Fetch
from specdec.core.errors import UserError

MOST_BYTES = 20 * 2**20
PORT = 443
WAIT = 5.0
"""Seconds for each step of a connection."""
DEADLINE = 15.0
"""Seconds for a whole fetch."""
PIECE = 1 << 16
"""Bytes that are read at a time."""
OK = 200

Connect = Callable[[str, str], http.client.HTTPConnection]
"""(host, address) -> a connection to that address, with the host's certificate proved."""


def fetcher(hosts: Collection[str], connect: Connect | None = None) -> Fetch:
    """hosts: names, such as images.example.org, or .example.org for all below. Raises UserError.
    connect: for tests."""
    for host in hosts:
        name = host.removeprefix(".")
        if not name or name != name.strip("./") or any(c in name for c in "/:@*? "):
            raise UserError(
                f"--image-hosts takes names, such as images.example.org or .example.org, got "
                f"{host!r}"
            )
    allowed = tuple(host.lower() for host in hosts)

    def fetch(url: str) -> bytes:
        host, path = _place(url, allowed)
        address = _public_address(host)
        try:
            return _read(connect or _connected, host, address, path)
        except (OSError, http.client.HTTPException) as problem:
            raise _refusal(f"{host} did not send the picture ({type(problem).__name__})") from None

    return fetch


def _place(url: str, allowed: tuple[str, ...]) -> tuple[str, str]:
    """The host and the path of an allowed URL. Raises ApiError 400."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise _refusal("a picture's URL can't be read") from None
    if parts.scheme != "https" or parts.username is not None or port not in (None, PORT):
        raise _refusal("a picture's URL must be https, without a user and a port")
    below = (host.endswith(name) for name in allowed if name.startswith("."))
    if host not in allowed and not any(below):
        raise _refusal("a picture's URL is of a host that this server fetches nothing from")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not target.isascii() or any(letter <= " " for letter in target):
        raise _refusal("a picture's URL can't be read")
    return host, target


def _public_address(host: str) -> str:
    """Its first address. Raises ApiError 400 for one that is not public."""
    try:
        found = socket.getaddrinfo(host, PORT, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise _refusal(f"{host} is not known") from None
    address = str(found[0][4][0])
    if not is_public(address):
        raise _refusal(f"{host} has no public address")
    return address


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's, also in its forms within IPv6."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if inner:
            ip = inner
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _connected(host: str, address: str) -> http.client.HTTPConnection:
    raw = socket.create_connection((address, PORT), timeout=WAIT)
    try:
        context = ssl.create_default_context()
        connection = http.client.HTTPConnection(host, PORT, timeout=WAIT)
        connection.sock = context.wrap_socket(raw, server_hostname=host)
    except BaseException:
        raw.close()
        raise
    return connection


def _read(connect: Connect, host: str, address: str, path: str) -> bytes:
    ends = time.monotonic() + DEADLINE
    connection = connect(host, address)
    watch = threading.Timer(DEADLINE, _cut, (connection,))
    watch.daemon = True
    watch.start()
    try:
        headers = {"Host": host, "Accept": "image/*", "User-Agent": "specdec"}
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        if reply.status != OK:
            raise _refusal(f"{host} answered {reply.status}: no redirect is followed")
        data, piece = bytearray(), b" "
        while piece:
            piece = reply.read1(PIECE)
            data += piece
            if len(data) > MOST_BYTES or time.monotonic() > ends:  # a head that was cut is empty
                raise _refusal(f"the picture of {host} is too large, or comes too slowly")
        return bytes(data)
    finally:
        watch.cancel()
        connection.close()


def _cut(connection: http.client.HTTPConnection) -> None:
    """End what comes a byte at a time: a head, which is read as a whole."""
    if isinstance(connection.sock, socket.socket):
        with suppress(OSError):
            socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, param=PARAM)

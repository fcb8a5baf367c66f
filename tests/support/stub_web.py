"""A web server with fixed answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def answering(replies: Mapping[str, tuple[int, bytes]]) -> Iterator[int]:
    """Its port, while the block runs. replies: status and body by path; others are not found."""

    class Stub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = replies.get(self.path, (404, b""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    stub = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield stub.server_port
    finally:
        stub.shutdown()
        stub.server_close()

"""A Hugging Face hub on this machine, as far as downloads go, which can cut them off midway."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "a" * 40


@dataclass
class Hub:
    """repos: files by repository. cut: files for which the first response breaks off in the
    middle."""

    repos: dict[str, dict[str, bytes]]
    sizes: dict[str, int] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    url: str = ""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)


@contextmanager
def hub_of(repos: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    hub = Hub(repos)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/").split("/")
        self.hub.asked.append((self.command, self.path, self.headers.get("Range")))
        api = path[:2] == ["api", "models"]
        repo = "/".join(path[2:4] if api else path[:2])
        files = self.hub.repos.get(repo)
        if files is None:
            return self._refuse(404, "RepoNotFound")
        if repo in self.hub.gated and self.headers.get("Authorization") != "Bearer hf_good":
            return self._refuse(403, "GatedRepo")
        revision = path[5] if api and len(path) > 5 else path[3] if not api else "main"
        if revision not in ("main", "v1", SHA):
            return self._refuse(404, "RevisionNotFound")
        if api:
            tree = "tree" in path
            return self._send(json.dumps(self._listing(repo, files, tree)).encode(), {})
        name = "/".join(path[4:])
        self._file(name, files[name])

    def _listing(self, repo: str, files: dict[str, bytes], tree: bool) -> object:
        sizes = {name: self.hub.sizes.get(name, len(data)) for name, data in files.items()}
        if tree:
            return [
                {"type": "file", "path": name, "size": size, "oid": _etag(files[name])}
                for name, size in sizes.items()
            ]
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        return {"id": repo, "sha": SHA, "siblings": siblings}

    def _file(self, name: str, data: bytes) -> None:
        first = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        part = data[first:]
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        cut = self.command == "GET" and name in self.hub.cut
        self._send(part, headers, 206 if first else 200, len(part) // 2 if cut else None)

    def _send(
        self, body: bytes, headers: dict[str, str], status: int = 200, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.hub.cut.discard(self.path.rpartition("/")[2])
            self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()

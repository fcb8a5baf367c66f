"""The client of `added_latency.py`: streams of one server, read in one thread, with their times.

    python docs/log/added_latency_client.py PORT STREAMS BODY

Prints for each stream its answer's id and when each of its events came (`time.perf_counter`, the
clock that all processes of a machine share). Times are taken as bytes come and events are told
apart afterwards, so that this costs what is measured as little as it can.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import sys
import time
from bisect import bisect_left

EVENT = re.compile(rb'data: (\{.*?"choices":\[\{.*?\})\r?\n')
LAST = b"data: [DONE]"


class Stream:
    """One request's connection, and what came on it."""

    def __init__(self, port: int, body: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
            b"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.said, self.ends, self.times = bytearray(), list[int](), list[float]()

    def read(self) -> bool:
        """Whether more is to come."""
        piece = self.socket.recv(65536)
        self.times.append(time.perf_counter())
        self.said += piece
        self.ends.append(len(self.said))
        return bool(piece) and LAST not in piece

    def events(self) -> dict[str, object]:
        """The id, and seconds of each event that brings a choice."""
        found = list(EVENT.finditer(bytes(self.said)))
        if not found:
            sys.exit(f"no stream came: {bytes(self.said[:500])!r}")
        times = [self.times[bisect_left(self.ends, one.end())] for one in found]
        return {"id": json.loads(found[0][1])["id"], "times": times}


def main() -> None:
    port, streams, body = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
    opened = [Stream(port, body) for _ in range(streams)]
    waiting, readers = len(opened), selectors.DefaultSelector()
    for stream in opened:
        readers.register(stream.socket, selectors.EVENT_READ, stream)
    while waiting:
        for key, _ in readers.select():
            if not key.data.read():
                readers.unregister(key.fileobj)
                waiting -= 1
    print(json.dumps([stream.events() for stream in opened]))


if __name__ == "__main__":
    main()

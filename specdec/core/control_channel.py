"""Control connections between process 0 and the others, where a model is split over several
processes.

Messages go from process 0 to the others and arrive in order. Each connection has a thread, so that
either end detects at once that the other has died, even while it waits for a collective that will
never end.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from secrets import token_bytes
from typing import Protocol

Lost = Callable[[str], None]
"""Called from a connection's thread with a one-line message when a process is gone."""

KEY_BYTES = 32
_MESSAGE = b"m"
"""First byte of a message."""
_FAILED = b"f"
"""First byte of the report that a process failed."""
_BYE = b"b"
"""First byte of the last message, when a process ends."""


@dataclass(frozen=True)
class Meeting:
    """The address where process 0 waits for the others, and the key that authenticates them."""

    host: str
    port: int
    key: bytes

    def packed(self) -> bytes:
        return self.key + f"{self.host}:{self.port}".encode()

    @staticmethod
    def unpacked(packed: bytes) -> Meeting:
        host, _, port = packed[KEY_BYTES:].decode().rpartition(":")
        return Meeting(host, int(port), packed[:KEY_BYTES])


class Connection(Protocol):
    """A connection of multiprocessing's."""

    def send_bytes(self, buf: bytes, /) -> None: ...

    def recv_bytes(self) -> bytes: ...


class ControlChannel:
    """One process's connections: process 0 has one to each other process, the others one to it."""

    def __init__(self, process: int, peers: dict[int, Connection], lost: Lost) -> None:
        self.process, self._peers, self._lost = process, peers, lost
        self.closed = False
        self._arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        for peer, line in peers.items():
            threading.Thread(
                target=self._listen, args=(peer, line), name=f"line-{peer}", daemon=True
            ).start()

    @property
    def leads(self) -> bool:
        return self.process == 0

    def send(self, message: bytes) -> None:
        """Send a message from process 0 to all others; returns before it has arrived."""
        self._send(_MESSAGE + message)

    def receive(self) -> bytes:
        """Wait for process 0's next message."""
        return self._arrived.get()

    def fail(self, why: str) -> None:
        """Send the reason why this process ends to the other ends."""
        self._send(_FAILED + why.encode())

    def close(self) -> None:
        """Notify the other ends that this process ends as planned, which is no failure."""
        self.closed = True
        self._send(_BYE)

    def _send(self, parcel: bytes) -> None:
        for line in self._peers.values():
            try:
                line.send_bytes(parcel)
            except OSError:
                pass  # the connection's thread reports that the process is gone

    def _listen(self, peer: int, line: Connection) -> None:
        try:
            while (parcel := line.recv_bytes())[:1] == _MESSAGE:
                self._arrived.put(parcel[1:])
        except (EOFError, OSError):
            self._lost(f"process {peer} is gone: see its own output for the reason")
            return
        if parcel[:1] == _FAILED:
            self._lost(f"process {peer} has failed: {parcel[1:].decode()}")


def invite(host: str, others: int, share: Callable[[bytes], object], lost: Lost) -> ControlChannel:
    """Process 0: wait at `host` until all others have connected. share: sends them the address."""
    key = token_bytes(KEY_BYTES)
    with Listener(("", 0), backlog=others, authkey=key) as listener:
        share(Meeting(host, int(listener.address[1]), key).packed())
        lines = [listener.accept() for _ in range(others)]
    return ControlChannel(0, {int(line.recv_bytes()): line for line in lines}, lost)


def call(process: int, meeting: Meeting, lost: Lost) -> ControlChannel:
    """Any other process: connect to process 0. Raises OSError if it can't be reached."""
    line = Client((socket.gethostbyname(meeting.host), meeting.port), authkey=meeting.key)
    line.send_bytes(str(process).encode())
    return ControlChannel(process, {0: line}, lost)

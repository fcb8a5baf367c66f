"""A non-blocking stderr: the server goes on if stderr is not read, full or closed."""

from __future__ import annotations

import atexit
import io
import os
import queue
import sys
import threading
import time
from typing import TextIO

TEXTS = 1000
"""Most texts that wait to be written; further ones are dropped, and counted."""
LAST_SECONDS = 1.0
"""Time at the end of the process for writing the queued texts."""
TICK_SECONDS = 0.01


class PatientText(io.TextIOBase):
    """Queues texts; a thread writes them. It writes to the descriptor directly: at the end of the
    process Python would wait for the lock of a stream that a blocked thread holds."""

    def __init__(self, stream: TextIO) -> None:
        """stream: with a descriptor."""
        self._stream, self._descriptor = stream, stream.fileno()
        self._texts: queue.Queue[str] = queue.Queue(TEXTS)
        self._dropped = 0
        threading.Thread(target=self._write_all, name="specdec-stderr", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            self._texts.put_nowait(text)
        except queue.Full:
            self._dropped += 1
        return len(text)

    def flush(self) -> None:
        """Waits for nothing: logging flushes after each line."""

    def drain(self, seconds: float = LAST_SECONDS) -> None:
        """Wait until all is written, or so many seconds."""
        until = time.monotonic() + seconds
        while self._texts.unfinished_tasks and time.monotonic() < until:
            time.sleep(TICK_SECONDS)

    def _write_all(self) -> None:
        while True:
            text = self._texts.get()
            dropped, self._dropped = self._dropped, 0
            if dropped:
                text = f"({dropped} pieces of this log were dropped: stderr was full)\n{text}"
            self._write(text.encode(self.encoding, "backslashreplace"))
            self._texts.task_done()

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:  # closed, or on a full disk: it can't be reported
            pass


def make_stderr_patient() -> None:
    """From now on, for the rest of the process, no write to stderr waits or fails."""
    if sys.stderr is None:
        _occupy_stderr()
        return
    if isinstance(sys.stderr, PatientText):
        return
    try:
        sys.stderr = PatientText(sys.stderr)
    except io.UnsupportedOperation:  # without a descriptor it is memory, which is never full
        return
    atexit.register(drain_stderr)


def drain_stderr() -> None:
    """Before the process ends."""
    if isinstance(sys.stderr, PatientText):
        sys.stderr.drain()


def _occupy_stderr() -> None:
    """Where stderr is closed, the next socket would get its number, and be written to by libraries
    that complain."""
    try:
        os.fstat(2)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != 2:
            os.dup2(nowhere, 2)
            os.close(nowhere)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process

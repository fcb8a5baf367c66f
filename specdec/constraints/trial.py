"""Whether a grammar compiles, tried in processes of their own.

Grammars come from clients. llguidance recurses as deep as a grammar refers, so that a chain of some
thousand `$ref` overflows its stack, and there are grammars that it works on for minutes. So each
one is compiled here first, with a fraction of a thread's stack and within limits of time and
memory. A grammar that ends its process is refused, and the process is started again.

Trials run at the lowest priority. Verdicts are kept, so a schema that comes with every turn is
tried once. A process that has had no grammar for a while ends, and one is killed if the client of
its request leaves.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import queue
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

SECONDS = 3.0
"""Of a CPU's time, so that a busy machine refuses no more than an idle one."""
MEMORY = 96 << 20
"""Bytes for one grammar, beside what the process has when it starts. One of 4,000 properties takes
33 MB; one that is refused after 3 seconds has taken 200."""
STACK = 2 << 20
"""Bytes: a quarter of what threads have on Linux, where the grammar is compiled afterwards."""
CONTROL = re.compile(r"<[^<>\s]+>")
"""What may be a control token's name in a grammar, which is JSON."""
PROCESSES = 2
"""Grammars that are tried at once."""
REMEMBERED = 1024
"""Verdicts that are kept, of passed grammars and of refused ones."""
REFUSED_SECONDS = 300.0
"""A refusal is kept for so long; a grammar that passed stays until newer ones push it out."""
LONGEST_COMPLAINT = 2000
"""Characters of a complaint that are kept."""
NICE = 19
"""Priority of the processes, the lowest."""
IDLE_SECONDS = 20.0
"""A process that gets no grammar for so long ends, and frees its memory."""
IDLE_EXIT = 75
"""Exit code of a process that ended for that reason: EX_TEMPFAIL of sysexits.h."""
_LENGTH = struct.Struct("!I")
_remembered_only: ContextVar[bool] = ContextVar("remembered_only", default=False)
_cancellation: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


class Untried(Exception):
    """A grammar has no kept verdict, and the caller is not allowed to wait for one."""


class Cancelled(Exception):
    """The trial was stopped by `Cancellation.cancel`; there is no verdict."""


class Cancellation:
    """Stops the trials that run within `cancellable(self)`. Any thread may call `cancel`."""

    def __init__(self) -> None:
        self._lock, self._cancelled = threading.Lock(), False
        self._stop: Callable[[], None] | None = None

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._stop is not None:
                self._stop()

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """`cancel` calls `stop` during this block. Raises Cancelled at its start or end if `cancel`
        was called."""
        self._set(stop)
        try:
            yield
        finally:
            self._set(None)

    def _set(self, stop: Callable[[], None] | None) -> None:
        with self._lock:
            self._stop = stop
            if self._cancelled:
                self._stop = None
                raise Cancelled


@contextmanager
def cancellable(cancellation: Cancellation) -> Iterator[None]:
    """Within this block `Trials.refusal` raises `Cancelled` once `cancellation.cancel()` was called
    by another thread."""
    token = _cancellation.set(cancellation)
    try:
        yield
    finally:
        _cancellation.reset(token)


@contextmanager
def remembered_only() -> Iterator[None]:
    """Within this block `Trials.refusal` raises `Untried` instead of trying a grammar."""
    token = _remembered_only.set(True)
    try:
        yield
    finally:
        _remembered_only.reset(token)


class Verdicts:
    """Complaints by grammar, "" for one that passed. Bounded by count and by characters. Any thread
    may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._clock, self._lock = clock, threading.Lock()
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def find(self, name: bytes) -> str | None:
        """None if there is no verdict, or it has expired."""
        with self._lock:
            complaint, until = self._known.get(name, ("", 0.0))
            if until <= self._clock():
                self._known.pop(name, None)
                return None
            self._known.move_to_end(name)
            return complaint

    def keep(self, name: bytes, complaint: str) -> None:
        lasting = REFUSED_SECONDS if complaint else float("inf")
        with self._lock:
            self._known[name] = complaint[:LONGEST_COMPLAINT], self._clock() + lasting
            self._known.move_to_end(name)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)


class Trials:
    """Trial processes and the verdicts of their grammars. Any thread may call it: up to `processes`
    trials run at once, and further callers wait."""

    def __init__(self, processes: int = PROCESSES) -> None:
        self._all = [Trial() for _ in range(processes)]
        self._idle: queue.LifoQueue[Trial] = queue.LifoQueue()
        for trial in self._all:
            self._idle.put(trial)
        self._verdicts = Verdicts()

    def refusal(self, grammar: str) -> str:
        """The reason why a grammar can't be used, "" if it can. Raises Untried within
        `remembered_only`, Cancelled within `cancellable`."""
        name = hashlib.sha256(grammar.encode()).digest()
        if (known := self._verdicts.find(name)) is not None:
            return known
        if _remembered_only.get():
            raise Untried
        trial = self._idle.get()
        try:
            trial.start()
            with (_cancellation.get() or Cancellation()).stopping(trial.kill):
                complaint = trial.complaint(grammar)
        finally:
            self._idle.put(trial)
        self._verdicts.keep(name, complaint)
        return complaint

    def close(self) -> None:
        for trial in self._all:
            trial.close()


class Trial:
    """One process, started when it is first needed and again when it has ended. One thread at a
    time calls its methods; any thread may call `kill`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it runs."""
        with self._lock:
            self._running()

    def complaint(self, grammar: str) -> str:
        """The fault of a grammar, "" if there is none."""
        with self._lock:
            answer, code = self._answer(grammar)
            if code == IDLE_EXIT:  # it ended just before the grammar came
                answer, code = self._answer(grammar)
            return _reason(code) if answer is None else answer

    def kill(self) -> None:
        """End the process at once: `complaint`, if it waits, returns some reason."""
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._end()

    def _answer(self, grammar: str) -> tuple[str | None, int]:
        """The process's answer, or None with its exit code where it ended instead."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            _write(process.stdin, grammar)
            answer = _read(process.stdout)
        except BrokenPipeError:
            answer = None
        return answer, self._end() if answer is None else 0

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it was idle for too long, or another process ended it
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # Ctrl-C is for the server, which drains. Not a session of its own: Linux shares
                # the CPU among sessions first, and NICE would count within the trial's alone
                process_group=0,
            )
            with suppress(OSError):  # here, for its imports take longer than most grammars
                os.setpriority(os.PRIO_PROCESS, self._process.pid, NICE)
        return self._process

    def _end(self) -> int:
        """Its exit code, with nothing of it left."""
        process, self._process = self._process, None
        assert process is not None
        with suppress(BrokenPipeError):
            process.communicate()  # closes its input, at the end of which it ends
        return process.returncode


def _reason(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it takes more than {SECONDS:g} seconds to compile"
    return "it is nested too deeply, or too large, to be compiled"


def _write(pipe: IO[bytes], text: str) -> None:
    data = text.encode()
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> str | None:
    """None at the end."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    return data.decode() if len(data) == length else None


def _answer_all() -> None:
    while (grammar := _next_grammar()) is not None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process
        complaint = _compiled(grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, complaint)


def _next_grammar() -> str | None:
    """None at the end of the input."""
    if not select.select([sys.stdin], [], [], IDLE_SECONDS)[0]:
        os._exit(IDLE_EXIT)  # from a thread other than the main one, sys.exit ends only the thread
    return _read(sys.stdin.buffer)


def _compiled(grammar: str) -> str:
    """llguidance's complaint. All is done that is done for a request, up to the first mask."""
    complaint = LLMatcher.validate_grammar(grammar)
    if complaint and not complaint.startswith("WARNING"):
        return complaint
    matcher = LLMatcher(LLTokenizer(_Bytes(CONTROL.findall(grammar))), grammar, log_level=0)
    if matcher.is_error():
        return matcher.get_error()
    matcher.compute_bitmask()
    return ""


class _Bytes(TokenizerWrapper):
    """A vocabulary of bytes and of the control tokens that a grammar names: one that no text must
    be read for."""

    def __init__(self, control: list[str]) -> None:
        control = [name.replace('\\"', '"') for name in control]
        names = [name.encode() for name in ("<end>", *dict.fromkeys(control))]
        self.tokens = [*(bytes([value]) for value in range(256)), *names]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id, self.bos_token_id = 256, None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _main() -> None:
    threading.stack_size(STACK)
    _limit_memory()
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()


def _limit_memory() -> None:
    """Of data, stacks of threads among them: what is only reserved costs no memory."""
    with suppress(OSError, ValueError):  # not on every system
        status = Path("/proc/self/status").read_text()
        taken = int(re.findall(r"^VmData:\s+(\d+) kB$", status, re.MULTILINE)[0]) << 10
        limit = taken + STACK + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


TRIALS = Trials()
atexit.register(TRIALS.close)

if __name__ == "__main__":
    _main()

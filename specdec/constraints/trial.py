"""Whether a grammar compiles, tried in a process of its own.

Grammars come from clients. llguidance recurses as deep as a grammar refers, so that a chain of some
thousand `$ref` overflows its stack, and there are grammars that it works on for minutes. So each
one is compiled here first, with a fraction of a thread's stack and within limits of time and
memory. A grammar that ends this process is refused; the one that asked goes on.
"""

from __future__ import annotations

import atexit
import hashlib
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import IO

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

SECONDS = 3.0
"""Of a CPU's time, so that a busy machine refuses no more than an idle one."""
MEMORY = 2 << 30
"""Bytes of address space."""
STACK = 2 << 20
"""Bytes: a quarter of what threads have on Linux, where the grammar is compiled afterwards."""
CONTROL = re.compile(r"<[^<>\s]+>")
"""What may be a control token's name in a grammar, which is JSON."""
REMEMBERED = 1024
"""Grammars that passed: an agent sends its schema with each turn."""
_LENGTH = struct.Struct("!I")


class Trial:
    """The process, started when it is first needed and again when a grammar ended it. Any thread
    may ask; one is answered at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._memory = threading.Lock()

    def refusal(self, grammar: str) -> str:
        """`complaint`, but of a grammar that passed lately, which need not wait for others."""
        name = hashlib.sha256(grammar.encode()).digest()
        with self._memory:
            if name in self._passed:
                self._passed.move_to_end(name)
                return ""
        said = self.complaint(grammar)
        if not said:
            with self._memory:
                self._passed[name] = None
                if len(self._passed) > REMEMBERED:
                    self._passed.popitem(last=False)
        return said

    def complaint(self, grammar: str) -> str:
        """What is wrong with a grammar, "" if nothing is."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                _write(process.stdin, grammar)
                said = _read(process.stdout)
            except BrokenPipeError:
                said = None
            return _reason(self._end()) if said is None else said

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # somebody else ended it
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the server, which drains
            )
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
    while (grammar := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process
        said = _compiled(grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, said)


def _compiled(grammar: str) -> str:
    """llguidance's complaint. All is done that is done for a request, up to the first mask."""
    said = LLMatcher.validate_grammar(grammar)
    if said and not said.startswith("WARNING"):
        return said
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
    with suppress(ValueError, OSError):  # no such limit on this system
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    threading.stack_size(STACK)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()


TRIAL = Trial()
atexit.register(TRIAL.close)

if __name__ == "__main__":
    _main()

"""A compiled grammar and the memory that its tables take."""

from __future__ import annotations

import re

from llguidance import LLMatcher

GROWN_BYTES = 32 << 20
"""Growth of a grammar's tables after which texts leave them for new ones. A schema of a few hundred
bytes can take 20 MB for each text; those of common agents stay below 3 MB."""
BYTES_PER_STEP = 16
"""Of a lexer's tables, for each of its steps (measured: 15 to 17)."""
BYTES_PER_CHARACTER = 150
"""Of a parser's tables, for each character of a grammar (a schema of 4,000 properties: 140)."""
STEPS = re.compile(r'"lexer_cost": (\d+)')
"""The lexer's steps so far, in the state that llguidance adds to an error's message."""


class Compiled:
    """A grammar as tables that all its matchers share, and which grow with the texts that they
    read. Any thread may use it."""

    def __init__(self, matcher: LLMatcher, grammar: str) -> None:
        """matcher: fresh, without an error."""
        self._matcher, self._fixed_bytes = matcher, BYTES_PER_CHARACTER * len(grammar)
        compiling = _steps(self.copy())
        self.first_steps = self._steps() - compiling
        """The lexer's steps for the first mask."""
        self.settle()

    def copy(self) -> LLMatcher:
        """A matcher at the text's start."""
        return self._matcher.deep_copy()

    def settle(self) -> None:
        """Growth counts from now on."""
        self._limit_bytes = self.measure() + GROWN_BYTES

    def overgrown(self) -> bool:
        """Whether the tables have grown by more than GROWN_BYTES."""
        return self.measure() > self._limit_bytes

    def measure(self) -> int:
        """Bytes that the tables take, estimated from the lexer's steps. Takes 0.2 ms."""
        return self._fixed_bytes + BYTES_PER_STEP * self._steps()

    def _steps(self) -> int:
        probe = self.copy()
        probe.compute_bitmask()  # updates the copy's count
        return _steps(probe)


def _steps(probe: LLMatcher) -> int:
    """The count that a matcher at the text's start holds. llguidance shows it with errors only, so
    the matcher is brought to one."""
    probe.rollback(1)
    steps = STEPS.search(probe.get_error())
    return int(steps[1]) if steps else 0

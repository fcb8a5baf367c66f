"""A model's tokens as grammars see them."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seqs
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.constraints.compiled import Compiled
from specdec.constraints.grammar import check, first_line
from specdec.core.errors import UserError

UNUSABLE = "the grammar can't be used"
NOTHING = "no text satisfies this grammar"
CONTROL = re.compile(rb"\xff\[([0-9]+)\]")
"""How llguidance writes a control token among bytes."""
CACHED = 32
"""Compiled grammars that are kept: an agent sends the same tools with each turn."""
CACHED_BYTES = 64 << 20
"""Most memory of compiled grammars that are kept; the newest is kept in any case."""

MOST_ITEMS = 256
"""Items of a parser's row. An ambiguous grammar has more of them with each token, and a token costs
their cube: at this bound about a millisecond. The 271 schemas of `tests/schemas.py` need fewer than
50; right recursion needs two or more for each element."""
FIRST_STEPS = 200_000
"""Most steps of the lexer for the first mask; a schema that needs more is refused."""
MOST_STEPS = 2_000_000
"""Most steps of the lexer for any mask, about 0.2 seconds. With llguidance's 200,000 a schema could
end its first text and not its second, which finds the tables made."""
LIMITS = LLParserLimits(max_items_in_row=MOST_ITEMS, step_lexer_fuel=MOST_STEPS)
AT_LIMIT = ("Current row has", "lexer error: too many")
"""What llguidance's errors for these limits contain."""


class TokenizerFile(Protocol):
    """What a vocabulary needs of `targets.tokenizer.Tokenizer`."""

    model_vocab_size: int
    stop_ids: tuple[int, ...]

    def to_json(self) -> str: ...


class Vocabulary:
    """A model's tokens as bytes, and the grammars that were compiled for them lately. Any thread
    may use it."""

    def __init__(self, tokenizer: TokenizerFile) -> None:
        self.size, self.stop_ids = tokenizer.model_vocab_size, tokenizer.stop_ids
        self._file = tokenizer
        self._tokens: LLTokenizer | None = None
        self._grammars: OrderedDict[str, Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def load(self) -> LLTokenizer:
        """The tokens, read when they are first needed: that takes a second."""
        with self._lock:
            if self._tokens is None:
                ends: Seqs[int] = self._file.stop_ids
                self._tokens = LLTokenizer(
                    self._file.to_json(), n_vocab=self.size, eos_token=list(ends) or None
                )
            return self._tokens

    def tokens_of(self, text: bytes) -> list[int]:
        """Token ids of what llguidance calls forced, control tokens included."""
        tokens, found = self.load(), []
        for i, part in enumerate(CONTROL.split(text)):
            found += [int(part)] if i % 2 else tokens.tokenize_bytes(part)
        return found

    def compiled(self, grammar: str, tried: bool = False) -> Compiled:
        """A compiled grammar that is not yet overgrown. tried: whether this process has compiled it
        before, so that it will not crash. Raises UserError for one that can't be compiled."""
        tokens = self.load()
        with self._lock:
            known = self._grammars.pop(grammar, None)
        if known is None or known.overgrown():
            known = self._compile(tokens, grammar, tried)
        with self._lock:
            self._grammars[grammar] = known
        self._trim()
        return known

    def _compile(self, tokens: LLTokenizer, grammar: str, tried: bool) -> Compiled:
        if not tried:
            check(grammar, UNUSABLE)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise UserError(f"{UNUSABLE}: {first_line(matcher.get_error())}")
        compiled = Compiled(matcher, grammar)
        if compiled.first_steps > FIRST_STEPS:
            raise UserError(f"{UNUSABLE}: its first token takes too long to determine")
        first = compiled.copy()
        if not any(first.compute_bitmask()) or first.is_error():
            raise UserError(f"{UNUSABLE}: {NOTHING}")
        return compiled

    def _trim(self) -> None:
        with self._lock:
            kept = list(self._grammars.items())
        # without the lock, which the engine's thread takes to read the tokens
        sizes = {grammar: compiled.measure() for grammar, compiled in kept}
        while len(sizes) > 1 and (len(sizes) > CACHED or sum(sizes.values()) > CACHED_BYTES):
            oldest = next(iter(sizes))
            del sizes[oldest]
            with self._lock:
                self._grammars.pop(oldest, None)

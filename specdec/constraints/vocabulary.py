"""A model's tokens as grammars see them."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence as Seqs
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.constraints.grammar import check, first_line
from specdec.core.errors import UserError

UNUSABLE = "the grammar can't be used"
NOTHING = "no text satisfies this grammar"
CONTROL = re.compile(rb"\xff\[([0-9]+)\]")
"""How llguidance writes a control token among bytes."""
CACHED = 64
"""Compiled grammars that are kept: an agent sends the same tools with each turn."""

MOST_ITEMS = 256
"""Items of a parser's row. An ambiguous grammar has more of them with each token, and a token costs
their cube: at this bound about a millisecond. The 271 schemas of `tests/schemas.py` need fewer than
50; right recursion needs two or more for each element."""
LIMITS = LLParserLimits(max_items_in_row=MOST_ITEMS)
ROW_TOO_LARGE = "Current row has"
"""How llguidance's error for that limit begins."""


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
        self._grammars: OrderedDict[str, LLMatcher] = OrderedDict()
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

    def matcher(self, grammar: str) -> LLMatcher:
        """A fresh matcher. Raises UserError for a grammar that can't be compiled."""
        tokens = self.load()
        with self._lock:
            known = self._grammars.pop(grammar, None)
        if known is None:
            check(grammar, UNUSABLE)
            known = LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)
            _check(known)
        with self._lock:
            self._grammars[grammar] = known
            while len(self._grammars) > CACHED:
                self._grammars.popitem(last=False)
        return known.deep_copy()


def _check(matcher: LLMatcher) -> None:
    """Raises UserError for a grammar that can't be compiled, or that no text satisfies."""
    if matcher.is_error():
        raise UserError(f"{UNUSABLE}: {first_line(matcher.get_error())}")
    first = matcher.deep_copy()
    allowed = first.compute_bitmask()
    if first.is_error() or not any(allowed):
        raise UserError(f"{UNUSABLE}: {NOTHING}")

"""Earlier answers of a server, in which suffixes are looked up too: bounded, and apart by scope."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seqs
from dataclasses import dataclass, field

from drafters.suffix.automaton import SuffixAutomaton


@dataclass
class _Shelf:
    """The answers of one scope, in two halves: when the newer one is full, the older one goes."""

    newer: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    older: SuffixAutomaton = field(default_factory=SuffixAutomaton)

    @property
    def size(self) -> int:
        return self.newer.size + self.older.size


class Answers:
    """Answers by scope (API key and salt). An answer is never used for another scope."""

    def __init__(self, most: int) -> None:
        """most: tokens that are kept, of all scopes together; half a kilobyte each."""
        self._most = most
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()

    @property
    def size(self) -> int:
        """Number of tokens that are kept."""
        return sum(shelf.size for shelf in self._shelves.values())

    def keep(self, scope: str, answer: Seqs[int]) -> None:
        """Keep the end of an answer that has ended, as much of it as fits."""
        half = self._most // 2
        answer = answer[-half:] if half else ()
        if not answer:
            return
        shelf = self._shelves.setdefault(scope, _Shelf())
        self._shelves.move_to_end(scope)
        if shelf.newer.size + len(answer) > half:
            shelf.newer, shelf.older = SuffixAutomaton(), shelf.newer
        for token in answer:
            shelf.newer.append(token)
        shelf.newer.part()
        while self.size > self._most:
            self._shelves.popitem(last=False)

    def of(self, scope: str) -> tuple[SuffixAutomaton, ...]:
        """The automata of a scope's answers."""
        shelf = self._shelves.get(scope)
        return () if shelf is None else (shelf.newer, shelf.older)

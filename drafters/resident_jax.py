"""What a drafter is to the traced loop: methods on traced state, and arrays of its own.

`TextOnly` is the simple kind, a pure function of the text. Others (`model_jax`, `eagle3/`) bring
weights, which are read, and a memory, which each dispatch takes and gives back.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence as Rows
from typing import Any, NamedTuple, Protocol

from specdec.types import Array, Sequence, Step
from targets.jax.cache import Cache


class State(NamedTuple):
    """Loop state. length [B]: tokens so far, the last one not yet fed; live [B]."""

    cache: Cache
    length: Array
    live: Array


class TracedRows(Protocol):
    """`specdec.protocols.Drafter` while a cycle is traced: its rows are a State."""

    memory: Any

    def propose(self, seqs: State, k: int) -> Array:
        """Draft [B, k], NO_GUESS allowed; the text is `seqs.cache.tokens` up to `seqs.length`."""
        ...

    def observe(self, seqs: State, step: Step, accepted: Array) -> None:
        """As the protocol says; `seqs` is what it was when drafted."""
        ...


class Traced(Hashable, Protocol):
    """The static half: a loop is compiled for it."""

    def on(self, weights: Any, memory: Any) -> TracedRows: ...


class Resident(Protocol):
    """A drafter on the device, as the host holds it between dispatches."""

    memory: Any
    """Arrays that a dispatch takes (donated) and gives back."""

    def ready(self, seqs: Rows[Sequence]) -> None:
        """What the host has to do for these rows before a dispatch."""
        ...

    def traced(self, shaped: bool) -> Traced:
        """shaped: whether any row's choice is more than the raw argmax."""
        ...

    def weights(self) -> Any:
        """Arrays that a dispatch only reads."""
        ...


class TracedText(Protocol):
    """A drafter that is a pure function of the text; hashable, because it is compiled in."""

    def propose(self, history: Array, length: Array, k: int) -> Array:
        """history [B, S], of which length [B] are real -> draft [B, k], NO_GUESS allowed."""
        ...


class TextOnly:
    """A `Resident` of a pure function of the text."""

    memory: Any = ()

    def __init__(self, drafter: TracedText) -> None:
        self.drafter = drafter

    def ready(self, seqs: Rows[Sequence]) -> None:
        pass

    def traced(self, shaped: bool) -> Traced:
        return _Text(self.drafter)

    def weights(self) -> Any:
        return ()


class _Text(NamedTuple):
    drafter: TracedText

    def on(self, weights: Any, memory: Any) -> TracedRows:
        return _TextRows(self.drafter)


class _TextRows:
    memory: Any = ()

    def __init__(self, drafter: TracedText) -> None:
        self.drafter = drafter

    def propose(self, seqs: State, k: int) -> Array:
        return self.drafter.propose(seqs.cache.tokens, seqs.length, k)

    def observe(self, seqs: State, step: Step, accepted: Array) -> None:
        pass

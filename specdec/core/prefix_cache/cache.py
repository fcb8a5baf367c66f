"""Which prompts are resumed from where, and what of them is kept for later ones.

A prompt is resumed at a *boundary*: the end of a full chunk. Two kinds of entries make that
possible. A chunk's own (entries of global layers) is kept once for all prompts that begin alike. A
boundary's (rings of sliding layers) is large, and kept only where later prompts will part from this
one: at the end of the prompt, around its latest user message, and where prompts have parted before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seqs
from dataclasses import dataclass
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from specdec.core.prefix_cache.keys import Digest, chain
from specdec.core.prefix_cache.pool import SnapshotPool
from specdec.core.prefix_cache.snapshots import Snapshots
from specdec.core.types import Sequence

LAST = 2
"""Boundaries that are kept at a prompt's end. The next turn may be tokenised otherwise a little
before it: calls are written anew, and templates close a generation prompt in their own way."""


class Key(NamedTuple):
    kind: Literal["chunk", "boundary"]
    digest: Digest


@dataclass(frozen=True)
class _Path:
    """A prompt's prefixes, by the number of their chunks."""

    names: list[Digest]
    kept: frozenset[int] = frozenset()
    """Those whose boundary is kept."""
    shared: int = 0
    """The one from which another prompt went on otherwise: so will a third. 0: none."""

    def chunk(self, number: int) -> Key:
        return Key("chunk", self.names[number - 1])

    def boundary(self, number: int) -> Key:
        return Key("boundary", self.names[number - 1])

    def used(self, last: int) -> Iterator[Key]:
        """What is used of it up to this chunk, the deepest first: it is the first to be
        forgotten."""
        for number in range(last, 0, -1):
            if number == last or number in self.kept:
                yield self.boundary(number)
            yield self.chunk(number)


class PrefixCache:
    """One engine's. It lives and ends with its target and drafter. Call it from their thread."""

    def __init__(
        self, unit: int, owners: Seqs[Snapshots], pool: SnapshotPool, seed: str = ""
    ) -> None:
        """unit: tokens per chunk. owners: the target's snapshots, and the drafter's, if any."""
        self.unit, self.owners, self.pool, self.seed = unit, tuple(owners), pool, seed
        self.queries = 0
        """Prompt tokens that were looked up so far."""
        self.hits = 0
        """Prompt tokens that were found."""
        self._paths: WeakKeyDictionary[Sequence, _Path] = WeakKeyDictionary()

    def resume(self, seq: Sequence) -> int:
        """Restore the longest known prefix of a seated sequence: how many of its tokens need no
        prefill. Never all of them: the last chunk also says the first token."""
        if seq.reuse is None:
            return 0
        names = chain(self.seed, seq.reuse.scope, seq.tokens[: seq.prompt_len], self.unit)
        path = _Path(names)
        known = next(
            (n for n in range(len(names)) if path.chunk(n + 1) not in self.pool), len(names)
        )
        most = min(known, (seq.prompt_len - 1) // self.unit)
        found = next((n for n in range(most, 0, -1) if path.boundary(n) in self.pool), 0)
        self._paths[seq] = self._planned(path, seq.reuse.partings, known)
        self.queries += seq.prompt_len
        if found:
            self._restore(seq, path, found)
            self.hits += found * self.unit
        return found * self.unit

    def keep(self, seq: Sequence, stop: int) -> None:
        """`seq` has just been prefilled up to `stop`: keep what later prompts may resume from."""
        path = self._paths.get(seq)
        if path is None:
            return
        number, rest = divmod(stop, self.unit)
        if not rest:
            self._keep_if_possible(seq, path, number)
        if stop == seq.prompt_len:
            self._finish(path)
            del self._paths[seq]

    def leave(self, seq: Sequence) -> None:
        """`seq` is given up before its prompt was read, and still has its slot: a client that lost
        its patience sends the prompt again, and so gets further each time. The boundary is the
        first to leave for others."""
        path = self._paths.pop(seq, None)
        number, rest = divmod(seq.prefilled, self.unit)
        if path is None or rest or not number or path.boundary(number) in self.pool:
            return
        left = _Path(path.names, frozenset([number]))
        self._keep_if_possible(seq, left, number)
        self.pool.supersede(path.boundary(number))

    def give_way(self) -> bool:
        """Somebody has no room: leave device memory. False: there is none to leave."""
        return self.pool.give_way()

    def clear(self) -> None:
        """Forget everything, counts too."""
        self.pool.clear()
        self.queries = self.hits = 0

    def _planned(self, path: _Path, partings: Seqs[int], known: int) -> _Path:
        """The path with what is to be kept of it. known: chunks of it that are kept already."""
        count = len(path.names)
        shared = known if known and path.boundary(known) not in self.pool else 0
        ends = range(count - LAST + 1, count + 1)
        parting = (min(at // self.unit, count) for at in partings)
        kept = frozenset(n for n in (*ends, *parting, shared) if n > 0)
        return _Path(path.names, kept, shared)

    def _restore(self, seq: Sequence, path: _Path, last: int) -> None:
        chunks = [self.pool[path.chunk(n)] for n in range(1, last + 1)]
        boundary = self.pool[path.boundary(last)]
        for i, owner in enumerate(self.owners):
            own = [parts[i] for parts in chunks]
            owner.restore(seq, last * self.unit, own, boundary[i])
        self.pool.touch(path.used(last))

    def _keep_if_possible(self, seq: Sequence, path: _Path, number: int) -> None:
        try:
            self._keep(seq, path, number)
        except MemoryError:  # no request fails for it: what others need comes first
            self.pool.give_way()

    def _keep(self, seq: Sequence, path: _Path, number: int) -> None:
        self.pool.touch(path.used(number))
        start, stop = (number - 1) * self.unit, number * self.unit
        if path.chunk(number) not in self.pool:
            parts = tuple(owner.take_chunk(seq, start, stop) for owner in self.owners)
            self.pool.put(path.chunk(number), parts)
        if number in path.kept and path.boundary(number) not in self.pool:
            parts = tuple(owner.take_boundary(seq, stop) for owner in self.owners)
            self.pool.put(path.boundary(number), parts, lasting=number == path.shared)

    def _finish(self, path: _Path) -> None:
        """The conversation has gone on: its earlier boundaries are the first to leave."""
        for number in range(1, len(path.names) + 1):
            if number not in path.kept:
                self.pool.supersede(path.boundary(number))

"""Decides where prompts are resumed, and which snapshots of them are kept for later prompts.

A prompt is resumed at a *boundary*: the end of a full chunk. This needs two kinds of snapshots. A
chunk's (entries of global layers) is kept once for all prompts with the same prefix. A boundary's
(rings of sliding layers) is large, and kept only where later prompts are likely to diverge: at the
end of the prompt, around its latest user message, and where prompts have diverged before.
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
"""Number of boundaries kept at a prompt's end. More than one, as the next turn may tokenise the
last part differently: calls are written anew, and templates change the end of a generation
prompt."""


class Key(NamedTuple):
    kind: Literal["chunk", "boundary"]
    digest: Digest


@dataclass(frozen=True)
class _Path:
    """A prompt's prefixes, each identified by its number of chunks."""

    names: list[Digest]
    kept: frozenset[int] = frozenset()
    """Prefixes with a boundary to keep."""
    shared: int = 0
    """The prefix after which another prompt diverged from this one, as later ones may. 0: none."""

    def chunk(self, number: int) -> Key:
        return Key("chunk", self.names[number - 1])

    def boundary(self, number: int) -> Key:
        return Key("boundary", self.names[number - 1])

    def used(self, last: int) -> Iterator[Key]:
        """Keys used up to chunk `last`, the deepest first, so that it is the first to be
        evicted."""
        for number in range(last, 0, -1):
            if number == last or number in self.kept:
                yield self.boundary(number)
            yield self.chunk(number)


class PrefixCache:
    """One engine's prefix cache, with the lifetime of its target and drafter. Call it from their
    thread."""

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

    def found(self, seq: Sequence) -> int:
        """The number of tokens that `resume` would restore now."""
        if seq.reuse is None:
            return 0
        path = self._paths[seq] = self._path(seq)
        return self._longest(path, seq.prompt_len)[1]

    def resume(self, seq: Sequence) -> int:
        """Restore the longest kept prefix of a seated sequence. Returns the number of its tokens
        that need no prefill, never all: the prefill of the last chunk chooses the first token.
        Raises MemoryError only where the cache can give way."""
        if seq.reuse is None:
            return 0
        path = self._path(seq)
        known, found = self._longest(path, seq.prompt_len)
        self._paths[seq] = self._planned(path, seq.reuse.partings, known)
        self.queries += seq.prompt_len
        if not found or not self._restored(seq, path, found // self.unit):
            return 0
        self.hits += found
        return found

    def _path(self, seq: Sequence) -> _Path:
        """Its digests take 7 ms for 100,000 tokens, so `resume` reads those of `found`."""
        if seq in self._paths:
            return self._paths[seq]
        assert seq.reuse is not None
        prompt = seq.tokens[: seq.prompt_len]
        return _Path(chain(self.seed, seq.reuse.scope, prompt, self.unit, seq.pictures))

    def _longest(self, path: _Path, prompt_len: int) -> tuple[int, int]:
        """Its chunks that are kept, and the tokens up to the last boundary where it may resume."""
        count = len(path.names)
        known = next((n for n in range(count) if path.chunk(n + 1) not in self.pool), count)
        most = min(known, (prompt_len - 1) // self.unit)
        found = next((n for n in range(most, 0, -1) if path.boundary(n) in self.pool), 0)
        return known, found * self.unit

    def keep(self, seq: Sequence, stop: int) -> None:
        """Keep snapshots that later prompts may resume from. `seq` was just prefilled from
        `seq.prefilled` up to `stop`."""
        path = self._paths.get(seq)
        if path is None:
            return
        number, rest = divmod(stop, self.unit)
        for passed in range(seq.prefilled // self.unit + 1, (stop - 1) // self.unit + 1):
            # no call ended there, because a picture lies across: no prompt resumes there either
            self._keep_if_possible(seq, path, passed, resumable=False)
        if not rest:
            self._keep_if_possible(seq, path, number)
        if stop == seq.prompt_len:
            self._finish(path)
            del self._paths[seq]

    def leave(self, seq: Sequence) -> None:
        """Keep the boundary reached by a `seq` that is cancelled before its prompt was prefilled
        and still has its slot: a client that timed out and sends the prompt again then gets further
        each time. This boundary is the first to be evicted."""
        path = self._paths.pop(seq, None)
        number, rest = divmod(seq.prefilled, self.unit)
        if path is None or rest or not number or path.boundary(number) in self.pool:
            return
        left = _Path(path.names, frozenset([number]))
        self._keep_if_possible(seq, left, number)
        self.pool.supersede(path.boundary(number))

    def forget(self, seq: Sequence) -> None:
        """Its prompt is not read further: nothing more of it is kept."""
        self._paths.pop(seq, None)

    def give_way(self) -> bool:
        """Free device memory after a failed allocation. False: the cache holds none."""
        return self.pool.give_way()

    def clear(self) -> None:
        """Drop all entries and reset the counts."""
        self.pool.clear()
        self.queries = self.hits = 0

    def _planned(self, path: _Path, partings: Seqs[int], known: int) -> _Path:
        """The path with the boundaries to keep. known: number of its chunks that are kept
        already."""
        count = len(path.names)
        shared = known if known and path.boundary(known) not in self.pool else 0
        ends = range(count - LAST + 1, count + 1)
        parting = (min(at // self.unit, count) for at in partings)
        kept = frozenset(n for n in (*ends, *parting, shared) if n > 0)
        return _Path(path.names, kept, shared)

    def _restored(self, seq: Sequence, path: _Path, last: int) -> bool:
        """Whether there was room for it; else the slot may be written in part."""
        try:
            self._restore(seq, path, last)
        except MemoryError:
            if self.pool.device_bytes:
                raise
            return False  # read from its start, the prompt may well have room
        return True

    def _restore(self, seq: Sequence, path: _Path, last: int) -> None:
        chunks = [self.pool[path.chunk(n)] for n in range(1, last + 1)]
        boundary = self.pool[path.boundary(last)]
        for i, owner in enumerate(self.owners):
            own = [parts[i] for parts in chunks]
            owner.restore(seq, last * self.unit, own, boundary[i])
        self.pool.touch(path.used(last))

    def _keep_if_possible(
        self, seq: Sequence, path: _Path, number: int, resumable: bool = True
    ) -> None:
        try:
            self._keep(seq, path, number, resumable)
        except MemoryError:  # keeping a snapshot is optional: evict, never fail the request
            self.pool.give_way()

    def _keep(self, seq: Sequence, path: _Path, number: int, resumable: bool) -> None:
        self.pool.touch(path.used(number))
        start, stop = (number - 1) * self.unit, number * self.unit
        if path.chunk(number) not in self.pool:
            parts = tuple(owner.take_chunk(seq, start, stop) for owner in self.owners)
            self.pool.put(path.chunk(number), parts)
        kept = resumable and number in path.kept
        if kept and path.boundary(number) not in self.pool:
            parts = tuple(owner.take_boundary(seq, stop) for owner in self.owners)
            self.pool.put(path.boundary(number), parts, lasting=number == path.shared)

    def _finish(self, path: _Path) -> None:
        """Mark the earlier boundaries of a conversation that has gone on as the first to be
        evicted."""
        for number in range(1, len(path.names) + 1):
            if number not in path.kept:
                self.pool.supersede(path.boundary(number))

"""Names of prefixes: a chain of digests, one per full chunk of token ids."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seqs

from specdec.core.pictures import PlacedPicture, within

Digest = bytes
"""32 bytes of SHA-256: that two prefixes share one by chance, or by intent, is out of reach."""


def chain(
    seed: str,
    scope: str,
    tokens: Seqs[int],
    unit: int,
    pictures: Seqs[PlacedPicture] = (),
) -> list[Digest]:
    """The digest of tokens[: (i + 1) * unit] for each full chunk i.

    seed: everything beside the tokens that determines the bits of snapshots. scope: API key and
    salt; prompts of different scopes share nothing. pictures: each enters the digest of every
    chunk in which it has a place, whole, because its rows see each other.
    """
    last = _digest(_part(seed) + _part(scope))
    found = []
    for start in range(0, len(tokens) - unit + 1, unit):
        ids = struct.pack(f"<{unit}q", *tokens[start : start + unit])
        seen = (_picture(placed, start) for placed in within(start, start + unit, pictures))
        last = _digest(b"".join((last, ids, *seen)))
        found.append(last)
    return found


def _picture(placed: PlacedPicture, start: int) -> bytes:
    """Which picture it is, and how far behind its first place the chunk starts."""
    return placed.picture.digest + struct.pack("<q", start - placed.start)


def _part(text: str) -> bytes:
    """The text's bytes after their length, so that no two lists of texts give the same bytes."""
    data = text.encode()
    return struct.pack("<q", len(data)) + data


def _digest(data: bytes) -> Digest:
    return hashlib.sha256(data).digest()

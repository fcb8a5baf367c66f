"""Pictures of a prompt: what an encoder reads of them, and their places among the tokens.

A picture takes one place for each of its soft tokens. A place holds an id of its own below
NO_GUESS, so that no lookup matches it; a target and an EAGLE-3 head feed the picture's row there,
and a draft model without an encoder the row of id 0, as for every id outside the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import dataclass
from typing import Any

from specdec.core.errors import UserError

FIRST_PLACE = -2
"""The id of a picture's place at position 0; at position p it is FIRST_PLACE - p."""
SoftRows = tuple[tuple[int, Any], ...]
"""Pictures' rows [S, H], each with the row of the call from which on they take the place of
embeddings."""


@dataclass(frozen=True, eq=False)
class Picture:
    """What an encoder reads of one picture. Written by `targets.vision.preprocessing`.

    The patches of a soft token's cell are neighbours, rows first; so are the cells.
    """

    levels: Any
    """[patches, side * side * 3] uint8: row, column and channel of a patch, the channel fastest."""
    positions: Any
    """[patches, 2] int32: (x, y) of each patch, in patches."""
    tokens: int
    """Soft tokens that it becomes, and places that it takes."""
    digest: bytes
    """32 bytes that stand for the resized pixels, their height and width included."""


@dataclass(frozen=True)
class PlacedPicture:
    """A picture at positions start .. stop - 1 of a prompt."""

    start: int
    picture: Picture

    @property
    def stop(self) -> int:
        return self.start + self.picture.tokens


def place_ids(start: int, count: int) -> list[int]:
    """The ids of `count` places from position `start` on."""
    return [FIRST_PLACE - position for position in range(start, start + count)]


def chunk_end(start: int, chunk: int, stop: int, pictures: Seqs[PlacedPicture]) -> int:
    """Where a prefill call from `start` ends, in a prompt of `stop` tokens: at the next absolute
    multiple of `chunk`, but never inside a picture, of which each row may see the others. It ends
    before such a picture, or behind the one that it begins with."""
    end = min(stop, (start // chunk + 1) * chunk)
    for placed in pictures:
        if placed.start < end < placed.stop:
            return placed.start if placed.start > start else placed.stop
    return end


def check_places(tokens: Seqs[int], pictures: Seqs[PlacedPicture]) -> None:
    """Raise UserError unless the pictures come in order, apart from each other, with their own ids
    at their places."""
    last = 0
    for placed in pictures:
        own = place_ids(placed.start, placed.picture.tokens)
        if placed.start < last or list(tokens[placed.start : placed.stop]) != own:
            raise UserError(f"the picture at position {placed.start} has not its own places")
        last = placed.stop + 1


def sees_up_to(start: int, stop: int, pictures: Seqs[PlacedPicture]) -> list[int]:
    """For positions start .. stop - 1 the last position that each may see, where the rows of a
    picture see each other: its picture's end, else itself."""
    seen = list(range(start, stop))
    for placed in pictures:
        for position in range(max(start, placed.start), min(stop, placed.stop)):
            seen[position - start] = placed.stop - 1
    return seen


def soft_rows(start: int, pictures: Seqs[tuple[PlacedPicture, Any]]) -> SoftRows:
    """In a call from `start` on, of pictures with their rows [S, H]."""
    return tuple((placed.start - start, own) for placed, own in pictures)


def within(start: int, stop: int, pictures: Seqs[PlacedPicture]) -> list[PlacedPicture]:
    """The pictures with a place among positions start .. stop - 1."""
    return [placed for placed in pictures if placed.start < stop and placed.stop > start]

"""Soft tokens of pictures that were encoded before: by their digest, bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence as Seqs
from typing import Any, Protocol

from specdec.core.errors import UserError
from specdec.core.pictures import Picture, PlacedPicture
from specdec.core.types import Array, Reuse
from targets.vision.spec import VisionSpec

ROWS_BYTES = 64 << 20
"""Most bytes of soft tokens that a target keeps; one picture of 31B at 280 tokens has 3 MB."""


class Encoder(Protocol):
    """A backend's encoder of pictures."""

    spec: VisionSpec

    def encode(self, picture: Picture) -> Any:
        """-> soft tokens [S, H], an array with `nbytes`. A pure function of the pixels."""
        ...


class SoftTokens:
    """The rows of pictures. Those of requests that reuse nothing are never kept."""

    def __init__(self, encoder: Encoder, most: int = ROWS_BYTES) -> None:
        """most: bytes that are kept."""
        self._encoder, self._most = encoder, most
        self._kept: OrderedDict[tuple[str, bytes], Any] = OrderedDict()
        self.used = 0
        """Bytes that are kept."""

    def parts(self, picture: Picture, reuse: Reuse | None) -> Iterator[Array | None]:
        """None once the picture has been encoded, if it had to be, then its rows. Callers of other
        scopes share nothing: the time would show that a picture was seen before."""
        key = ("" if reuse is None else reuse.scope, picture.digest)
        if reuse is not None and key in self._kept:
            self._kept.move_to_end(key)
            yield self._kept[key]
            return
        rows = self._encoder.encode(picture)
        if reuse is not None:
            self._keep(key, rows)
        yield None
        yield rows

    def _keep(self, key: tuple[str, bytes], rows: Any) -> None:
        self._kept[key] = rows
        self.used += rows.nbytes
        while self.used > self._most:
            self.used -= self._kept.popitem(last=False)[1].nbytes


def rows_of(
    soft_tokens: SoftTokens | None, pictures: Seqs[PlacedPicture], reuse: Reuse | None
) -> Iterator[Array | None]:
    """Each picture's rows in their order, and None after each that had to be encoded. Raises
    UserError where a target has no encoder."""
    for placed in pictures:
        if soft_tokens is None:
            raise UserError("this model was loaded without its image side: it takes no pictures")
        yield from soft_tokens.parts(placed.picture, reuse)

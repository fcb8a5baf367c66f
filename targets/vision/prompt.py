"""A prompt with pictures: from ids in which one id stands for each picture, to ids with a place for
each of its soft tokens. Sizes come from the files' headers; pixels are decoded last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seqs
from dataclasses import dataclass

from specdec.core.errors import UserError
from specdec.core.pictures import PlacedPicture, place_ids
from targets.vision.preprocessing import Patches, prepared, size_of, tokens_of
from targets.vision.spec import PictureIds, VisionSpec


@dataclass(frozen=True)
class PictureFile:
    """A picture as it was sent. budget: soft tokens that it may become."""

    data: bytes
    budget: int


@dataclass(frozen=True)
class PlacedFile:
    """A picture's file at positions start .. start + tokens - 1."""

    start: int
    tokens: int
    file: PictureFile

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(frozen=True)
class PicturePrompt:
    """ids: as people count and see them, the image's own id at each of a picture's places."""

    ids: list[int]
    files: tuple[PlacedFile, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The ids of the engine's `Sequence`, which has one of its own for each place."""
        found = list(self.ids)
        for placed in self.files:
            found[placed.start : placed.stop] = place_ids(placed.start, placed.tokens)
        return found

    def pictures(self, patches: Patches) -> tuple[PlacedPicture, ...]:
        """Decoded and resized. Raises UserError for a file that can't be."""
        return tuple(self._decoded(patches))

    def _decoded(self, patches: Patches) -> Iterator[PlacedPicture]:
        for placed in self.files:
            picture = prepared(placed.file.data, placed.file.budget, patches)
            if picture.tokens != placed.tokens:
                raise UserError("the picture's header and its pixels have different sizes")
            yield PlacedPicture(placed.start, picture)


def with_pictures(ids: Seqs[int], files: Seqs[PictureFile], vision: VisionSpec) -> PicturePrompt:
    """ids: with `vision.ids.image` once for each picture, in their order. Raises UserError for a
    file that is no picture."""
    assert ids.count(vision.ids.image) == len(files), "only a template writes this id"
    coming, found, placed = iter(files), list[int](), list[PlacedFile]()
    for token in ids:
        if token != vision.ids.image:
            found.append(token)
            continue
        file = next(coming)
        count = tokens_of(size_of(file.data), file.budget, vision.patches)
        placed.append(PlacedFile(len(found) + 1, count, file))
        found += _around(vision.ids, count)
    return PicturePrompt(found, tuple(placed))


def _around(ids: PictureIds, count: int) -> list[int]:
    return [ids.begin, *[ids.image] * count, ids.end]

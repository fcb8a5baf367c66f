"""From a picture's file to what an encoder reads: decoded, upright, resized, cut into patches.

A pure function of the bytes and the encoder's `Patches`: Pillow's decoders and its bicubic resizing
of whole levels (integers, so equal on all machines for one version of it). Sizes and limits are
read from the header first, and no pixel before.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
from PIL import Image

from specdec.core.errors import UserError
from specdec.core.pictures import Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What is decoded, by content: Pillow has 40 parsers, and these are the ones that are attacked and
mended most."""
MOST_PIXELS = 64_000_000
MOST_SIDE = 16_384
"""Pixels of a picture's longer side."""
DIGEST_FORM = 1
"""Counts forms of the digest."""
ORIENTATION = 0x0112
"""EXIF's tag."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes a picture of that orientation upright."""
TURNED = frozenset({5, 6, 7, 8})
"""Orientations that swap width and height."""
BACKWARDS = frozenset({3, 4, 7, 8})
"""Orientations of which the last rows, or columns, come first."""
PNG_HEAD = 8
"""Bytes before a PNG's first chunk."""
GREY16_STEP = 257
"""65,535 / 255: what a level of 8 bits is in 16."""
DENSEST = {
    "PNG": 8 * 1032,  # pixels of one bit, by deflate's limit
    "GIF": 8 * 4096 // 12,  # codes of 12 bits, each a string of the table
    "JPEG": 8 * 64,  # a bit for each block of 8 x 8
    "WEBP": 8 * 512,  # it has no limit, but only empty pictures go beyond this
}
"""Most pixels for a byte of a large picture's file."""
LARGE_PIXELS = 8_000_000
"""Of larger pictures one is decoded at a time: Pillow takes up to 4 bytes for each pixel, for WebP
the library below it 12 more."""
STRIP_PIXELS = 1 << 20
"""Of a larger picture so many are made upright and opaque at once."""
_ONE_LARGE = threading.Lock()
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # the limit is our own
GREYS_OF_16_BITS = ("I", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes."""
WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
"""Pillow's modes."""


@dataclass(frozen=True)
class Patches:
    """How an encoder cuts a picture. side: pixels of a patch; pool: patches along a cell, which
    becomes one soft token."""

    side: int
    pool: int

    @property
    def cell(self) -> int:
        """Pixels along a cell."""
        return self.side * self.pool


def target_size(height: int, width: int, budget: int, patches: Patches) -> tuple[int, int]:
    """Height and width in pixels to which a picture is resized, up or down, to fill a budget of
    soft tokens. In float64 and in this order of operations, as transformers has it: the floors are
    sensitive."""
    cell = patches.cell
    factor = math.sqrt(budget * cell**2 / (height * width))
    rows = math.floor(factor * height / cell)
    columns = math.floor(factor * width / cell)
    if rows == 0:
        rows, columns = 1, min(math.floor(width / height), budget)
    elif columns == 0:
        rows, columns = min(math.floor(height / width), budget), 1
    return rows * cell, columns * cell


def tokens_of(size: tuple[int, int], budget: int, patches: Patches) -> int:
    """Soft tokens of a picture of this height and width."""
    height, width = target_size(*size, budget, patches)
    return height * width // patches.cell**2


def size_of(data: bytes) -> tuple[int, int]:
    """Height and width of a picture as it is to be seen, from its header. Raises UserError for what
    is no picture of the four formats, and for one that is too large."""
    with _opened(data) as image:
        width, height = image.size
        turned = _orientation(image, data) in TURNED
        return (width, height) if turned else (height, width)


def prepared(data: bytes, budget: int, patches: Patches) -> Picture:
    """The picture of a file, for a budget of soft tokens. Raises UserError for a file that can't be
    decoded, or is none of the four formats."""
    with _opened(data) as image:
        large = image.width * image.height > LARGE_PIXELS
        with _ONE_LARGE if large else nullcontext():
            image.seek(0)
            image.load()
            return _of_image(image, _orientation(image, data), budget, patches)


def of_levels(levels: np.ndarray, budget: int, patches: Patches) -> Picture:
    """The picture of RGB levels [height, width, 3] uint8."""
    return _of_image(Image.fromarray(levels), 1, budget, patches)


def _of_image(image: Image.Image, orientation: int, budget: int, patches: Patches) -> Picture:
    """Of a frame in any mode."""
    width, height = image.size[::-1] if orientation in TURNED else image.size
    size = target_size(height, width, budget, patches)
    levels = np.asarray(_resized(image, orientation, size))
    rows, columns = (length // patches.cell for length in size)
    head = struct.pack("<3q", DIGEST_FORM, *size)
    digest = hashlib.sha256(head + levels.tobytes()).digest()
    return Picture(
        _by_cell(levels, rows, columns, patches),
        _positions(rows, columns, patches.pool),
        rows * columns,
        digest,
    )


def _resized(image: Image.Image, orientation: int, size: tuple[int, int]) -> Image.Image:
    """Upright in RGB, of this height and width. A large picture is there once, as it was decoded:
    red, green and blue are made of it in turn, in strips, and resized. Pillow's arithmetic is the
    same for each of them as for all at once."""
    (height, width), how = size, Image.Resampling.BICUBIC
    direct = image.mode == "RGB" and "transparency" not in image.info and orientation == 1
    if direct or image.width * image.height <= LARGE_PIXELS:
        return _upright(image, orientation).resize((width, height), how)
    bands = [_band(image, orientation, number).resize((width, height), how) for number in range(3)]
    return Image.merge("RGB", bands)


def _band(image: Image.Image, orientation: int, number: int) -> Image.Image:
    """Red, green or blue of the upright picture, in mode L."""
    wide, tall = image.size[::-1] if orientation in TURNED else image.size
    band, rows = Image.new("L", (wide, tall)), max(1, STRIP_PIXELS // wide)
    for first in range(0, tall, rows):
        strip = image.crop(_rows(image, orientation, first, min(tall, first + rows)))
        band.paste(_upright(strip, orientation).getchannel(number), (0, first))
    return band


def _rows(image: Image.Image, orientation: int, first: int, end: int) -> tuple[int, int, int, int]:
    """Where the upright picture's rows first .. end - 1 lie: left, top, right, bottom."""
    width, height = image.size
    if orientation in BACKWARDS:
        all_ = width if orientation in TURNED else height
        first, end = all_ - end, all_ - first
    return (first, 0, end, height) if orientation in TURNED else (0, first, width, end)


def _by_cell(levels: np.ndarray, rows: int, columns: int, patches: Patches) -> np.ndarray:
    """[height, width, 3] -> [patches, side * side * 3]."""
    side, pool = patches.side, patches.pool
    parts = levels.reshape(rows, pool, side, columns, pool, side, 3)
    # a copy in any case: what is Pillow's own is read-only, which torch warns of
    return np.array(parts.transpose(0, 3, 1, 4, 2, 5, 6), order="C").reshape(-1, side * side * 3)


def _positions(rows: int, columns: int, pool: int) -> np.ndarray:
    """[patches, 2] int32 (x, y), in the order of `_by_cell`."""
    y, x = np.mgrid[: rows * pool, : columns * pool].astype(np.int32)
    parts = np.stack([x, y], -1).reshape(rows, pool, columns, pool, 2)
    return np.ascontiguousarray(parts.transpose(0, 2, 1, 3, 4)).reshape(-1, 2)


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """A file whose header was read and is within the limits. What Pillow raises, also from decoding
    within the block, becomes a UserError."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as problem:  # noqa: B036 - its parsers raise what they like
        raise UserError(_refusal(problem)) from None
    with image:
        width, height = image.size
        if width * height > MOST_PIXELS or max(width, height) > MOST_SIDE:
            raise UserError(
                f"the picture has {width} × {height} pixels: at most {MOST_PIXELS // 10**6} "
                f"million are taken, and {MOST_SIDE:,} along a side"
            )
        _refuse_what_is_not_there(image, len(data))
        try:
            yield image
        except UserError:
            raise
        except Exception as problem:  # noqa: B036 - its decoders raise what they like
            raise UserError(_refusal(problem)) from None


def _refuse_what_is_not_there(image: Image.Image, size: int) -> None:
    """Raises UserError for a large picture that its file of `size` bytes can't hold: a decoder
    would take memory for all of its pixels before it missed them."""
    pixels = image.width * image.height
    if pixels > LARGE_PIXELS and pixels > DENSEST[str(image.format)] * size:
        raise UserError(
            f"the picture says {image.width} × {image.height} pixels, which a file of {size:,} "
            "bytes can't hold: send a whole PNG, JPEG, WebP or GIF file"
        )


def _refusal(problem: Exception) -> str:
    if isinstance(problem, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"the picture has more than {MOST_PIXELS // 10**6} million pixels"
    return "the picture can't be decoded: send a whole PNG, JPEG, WebP or GIF file"


def _orientation(image: Image.Image, data: bytes) -> int:
    """EXIF's orientation, 1 for upright; reads no pixels."""
    if image.format != "PNG":
        return image.getexif().get(ORIENTATION, 1)
    exif = Image.Exif()
    exif.load(_png_exif(data))
    return exif.get(ORIENTATION, 1)


def _png_exif(data: bytes) -> bytes:
    """A PNG's EXIF, which may lie behind its pixels: Pillow would decode these first."""
    at = PNG_HEAD
    while at + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"eXIf":
            return data[at + 8 : at + 8 + size]
        at += size + 12
    return b""


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    """In RGB: turned by EXIF, transparency on white."""
    see_through = image.info.get("transparency") is not None
    if image.mode in GREYS_OF_16_BITS:
        image, see_through = _grey_of_16_bits(image), False
    if see_through or image.mode in WITH_ALPHA:
        opaque = image.convert("RGBA")
        image = Image.new("RGBA", opaque.size, "white")
        image.alpha_composite(opaque)
    if orientation in TURNS:
        image = image.transpose(TURNS[orientation])
    return image if image.mode == "RGB" else image.convert("RGB")


def _grey_of_16_bits(image: Image.Image) -> Image.Image:
    """In 8 bits. Pillow's own conversion would cut all levels off at 255, which is nearly white."""
    levels = np.asarray(image).astype(np.int64).clip(0, 255 * GREY16_STEP)
    return Image.fromarray(((levels + GREY16_STEP // 2) // GREY16_STEP).astype(np.uint8))

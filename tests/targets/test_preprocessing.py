"""From a picture's bytes to patches: any of four formats, upright, on white, resized exactly; the
rest is refused in one line, from the header where the size decides."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFile

from specdec.core.errors import UserError
from targets.vision import preprocessing
from targets.vision.preprocessing import (
    Patches,
    of_levels,
    prepared,
    size_of,
    target_size,
    tokens_of,
)
from tests.hostile_pictures import hostile, seeds
from tests.support.pictures import bomb, file_of, levels

PATCHES = Patches(16, 3)
SMALL = Patches(4, 3)
BUDGET = 70
PIXELS = levels(60, 97)


@pytest.mark.parametrize(
    ("height", "width", "size", "tokens"),
    [
        (1, 1, (768, 768), 256),
        (1080, 1920, (576, 1056), 264),
        (3000, 4000, (672, 912), 266),
        (672, 960, (672, 960), 280),
        (20, 3000, (48, 9792), 204),
        (3000, 20, (9792, 48), 204),
        (1, 100_000, (48, 280 * 48), 280),
        (61, 97, (624, 1008), 273),
    ],
)
def test_a_picture_fills_its_budget(height, width, size, tokens):
    """Sizes of transformers 5.24."""
    assert target_size(height, width, 280, PATCHES) == size
    assert tokens_of((height, width), 280, PATCHES) == tokens


def test_patches_of_a_cell_are_neighbours():
    picture = of_levels(PIXELS, BUDGET, SMALL)
    height, width = target_size(*PIXELS.shape[:2], BUDGET, SMALL)
    resized = Image.fromarray(PIXELS).resize((width, height), Image.Resampling.BICUBIC)
    whole = np.asarray(resized)
    for number, (x, y) in enumerate(picture.positions):
        part = whole[4 * y : 4 * y + 4, 4 * x : 4 * x + 4]
        assert (picture.levels[number] == part.reshape(-1)).all()
    cells = picture.positions.reshape(-1, 9, 2) // 3
    assert (cells == cells[:, :1]).all()
    order = cells[:, 0, 1] * (width // 12) + cells[:, 0, 0]
    assert (order == np.arange(picture.tokens)).all()


@pytest.mark.parametrize("shape", [(72, 12), (12, 72), (840, 12), (36, 36), (3000, 20)])
@pytest.mark.parametrize("patches", [SMALL, Patches(12, 1)])
def test_encoders_get_arrays_of_their_own(shape, patches):
    picture = of_levels(levels(*shape), BUDGET, patches)
    assert picture.levels.flags.writeable and picture.levels.flags.c_contiguous
    assert len(picture.levels) == len(picture.positions) == picture.tokens * patches.pool**2


def test_the_digest_is_of_pixels_and_shape():
    one = of_levels(PIXELS, BUDGET, SMALL)
    assert of_levels(PIXELS.copy(), BUDGET, SMALL).digest == one.digest
    assert prepared(file_of(PIXELS), BUDGET, SMALL).digest == one.digest
    assert prepared(file_of(PIXELS, "WEBP", lossless=True), BUDGET, SMALL).digest == one.digest
    changed = PIXELS.copy()
    changed[30, 40] ^= 64
    assert of_levels(changed, BUDGET, SMALL).digest != one.digest
    fits = levels(72, 132)  # needs no resizing
    turned = np.ascontiguousarray(fits.reshape(132, 72, 3))
    assert fits.tobytes() == turned.tobytes()
    assert of_levels(fits, BUDGET, SMALL).digest != of_levels(turned, BUDGET, SMALL).digest


def levels_of(data: bytes) -> np.ndarray:
    with preprocessing._opened(data) as image:
        image.load()
        return np.asarray(preprocessing._upright(image, preprocessing._orientation(image, data)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_exif_turns_a_picture(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    made = file_of(PIXELS, form, exif=exif)
    plain = Image.open(io.BytesIO(file_of(PIXELS, form)))
    turn = preprocessing.TURNS.get(orientation)
    upright = np.asarray((plain if turn is None else plain.transpose(turn)).convert("RGB"))
    assert size_of(made) == upright.shape[:2]
    assert (levels_of(made) == upright).all()


def test_a_pngs_exif_may_lie_behind_its_pixels():
    exif = Image.Exif()
    exif[0x0112] = 6
    body = exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = b"eXIf" + body
    late = struct.pack(">I", len(body)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    plain = file_of(PIXELS)
    made = plain[:-12] + late + plain[-12:]  # before IEND
    assert size_of(made) == PIXELS.shape[1::-1]
    assert levels_of(made).shape[:2] == PIXELS.shape[1::-1]


def test_what_is_transparent_is_white():
    alpha = np.full((*PIXELS.shape[:2], 1), 255, np.uint8)
    alpha[:30] = 0
    shown = levels_of(file_of(np.concatenate([PIXELS, alpha], -1)))
    assert (shown[:30] == 255).all() and (shown[30:] == PIXELS[30:]).all()
    palette = Image.fromarray(PIXELS).quantize(8)
    written = io.BytesIO()
    palette.save(written, "PNG", transparency=palette.getpixel((0, 0)))
    assert (levels_of(written.getvalue())[0, 0] == 255).all()


def test_sixteen_bits_of_grey_become_eight():
    wide = np.linspace(0, 65535, 256).reshape(16, 16).astype(np.uint16)
    shown = levels_of(file_of(wide))
    assert (shown[..., 0].reshape(-1) == np.arange(256)).all()


def in_each_mode() -> list[bytes]:
    image, grey = Image.fromarray(PIXELS), np.arange(PIXELS[..., 0].size, dtype=np.uint16) * 11
    palette, written = image.quantize(8), [file_of(grey.reshape(PIXELS.shape[:2]))]
    modes = [("PNG", mode) for mode in ("RGB", "L", "LA", "RGBA", "1", "P")]
    for form, mode in (*modes, ("JPEG", "CMYK"), ("JPEG", "RGB"), ("WEBP", "RGBA"), ("GIF", "P")):
        made = io.BytesIO()
        image.putalpha(Image.fromarray(PIXELS[..., 1])) if mode.endswith("A") else None
        image.convert(mode).save(made, form)
        written.append(made.getvalue())
    for form in ("PNG", "GIF"):
        made = io.BytesIO()
        palette.save(made, form, transparency=palette.getpixel((0, 0)))
        written.append(made.getvalue())
    return written


@pytest.mark.parametrize("size", [(24, 36), (180, 240), (60, 97), (97, 60), (60, 36), (24, 97)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_strips_have_the_levels_of_the_whole(size, orientation, monkeypatch):
    monkeypatch.setattr(preprocessing, "STRIP_PIXELS", 700)
    monkeypatch.setattr(preprocessing, "LARGE_PIXELS", 1000)
    for data in in_each_mode():
        with preprocessing._opened(data) as image:
            image.load()
            whole = preprocessing._upright(image, orientation)
            expected = np.asarray(whole.resize(size[::-1], Image.Resampling.BICUBIC))
            found = np.asarray(preprocessing._resized(image, orientation, size))
        assert np.array_equal(found, expected), image.mode


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_several_frames_the_first_is_seen(form):
    first, second = (Image.new("RGB", (20, 12), colour) for colour in ("red", "blue"))
    written = io.BytesIO()
    first.save(written, form, save_all=True, append_images=[second], duration=50, lossless=True)
    assert (levels_of(written.getvalue())[0, 0] == (255, 0, 0)).all()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bomb(8001, 8001), "8001 × 8001"),
        (bomb(16_385, 10), "16,384 along a side"),
        (bomb(13_000, 13_000), "million pixels"),
        (bomb(60_000, 60_000), "million"),
        (b"", "PNG, JPEG, WebP or GIF"),
        (b"%!PS-Adobe-3.0 EPSF", "PNG, JPEG, WebP or GIF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "PNG, JPEG, WebP or GIF"),
        (file_of(PIXELS, "TIFF"), "PNG, JPEG, WebP or GIF"),
        (file_of(PIXELS, "BMP"), "PNG, JPEG, WebP or GIF"),
        (file_of(PIXELS)[:-40], "whole PNG"),
        (file_of(PIXELS, "JPEG")[:400], "whole PNG"),
        (file_of(PIXELS, "WEBP")[:200], "whole PNG"),
    ],
)
def test_what_is_refused_is_one_line(data, words):
    with pytest.raises(UserError, match=words) as refused:
        prepared(data, BUDGET, SMALL)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


def test_sizes_are_refused_from_the_header(monkeypatch):
    files = [file_of(PIXELS, form) for form in ("PNG", "JPEG", "WEBP", "GIF")]
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(UserError, match="8001"):
        prepared(bomb(8001, 8001), BUDGET, SMALL)
    assert {size_of(file) for file in files} == {PIXELS.shape[:2]}


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_file_too_small_for_its_pixels_is_refused_from_the_header(form, monkeypatch):
    """Else 60 bytes would take 256 MB. A page of text has pixels enough."""
    drawn = Image.new("RGB", (2900, 2900), "white")
    ImageDraw.Draw(drawn).text((90, 90), "A page with a line of text", fill="black")
    page, empty = io.BytesIO(), io.BytesIO()
    drawn.save(page, form)
    assert size_of(page.getvalue()) == (2900, 2900)
    drawn.paste("white", (0, 0, 2900, 2900))
    drawn.save(empty, form, lossless=True)  # as WebP it is whole, and has 400 bytes
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(UserError, match="2900 × 2900 pixels, which a file of"):
        prepared(empty.getvalue()[:900], BUDGET, SMALL)


def test_hostile_files_are_seen_or_refused():
    """A short form of `python -m tests.hostile_pictures`."""
    random, seen = np.random.default_rng(1), 0
    for _ in range(150):
        try:
            seen += prepared(hostile(random, seeds()), BUDGET, SMALL).tokens > 0
        except UserError as refusal:
            assert "\n" not in str(refusal)
    assert 0 < seen < 150

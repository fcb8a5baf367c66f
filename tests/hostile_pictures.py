"""Hostile pictures: cut, mutated, of wrong types, of other sizes than their headers have. Each is
seen or refused in one line, and the process takes little more memory.

    python -m tests.hostile_pictures --count 10000
"""

from __future__ import annotations

import argparse
import io
import resource
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from specdec.core.errors import UserError
from targets.vision.preprocessing import Patches, prepared

PATCHES = Patches(16, 3)
BUDGET = 70
MOST_GROWTH = 150
"""MB at once. A whole one of 64 megapixels takes 256, which these files are too small to hold."""
KEPT = 50
"""MB afterwards."""


@cache
def seeds() -> tuple[bytes, ...]:
    """Whole files of several formats and modes, and some of other formats."""
    y, x = np.mgrid[:40, :60]
    pixels = np.stack([x * 4, y * 6, x + y], -1).astype(np.uint8)
    image, found = Image.fromarray(pixels), []
    forms = [("PNG", "RGB"), ("PNG", "P"), ("PNG", "LA"), ("PNG", "1"), ("JPEG", "RGB")]
    forms += [("JPEG", "CMYK"), ("JPEG", "L"), ("WEBP", "RGB"), ("WEBP", "RGBA"), ("GIF", "P")]
    forms += [("TIFF", "RGB"), ("BMP", "RGB"), ("PPM", "RGB"), ("ICO", "RGB")]
    for form, mode in forms:
        written = io.BytesIO()
        image.convert(mode).save(written, form)
        found.append(written.getvalue())
    frames = io.BytesIO()
    image.save(frames, "GIF", save_all=True, append_images=[image.rotate(9)] * 3)
    return (*found, frames.getvalue())


def hostile(random: np.random.Generator, files: tuple[bytes, ...]) -> bytes:
    """One of the files, changed."""
    data = bytearray(files[int(random.integers(len(files)))])
    kind = int(random.integers(5))
    if kind == 0:  # cut
        return bytes(data[: int(random.integers(len(data)))])
    if kind == 1:  # a size, or another field of the header
        at = int(random.integers(8, min(40, len(data))))
        data[at : at + 4] = random.bytes(4)
    if kind == 2:  # a part is there twice, or missing
        at, size = int(random.integers(len(data))), int(random.integers(1, 60))
        data[at:at] = data[at : at + size]
        del data[: int(random.integers(2)) * size]
    if kind == 3:  # noise behind a beginning
        data[int(random.integers(4, 30)) :] = random.bytes(300)
    for _ in range(int(random.integers(0, 9))):
        data[int(random.integers(len(data)))] = int(random.integers(256))
    return bytes(data)


def _peak() -> float:
    """MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _held() -> float:
    """MB that the process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    random, files = np.random.default_rng(asked.seed), seeds()
    for file in files[:10]:
        prepared(file, BUDGET, PATCHES)
    before, held, seen = _peak(), _held(), 0
    for _ in range(asked.count):
        try:
            seen += prepared(hostile(random, files), BUDGET, PATCHES).tokens > 0
        except UserError:
            pass
    print(
        f"{asked.count} files, {seen} seen, the others refused; {_peak() - before:.0f} MB more "
        f"memory at once, {_held() - held:.0f} MB kept"
    )
    assert _peak() - before <= MOST_GROWTH and _held() - held <= KEPT


if __name__ == "__main__":
    main()

"""Equal, nearly equal and leaked text, which must not be on both sides of an evaluation."""

import hashlib
import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from specdec.core.errors import UserError

PERMUTATIONS = 64
BAND = 4  # rows per band: 16 bands find pairs from a similarity of about 0.5 upwards
NEARLY_EQUAL = 0.7  # estimated Jaccard similarity of consecutive line pairs
WINDOW = 50  # characters of whitespace-free text that count as a shared passage
STRIDE = 10  # a shared passage of WINDOW + STRIDE characters cannot be missed
SHORTEST_LINE = 6  # characters; shorter lines (")", "else:") are in most files

_GENERATOR = np.random.default_rng(20260101)
_FACTORS = _GENERATOR.integers(1, 2**63, PERMUTATIONS, dtype=np.uint64) | np.uint64(1)
_OFFSETS = _GENERATOR.integers(0, 2**63, PERMUTATIONS, dtype=np.uint64)


def normalise(text: str) -> str:
    """The text without comments and white space: files that differ in layout only become equal."""
    return re.sub(r"\s+", "", re.sub(r"(?m)#.*$", "", text))


def content_key(text: str) -> str:
    """Hash of the normalised content; it alone decides a file's side of the split."""
    return hashlib.sha256(normalise(text).encode()).hexdigest()


def signature(text: str) -> np.ndarray:
    """MinHash of the file's consecutive line pairs: uint32 [PERMUTATIONS]."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if len(line) >= SHORTEST_LINE]
    pairs = {f"{a}\n{b}" for a, b in zip(lines, lines[1:], strict=False)} or {text}
    hashes = np.fromiter((zlib.crc32(pair.encode()) for pair in pairs), np.uint64, len(pairs))
    mixed = (hashes[:, None] * _FACTORS + _OFFSETS) >> np.uint64(32)  # wraps modulo 2**64
    return mixed.min(axis=0).astype(np.uint32)


class NearDuplicates:
    """Stores hashes of the files that were kept, and finds later ones nearly equal to one of
    them."""

    def __init__(self, threshold: float = NEARLY_EQUAL) -> None:
        self.threshold = threshold
        self._kept: list[np.ndarray] = []
        self._buckets: dict[bytes, list[int]] = {}

    def is_new(self, minhash: np.ndarray) -> bool:
        """True (and the file is stored) unless its estimated similarity to a kept one is too
        high."""
        bands = [
            bytes([start]) + minhash[start : start + BAND].tobytes()
            for start in range(0, PERMUTATIONS, BAND)
        ]
        candidates = {index for band in bands for index in self._buckets.get(band, ())}
        for index in candidates:
            if np.mean(self._kept[index] == minhash) >= self.threshold:
                return False
        for band in bands:
            self._buckets.setdefault(band, []).append(len(self._kept))
        self._kept.append(minhash)
        return True


class LeakScan:
    """Finds text of evaluation sets in source files: by name, and by long shared passages."""

    NAMES = re.compile(
        r"human[-_ ]?eval|\bmbpp\b|spec[-_ ]?bench|mt[-_ ]?bench|gsm8k", re.IGNORECASE
    )

    def __init__(self, texts: Iterable[str]) -> None:
        self._passages: set[str] = set()
        self._functions: set[str] = set()
        for text in texts:
            self._functions.update(re.findall(r"def (\w{12,})\(", text))
            body = normalise(re.sub(r"(?m)^(from|import) .*$", "", text))
            self._passages.update(body[i : i + WINDOW] for i in range(len(body) - WINDOW + 1))

    def leaks(self, text: str) -> bool:
        """True when `text` names an evaluation set, defines one of its functions or quotes it."""
        if self.NAMES.search(text):
            return True
        if not self._functions.isdisjoint(re.findall(r"def (\w{12,})\(", text)):
            return True
        body = normalise(text)
        return any(body[i : i + WINDOW] in self._passages for i in range(0, len(body), STRIDE))


def evaluation_texts(paths: Iterable[Path]) -> list[str]:
    """Prompts, solutions and turns of JSONL evaluation sets (HumanEval's and Spec-Bench's forms).

    Raises UserError when a file is missing: a scan that reads nothing would pass everything.
    """
    texts: list[str] = []
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is missing: name the evaluation sets to keep out, or none")
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            texts.append(row.get("prompt", "") + row.get("canonical_solution", ""))
            texts.extend(row.get("turns", []))
    return texts

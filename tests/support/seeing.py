"""A server that takes pictures, on a target that can be calculated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from drafters.ngram.host import NgramDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from targets.tokenizer import load_tokenizer
from targets.vision.spec import read_vision
from tests.support.fakes import FakeTarget
from tests.support.serving import Server, served


class SeeingTarget(FakeTarget):
    """A target whose tokens depend on the pictures' digests, and on no seed."""

    def _choose(self, seq, length):
        seen = sum(int.from_bytes(p.picture.digest[:4], "little") for p in seq.pictures)
        said = int((self.fed[seq.slot, :length] * np.arange(1, length + 1)).sum())
        return 100 + (said + seen) % 900


@contextlib.contextmanager
def serving_pictures(folder: Path) -> Iterator[Server]:
    """folder: as `seeing_mini.write` makes it."""
    tokenizer, vision = load_tokenizer(folder), read_vision(folder)
    target, drafter = SeeingTarget(2, tokenizer.model_vocab_size, 1024), NgramDrafter()
    engine = Engine(target, drafter, host_cycle(target, drafter, 4))
    with served(engine, "seeing", tokenizer=tokenizer, vision=vision) as running:
        yield running

"""A tiny checkpoint on some operations, as decoding runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from targets.checkpoint import Checkpoint
from targets.cuda.cache import make_cache
from targets.cuda.model import decode
from targets.cuda.ops import Ops, Rows
from targets.cuda.params import load_params
from targets.model_folder import read_arch
from tests.support.tiny import VOCAB

IDS = np.random.default_rng(1).integers(0, VOCAB, (2, 32))


class Runner:
    """Two rows in slots 2 and 0."""

    def __init__(self, path: Path, ops: Ops, dtype: str, device: str) -> None:
        self.arch, self.ops, self.device = read_arch(path), ops, device
        checkpoint = Checkpoint(path, self.arch)
        self.weights = load_params(checkpoint, self.arch, dtype, device, ops)

    def feed(self, sizes: tuple[int, ...]) -> torch.Tensor:
        """Logits [2, T, V] of the first IDS, so many tokens per call."""
        cache = make_cache(self.arch, 3, 64, 32, torch.bfloat16, self.device)
        start, parts = 0, []
        for size in sizes:
            rows = (IDS[:, start : start + size], [start] * 2, [2, 0])
            fed = Rows(*(torch.tensor(r, dtype=torch.int32, device=self.device) for r in rows))
            out = decode(self.weights, self.arch, cache, fed, self.ops)
            parts.append(out.logits.view(2, size, VOCAB).cpu())
            start += size
        return torch.cat(parts, 1)

"""A checkpoint on the CUDA target's references, fed as a test likes."""

from __future__ import annotations

import numpy as np
import torch

from targets.checkpoint import Checkpoint
from targets.cuda import reference
from targets.cuda.cache import make_cache
from targets.cuda.model import decode
from targets.cuda.ops import Rows
from targets.cuda.params import load_params
from targets.cuda.reference import Reference
from targets.model_folder import read_arch

torch.set_num_threads(1)  # as targets.cuda.load does


class Runner:
    """One checkpoint on the references, with a cache of three slots."""

    def __init__(self, path, dtype="float32", cache_dtype=torch.float32):
        self.arch = read_arch(path)
        self.ops = Reference(self.arch)
        checkpoint = Checkpoint(path, self.arch)
        self.weights = load_params(checkpoint, self.arch, dtype, "cpu", self.ops)
        self.cache = make_cache(self.arch, 3, 64, 32, cache_dtype, "cpu")

    def feed(self, tokens, start, slot, features=()):
        """Logits [B, T, V] and features [B, T, F] of tokens [B, T] at start [B] in slot [B]."""
        rows = Rows(
            *(torch.tensor(np.asarray(a), dtype=torch.int32) for a in (tokens, start, slot))
        )
        out = decode(self.weights, self.arch, self.cache, rows, self.ops, features)

        def split(x):
            return x.view(*rows.tokens.shape, -1).numpy()

        return split(out.logits), None if out.features is None else split(out.features)


class Routers:
    """Replaces the routers' ranking of experts, to record the picked experts or to force them."""

    def __init__(self, monkeypatch):
        self.patch, self.honest = monkeypatch, reference.rank
        self.noted, self.margins = [], []

    def note(self):
        """From here on: keep each row's shares [1, E] and picks [1, top_k], layer by layer."""

        def rank(shares, per_expert, moe):
            numbers, parts = self.honest(shares, per_expert, moe)
            self.noted.append((shares.clone(), numbers.long()))
            return numbers, parts

        self.patch.setattr(reference, "rank", rank)

    def pick_again(self):
        """From here on: the same experts as noted, with the shares that they have now. `margins`
        holds, for each row that would have picked others, by how much the noted ones were ahead."""
        noted = iter(self.noted)

        def rank(shares, per_expert, moe):
            before, numbers = next(noted)
            own, _ = self.honest(shares, per_expert, moe)
            if set(own[0].tolist()) != set(numbers[0].tolist()):
                ranked = before[0].sort(descending=True).values
                self.margins.append(float(ranked[moe.top_k - 1] - ranked[moe.top_k]))
            top = shares.gather(-1, numbers)
            return numbers.int(), top / top.sum(-1, keepdim=True) * per_expert[numbers]

        self.patch.setattr(reference, "rank", rank)

"""The self-check: is a row's result bitwise the same at every width and place, beside any rows?

The kernels are built for it and tests check it; this repeats the check on the device at hand.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec.core.types import Check, Sampling, Sequence
from targets.cuda.cards import CardsTarget
from targets.cuda.ops import Rows
from targets.cuda.target import CudaTarget

WIDTH = 8
ROUNDS = 3
ROWS = 8
"""Slots that are checked, including the last one. Not all: every logit is kept, which takes
memory."""


def self_check(target: CudaTarget | CardsTarget, seed: int = 0) -> list[Check]:
    """Feed random tokens. Overwrites the cache: call it while no sequence runs."""
    try:
        return _checked(target, seed)
    finally:
        target.release(range(target.slots))


def _checked(target: CudaTarget | CardsTarget, seed: int) -> list[Check]:
    random = np.random.default_rng(seed)
    rounds = min(ROUNDS, (target.max_len - 1) // WIDTH)
    slots = sorted({*range(min(target.slots, ROWS - 1)), target.slots - 1})
    texts = random.integers(0, target.vocab, (len(slots), rounds * WIDTH)).astype(np.int32)
    alone = _logits(target, texts[:1], [0], WIDTH)[0]
    singly = _logits(target, texts[:1], [0], 1)[0]
    checks = [_compare("a token fed alone or behind others", singly, alone)]
    if len(slots) > 1:
        together = _logits(target, texts, slots, WIDTH)
        checks.append(_compare("a row alone or beside full slots", together[0], alone))
        shifted = _logits(target, texts, slots[1:] + [0], WIDTH)
        checks.append(_compare("a row in another slot", shifted[0], together[0]))
        last = _logits(target, texts[:1], [slots[-1]], WIDTH)[0]
        checks.append(_compare("a row alone in the last slot", last, alone))
        moved = _logits(target, np.roll(texts, 1, 0), slots[-1:] + slots[:-1], WIDTH)
        checks.append(_compare("a row at another place of the call", moved[1], together[0]))
        checks.append(_sampled(target, together[:, :WIDTH], slots))
    return checks


def _sampled(target: CudaTarget | CardsTarget, logits: Tensor, slots: list[int]) -> Check:
    """The full sampler on slot 0's logits, beside other rows and beside none."""
    for slot in slots:
        shape = Sampling(temperature=1.0, top_p=0.9, min_p=0.01, top_k=50, seed=slot)
        target.seat(Sequence([1], shape, slot=slot))
    rows = _rows(target, np.zeros(logits.shape[:2], np.int32), 0, slots)
    beside = target.choose(logits, rows, True)[0]
    one = Rows(rows.tokens[:1], rows.start[:1], rows.slot[:1])
    alone = target.choose(logits[:1], one, True)[0]
    return _compare("a sampled choice alone or beside others", beside, alone)


def _compare(question: str, ours: Tensor, theirs: Tensor) -> Check:
    return Check(question, int((ours != theirs).sum()), ours.numel())


def _logits(
    target: CudaTarget | CardsTarget, texts: np.ndarray, slots: list[int], width: int
) -> Tensor:
    """Logits [B, tokens, V] of the texts in these slots, `width` tokens of each per call."""
    pieces = []
    for slot in slots:
        target.reserve(slot, texts.shape[1])
    for start in range(0, texts.shape[1], width):
        rows = _rows(target, texts[:, start : start + width], start, slots)
        pieces.append(target.forward(rows, False).logits)
    return torch.cat(pieces, 1)


def _rows(
    target: CudaTarget | CardsTarget, tokens: np.ndarray, start: int, slots: list[int]
) -> Rows:
    starts = np.full(len(tokens), start, np.int32)
    arrays = np.ascontiguousarray(tokens), starts, np.array(slots, np.int32)
    return Rows(*(torch.from_numpy(a).to(target.device) for a in arrays))

"""Teacher-forced scoring: the negative log-likelihood of each token of a window, in nats."""

from __future__ import annotations

import numpy as np
import torch

from specdec.core.errors import UserError
from specdec.core.types import MAX_DRAFT
from targets.cuda.cards import CardsTarget
from targets.cuda.ops import Rows
from targets.cuda.target import CudaTarget

ROWS = MAX_DRAFT + 1
"""Positions per call: the widest verify, which room in the rings is kept for."""


def window_nll(target: CudaTarget | CardsTarget, tokens: list[int]) -> np.ndarray:
    """nll[i] of tokens[i + 1] given tokens[:i + 1], float32, length len(tokens) - 1. Overwrites
    slot 0's cache. Raises UserError for a window that is longer than the context."""
    scored = len(tokens) - 1
    if scored > target.max_len:
        raise UserError(
            f"the window has {len(tokens)} tokens but the context is {target.max_len}: make "
            "--window shorter or --max-len longer"
        )
    text = torch.tensor(tokens, dtype=torch.int32, device=target.device)
    slot = torch.zeros(1, dtype=torch.int32, device=target.device)
    parts = []
    target.reserve(0, scored)
    try:
        for start in range(0, scored, ROWS):
            stop = min(start + ROWS, scored)
            rows = Rows(text[None, start:stop].contiguous(), slot + start, slot)
            log_p = target.forward(rows, False).logits[0].log_softmax(-1)
            parts.append(-log_p.gather(-1, text[start + 1 : stop + 1, None].long())[:, 0])
    finally:
        target.release([0])
    return torch.cat(parts).cpu().numpy()

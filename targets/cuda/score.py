"""Teacher-forced scoring: the negative log-likelihood of each token of a window, in nats."""

from __future__ import annotations

import numpy as np
import torch

from specdec.errors import UserError
from specdec.types import Sequence
from targets.cuda.target import CudaTarget


def window_nll(target: CudaTarget, tokens: list[int]) -> np.ndarray:
    """nll[i] of tokens[i + 1] given tokens[:i + 1], float32, length len(tokens) - 1.

    The text is fed as a draft that is always right: what is scored is what decoding computes.
    Overwrites slot 0: call it idle.
    """
    scored = len(tokens) - 1
    if scored > target.max_len:
        raise UserError(f"a window of {len(tokens)} tokens needs --max-len {scored} or more")
    width = target.max_draft + 1
    pieces = [_piece(target, tokens, i, min(scored, i + width)) for i in range(0, scored, width)]
    return np.concatenate(pieces)


def _piece(target: CudaTarget, tokens: list[int], start: int, stop: int) -> np.ndarray:
    """nll of tokens[start + 1 : stop + 1]; everything before `start` is in the cache."""
    seq = Sequence(tokens[: start + 1], slot=0)
    rows = target.feed([seq], np.array([tokens[start + 1 : stop]], np.int32))
    log_p = torch.log_softmax(target.forward(rows, False).logits[0], -1)
    following = torch.tensor(tokens[start + 1 : stop + 1], device=log_p.device)
    return -log_p.gather(1, following[:, None])[:, 0].cpu().numpy()

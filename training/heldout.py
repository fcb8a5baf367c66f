"""Held-out loss: nats per token and bits per character, each target scored once.

A document is cut into windows that start with <bos> and overlap by half; a window scores only the
tokens that no earlier window scored, so that each has at least half a window of left context.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers

from targets.arch import Arch
from training.blocks import block_logits
from training.tokens import BOS

ROWS = 32  # windows per call
Scorer = Callable[[Any, Any, Any], Any]


class Windows(NamedTuple):
    """inputs, targets int32 [N, W]; scored bool [N, W]; characters of all documents together."""

    inputs: np.ndarray
    targets: np.ndarray
    scored: np.ndarray
    characters: int


class Loss(NamedTuple):
    """Means over the scored tokens (nats) and over the documents' characters (bits)."""

    nats_per_token: float
    bits_per_character: float
    tokens: int
    characters: int


def windows_of(backend: tokenizers.Tokenizer, texts: list[str], width: int) -> Windows:
    """Cut raw documents into windows of `width` tokens, <bos> included."""
    rows = []
    for text in texts:
        ids = np.asarray(backend.encode(text, add_special_tokens=False).ids, np.int32)
        rows.extend(_document_rows(ids, width))
    inputs, targets, scored = (np.stack(column) for column in zip(*rows, strict=True))
    return Windows(inputs, targets, scored, sum(map(len, texts)))


def _document_rows(ids: np.ndarray, width: int) -> list[tuple[np.ndarray, ...]]:
    rows = []
    done = start = 0
    while done < len(ids):
        targets = np.zeros(width, np.int32)
        piece = ids[start : start + width]
        targets[: len(piece)] = piece
        positions = start + np.arange(width)
        scored = (positions >= done) & (positions < len(ids))
        rows.append((np.concatenate([[BOS], targets[:-1]]).astype(np.int32), targets, scored))
        done = start + len(piece)
        start += width // 2
    return rows


def make_scorer(arch: Arch, dtype: Any = jnp.bfloat16) -> Scorer:
    """A compiled (params, inputs [B, W], targets [B, W]) -> nats [B, W], weights cast to dtype."""

    @jax.jit
    def score(params: Any, inputs: Any, targets: Any) -> Any:
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        logits = block_logits(cast, arch, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    return score


def heldout_nats(score: Scorer, params: Any, windows: Windows) -> np.ndarray:
    """Nats of each scored token, in window order."""
    losses = []
    for start in range(0, len(windows.inputs), ROWS):
        part = slice(start, start + ROWS)
        short = ROWS - len(windows.inputs[part])  # one shape, one compilation
        inputs, targets = (
            np.pad(values[part], ((0, short), (0, 0)))
            for values in (windows.inputs, windows.targets)
        )
        nats = np.asarray(score(params, inputs, targets))[: ROWS - short]
        losses.append(nats[windows.scored[part]])
    return np.concatenate(losses)


def summarise(nats: np.ndarray, characters: int) -> Loss:
    """Totals of scored tokens to a `Loss`."""
    total = float(nats.sum(dtype=np.float64))
    bits = total / math.log(2) / characters
    return Loss(total / len(nats), bits, len(nats), characters)


def heldout_loss(score: Scorer, params: Any, windows: Windows) -> Loss:
    """Loss over whole documents, each target once."""
    return summarise(heldout_nats(score, params, windows), windows.characters)

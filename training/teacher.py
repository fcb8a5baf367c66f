"""The target as teacher: features and distributions of packed documents, in the jitted step.

The forward is the one that serves; rows that bring its states, from a feature cache, spare it.
Distributions are soft-capped and after the final norm, as the target samples from them; over a
large vocabulary they are made a block of tokens at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from targets.arch import Arch, LayerSpec
from targets.checkpoint import Checkpoint
from targets.jax.kv_exchange import SequenceExchange, attend_visible, shared_stores
from targets.jax.model import Hidden, forward, head
from targets.jax.params import Params, load_params
from targets.layer_groups import place_of
from targets.model_folder import read_arch
from training.packing import PackedRows

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
BLOCK = 512
"""Tokens with logits over the whole vocabulary in memory at a time."""


class TeacherOutput(NamedTuple):
    """The training targets of each position. features [B, T, F], or without feature layers the
    state [B, T, H] after the final norm; lent: each lender's keys and values [B, T, K, D]; logits
    [B, T, D] float32 over the draft vocabulary; total [B, T]: log-sum-exp over the whole one; best
    [B, T]: its argmax."""

    features: Any
    logits: Any
    total: Any
    best: Any
    lent: Any = None


class PackedExchange(NamedTuple):
    """A `KVExchange` for packed rows: documents [B, T], each its own sequence."""

    documents: Any

    def scope(self) -> Any:
        return self

    def positions(self, tokens: int) -> Any:
        """[B, T], from 0 in each document, as when it is served."""
        first = self.documents != jnp.pad(self.documents, ((0, 0), (1, 0)))[:, :-1]
        first = first.at[:, 0].set(True)
        index = jnp.arange(tokens)
        return index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)

    def exchange(self, stored: Any, repeat: Any, layer: LayerSpec, k: Any, v: Any) -> tuple:
        return SequenceExchange().exchange(stored, repeat, layer, k, v)

    def recall(self, stored: Any, repeat: int) -> Any:
        return SequenceExchange().recall(stored, repeat)

    attend = attend_visible

    def visible(self, layer: LayerSpec, tokens: int, size: int) -> Any:
        same = self.documents[:, :, None] == self.documents[:, None]
        return SequenceExchange().visible(layer, tokens, size) & same


def load_teacher(path: Path, dtype: str | None = None) -> tuple[Params, Arch]:
    """A checkpoint's parameters for teaching. dtype: float32 or bfloat16; by default what suits
    the platform. Raises UserError for anything wrong in the folder."""
    arch = read_arch(path)
    kind = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return load_params(Checkpoint(path, arch), arch, DTYPES[kind]), arch


def read(
    params: Params, arch: Arch, layers: tuple[int, ...], tokens: Any, documents: Any
) -> Hidden:
    """One pass over packed rows tokens [B, T]: all of the target but its head."""
    return read_and_lend(params, arch, layers, (), tokens, documents)[0]


def read_and_lend(
    params: Params,
    arch: Arch,
    layers: tuple[int, ...],
    lenders: tuple[int, ...],
    tokens: Any,
    documents: Any,
) -> tuple[Hidden, Any]:
    """`read`, and the keys and values of the lenders, None where there are none."""
    stored = shared_stores(params, arch, lambda _: tokens.shape, lenders)
    exchange = PackedExchange(documents)
    kept, hidden = forward(params, arch, stored, tokens, exchange, layers)
    places = [place_of(arch, layer) for layer in lenders]
    lent = tuple(exchange.recall(kept[group][j], repeat) for group, j, repeat in places)
    return hidden, lent or None


def teach(
    params: Params,
    arch: Arch,
    layers: tuple[int, ...],
    target_ids: Any,
    suppress: tuple[int, ...],
    rows: PackedRows,
    lenders: tuple[int, ...] = (),
) -> TeacherOutput:
    """The training targets of packed rows, from their states if they have them. suppress: ids that
    the target never chooses. lenders: layers from which the head reads keys and values."""
    hidden, lent = rows.states, None
    if hidden is None:
        inputs = layers, lenders, rows.tokens, rows.documents
        hidden, lent = read_and_lend(params, arch, *inputs)
    assert lent is not None or not lenders, "states from a cache lend no keys and values"

    def token(state: Any) -> tuple[Any, Any, Any]:
        logits = head(params, arch, state)
        if suppress:
            logits = logits.at[jnp.asarray(suppress)].set(-jnp.inf)
        total = jax.nn.logsumexp(logits)
        return logits[target_ids], total, jnp.argmax(logits).astype(jnp.int32)

    flat = hidden.last.reshape(-1, hidden.last.shape[-1])
    found = jax.lax.map(token, flat, batch_size=min(BLOCK, len(flat)))
    parts = [part.reshape(*rows.tokens.shape, *part.shape[1:]) for part in found]
    features = hidden.features if layers else hidden.last
    return jax.lax.stop_gradient(TeacherOutput(features, *parts, lent=lent))

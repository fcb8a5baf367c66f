"""The assistant's forward in JAX: the one definition that training and the drafter call.

A step is fed the target's scaled embedding of the last token, beside a state of the target's width:
at first the target's own, after its final norm, of the position before; then what the step before
handed on. Its layers are the target's own `decoder_layer`, with the target's keys and values.

Shape legend: B rows, T positions of each that draft at once (1 when decoding), H the target's
width, d the assistant's, V vocabulary, C words scored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from drafters.assistant.spec import Assistant, AssistantSpec, tensors
from specdec.core.types import Array
from targets.arch import LayerSpec
from targets.jax import params
from targets.jax.kv_exchange import KVExchange
from targets.jax.kv_view import KEY_NORM
from targets.jax.layers import project, project_wide, rms_norm, tables_of
from targets.jax.model import Shared, decoder_layer
from targets.jax.params import Quantized
from targets.jax.placing import put, replicated
from targets.stored import Stored, quantise_int8

Weights = dict[str, Any]
"""By the names of `spec.tensors`, but for `layers`: a tuple of dicts; a dense head's rows are those
that are scored, an ordered head's lie by clusters."""


class Scores(NamedTuple):
    """logits [B, C] float32 of the words ids: [C], or [B, C] where rows score different ones; None:
    the whole vocabulary. An id of `vocab` or more is no word."""

    logits: Array
    ids: Array | None


def place(
    assistant: Assistant,
    key_norms: tuple[Array, ...],
    dtype: Any,
    int8: bool = False,
    mesh: Mesh | None = None,
) -> Weights:
    """An assistant on the devices. key_norms: by layer, of the target's layer that it reads. int8:
    linears and the head are rounded to int8 per output channel."""
    spec, named = assistant.spec, _ordered(assistant)
    table = tensors(spec)
    placed: Weights = {}
    for name, values in named.items():
        if name == "token_ordering":
            placed[name] = put(values.astype(np.int32), replicated(mesh))
            continue
        tensor = replace(table[name], shape=values.shape)
        stored = quantise_int8(values) if int8 and tensor.linear else Stored(values)
        placed[name] = params.place(stored, tensor, dtype, mesh)
    made = nested(placed, len(key_norms))
    layers = zip(made["layers"], key_norms, strict=True)
    return made | {"layers": tuple(own | {KEY_NORM: norm} for own, norm in layers)}


def nested(named: Weights, layers: int) -> Weights:
    """Arrays by the names of `spec.tensors` as `Weights`, with so many layers."""

    def under(prefix: str) -> dict[str, Any]:
        return {n.removeprefix(prefix): v for n, v in named.items() if n.startswith(prefix)}

    top = {name: value for name, value in named.items() if not name.startswith("layers.")}
    return top | {"layers": tuple(under(f"layers.{i}.") for i in range(layers))}


def _ordered(assistant: Assistant) -> dict[str, np.ndarray]:
    """The weights with the head's rows as they are read: those of a pruned head alone; of an
    ordered one by cluster, so that a cluster is one contiguous piece."""
    weights, ids = dict(assistant.weights), assistant.target_ids
    if assistant.spec.clusters:
        known = np.minimum(weights["token_ordering"], len(weights["head"]) - 1)
        weights["head"] = weights["head"][known]
    elif ids is not None:
        weights["head"] = weights["head"][ids]
    return weights


def seen(layer: LayerSpec, ahead: int) -> LayerSpec:
    """The layer with its window as seen by queries: `ahead` of the last key, a query sees one more
    key in its window, as in transformers."""
    return layer if layer.window is None else replace(layer, window=layer.window + ahead)


def step(
    weights: Weights,
    spec: AssistantSpec,
    view: KVExchange,
    donors: tuple[Any, ...],
    ahead: int,
    embedded: Array,
    state: Array,
) -> tuple[Array, Array]:
    """One draft step: embedded [B, T, H] of the last token and state [B, T, H] -> what is scored
    [B, T, d], and the state [B, T, H] that the next step is fed. donors: by layer, what `view`
    attends to."""
    x = project(jnp.concatenate([embedded, state], -1), weights["pre_projection"])
    shared = Shared(spec.arch, view, (), None, None)
    tables = tables_of(spec.arch.layers, view.positions(x.shape[1]))
    for i, layer in enumerate(spec.arch.layers):
        memory = None, 0, donors[i]
        own = weights["layers"][i]
        x, _ = decoder_layer(shared, seen(layer, ahead), x, own, memory, tables, None)
    y = rms_norm(x, weights["norm"], spec.arch.eps)
    return y, project(y, weights["post_projection"])


def score(weights: Weights, spec: AssistantSpec, target_ids: Array | None, y: Array) -> Scores:
    """y [B, d] -> logits of the words that the head scores. target_ids [D]: a pruned head's."""
    if spec.clusters is None:
        return Scores(_capped(spec, project_wide(y, weights["head"])), target_ids)
    count, each = spec.clusters.count, spec.arch.vocab // spec.clusters.count
    _, best = jax.lax.top_k(project_wide(y, weights["centroids"]), spec.clusters.read)

    def split(leaf: Array) -> Array:
        return leaf.reshape(count, each, *leaf.shape[1:])[best]

    rows = jax.tree.map(split, weights["head"])
    ids = split(weights["token_ordering"]).reshape(len(y), -1)
    return Scores(_capped(spec, _products(y, rows).reshape(len(y), -1)), ids)


def _products(y: Array, rows: Any) -> Array:
    """y [B, d] with rows [B, clusters, words, d] of its own -> [B, clusters, words] float32."""
    values = rows.values.astype(y.dtype) if isinstance(rows, Quantized) else rows
    out = jnp.einsum("bd,bcwd->bcw", y, values, preferred_element_type=jnp.float32)
    return out * rows.scale if isinstance(rows, Quantized) else out


def _capped(spec: AssistantSpec, logits: Array) -> Array:
    cap = spec.arch.softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)

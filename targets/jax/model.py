"""Gemma 4 as one pure forward: prefill, verify, feature capture and training all call it.

Layers are scanned in groups of their pattern (one body per group, no branch per layer); on CPUs
those of a small model run one after the other (`params.apart`). Where a layer gets its keys and
values from is a value, `KVExchange`: a cache for decoding, the sequence itself for training. Shape
legend: see layers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec.core.types import Array
from targets.arch import Arch, LayerSpec
from targets.jax import cache as kv, layers
from targets.jax.cache import Cache, Span
from targets.jax.feedforward import experts_of, feed_forward
from targets.jax.kv_exchange import CacheExchange, KVExchange, SequenceExchange, shared_stores
from targets.jax.params import Apart, Params, of_repeat
from targets.layer_groups import LayerGroup, layer_groups, place_of


class Shared(NamedTuple):
    """What every layer of one forward is given. real [B, T]: which tokens are, None where all are.
    per_layer [B, T, L, P]: inputs of E2B and E4B."""

    arch: Arch
    exchange: KVExchange
    features: tuple[int, ...]
    real: Array | None
    per_layer: Array | None


class Merged(NamedTuple):
    """Rows of pictures, which take the place of tokens' embeddings: rows [B, T, H], and there
    [B, T], where they do."""

    rows: Array
    there: Array


class Hidden(NamedTuple):
    """last [B, T, H]: after the final norm. features [B, T, F]: chosen layers' outputs, or None."""

    last: Array
    features: Array | None


def decode(
    params: Params,
    arch: Arch,
    cache: Cache,
    tokens: Array,
    span: Span,
    features: tuple[int, ...],
    merged: Merged | None = None,
    block: int | None = None,
) -> tuple[Cache, Hidden]:
    """Feed tokens [B, T] int32 at `span`: the updated cache and the states. Ids outside the
    vocabulary are fed as id 0, but for pictures' rows; the target never chooses what follows from
    them. block: as in `CacheExchange`."""
    places = kv.places(span, tokens.shape[1], cache.tokens.shape[1])
    cache = cache._replace(tokens=kv.write(cache.tokens[None], 0, places, tokens)[0])
    exchange = CacheExchange(span, block)
    stored, hidden = forward(params, arch, cache.layers, tokens, exchange, features, merged)
    return cache._replace(layers=stored), hidden


def sequence_hidden(
    params: Params, arch: Arch, tokens: Array, features: tuple[int, ...] = ()
) -> Hidden:
    """Whole sequences [B, T] without a cache (training, teacher): states at every position."""
    stored = shared_stores(params, arch, lambda layer: tokens.shape)
    return forward(params, arch, stored, tokens, SequenceExchange(), features)[1]


def sequence_logits(params: Params, arch: Arch, tokens: Array) -> Array:
    """Whole sequences [B, T] -> soft-capped logits [B, T, V] float32."""
    return head(params, arch, sequence_hidden(params, arch, tokens).last)


def head(params: Params, arch: Arch, hidden: Array) -> Array:
    """Final states [..., H] -> soft-capped logits [..., V] float32."""
    logits = layers.project_wide(hidden, params.top[arch.head])
    return logits if arch.softcap is None else arch.softcap * jnp.tanh(logits / arch.softcap)


def forward(
    params: Params,
    arch: Arch,
    stored: tuple,
    tokens: Array,
    exchange: KVExchange,
    features: tuple[int, ...],
    merged: Merged | None = None,
) -> tuple[tuple, Hidden]:
    """The one forward: tokens [B, T] through every layer, K/V exchanged with `exchange`.

    stored: the memory's per-layer stores, shaped like `Params.segments`; returned updated. merged:
    rows that are not scaled as embeddings are; their per-layer inputs are those of id 0.
    """
    # a draft head's layers, Llama's, are the CUDA target's to run: here they would come out wrong
    assert not arch.silu and all(layer.normed for layer in arch.layers), (arch.silu, arch.layers)
    real = (tokens >= 0) & (tokens < arch.vocab)
    tokens = jnp.where(real, tokens, 0)
    if not isinstance(exchange, CacheExchange):
        real = None  # whole sequences: all real, and some are trained on
    x = embed(params, arch, tokens)
    if merged is not None:
        x = jnp.where(merged.there[..., None], merged.rows.astype(x.dtype), x)
        real = None if real is None else real | merged.there
    per_layer = _per_layer_inputs(params, arch, tokens, x)
    shared = Shared(arch, exchange, features, real, per_layer)
    states: dict[int, Array] = {}
    done: list[tuple] = []
    for i, group in enumerate(layer_groups(arch)):
        donors = _donors(arch, group, done, exchange)
        x, store, seen = _run_group(shared, params.segments[i], group, stored[i], x, donors)
        done.append(store)
        states |= seen
    last = layers.rms_norm(x, params.top["norm"], arch.eps)
    captured = jnp.concatenate([states[i] for i in features], -1) if features else None
    return tuple(done), Hidden(last, captured)


def embed(params: Params, arch: Arch, tokens: Array) -> Array:
    """Token ids [...] -> scaled embeddings [..., H]; the factor is rounded to the weight dtype."""
    table = params.top["embed_tokens"]
    return table[tokens] * jnp.asarray(arch.hidden**0.5, table.dtype)


def _per_layer_inputs(params: Params, arch: Arch, tokens: Array, x: Array) -> Array | None:
    """[B, T, L, P] for E2B and E4B: a table row per token, mixed with a projection of x."""
    width = arch.per_layer_input
    if not width:
        return None
    shape = (*tokens.shape, len(arch.layers), width)
    table = params.top["embed_tokens_per_layer"]
    own = jnp.where((tokens < arch.per_layer_vocab), tokens, 0)
    row = (table[own] * jnp.asarray(width**0.5, table.dtype)).reshape(shape)
    mixed = layers.project_spread(x, params.top["per_layer_model_projection"])
    mixed = (mixed * jnp.asarray(arch.hidden**-0.5, x.dtype)).reshape(shape)
    mixed = layers.rms_norm(mixed, params.top["per_layer_projection_norm"], arch.eps)
    return (mixed + row) * jnp.asarray(2**-0.5, x.dtype)


def _donors(arch: Arch, group: LayerGroup, done: list[tuple], exchange: KVExchange) -> tuple:
    """For each layer of the pattern that shares K/V: its donor's, from an earlier group."""

    def find(layer: int) -> Any:
        i, j, repeat = place_of(arch, layer)
        assert i < len(done), f"layer {layer} lends its K/V but comes later"
        return exchange.recall(done[i][j], repeat)

    return tuple(None if la.kv_from is None else find(la.kv_from) for la in group.pattern)


def _run_group(
    shared: Shared,
    weights: tuple[dict[str, Any], ...],
    group: LayerGroup,
    store: tuple,
    x: Array,
    donors: tuple,
) -> tuple[Array, tuple, dict[int, Array]]:
    """Scan the group's repeats; the KV store rides in the carry, so it is updated in place."""
    period, repeats = len(group.pattern), group.repeats
    wanted = [
        j
        for j in range(period)
        if any(group.layer(g, j) in shared.features for g in range(repeats))
    ]
    positions = shared.exchange.positions(x.shape[1])

    def repeat_body(carry: tuple, repeat: tuple) -> tuple:
        x, store = carry
        number, w, extra = repeat
        alike = shared._replace(exchange=shared.exchange.scope())
        tables = layers.tables_of(group.pattern, positions)
        states, kept = [], list(store)
        for j, layer in enumerate(group.pattern):
            with jax.named_scope(f"{'sliding' if layer.sliding else 'global'}_{j}"):
                own, memory = w[j] | experts_of(weights[j], number), (kept[j], number, donors[j])
                inputs = None if extra is None else extra[j]
                x, kept[j] = decoder_layer(alike, layer, x, own, memory, tables, inputs)
            if j in wanted:
                states.append(x)
        return (x, tuple(kept)), tuple(states)

    extra = None
    if shared.per_layer is not None:
        part = shared.per_layer[:, :, group.first : group.first + period * repeats]
        extra = jnp.moveaxis(part, 2, 0).reshape(repeats, period, *x.shape[:2], -1)
    scanned = tuple({n: t for n, t in w.items() if not n.startswith("experts.")} for w in weights)
    groups = (jnp.arange(repeats), scanned, extra)
    (x, store), states = _run_repeats(repeat_body, (x, store), groups, repeats)
    seen = {group.layer(g, j): states[n][g] for n, j in enumerate(wanted) for g in range(repeats)}
    return x, store, seen


def _run_repeats(
    body: Callable[[tuple, tuple], tuple[tuple, tuple]], carry: tuple, groups: tuple, repeats: int
) -> tuple[tuple, Any]:
    """A scan; or one repeat after the other, where weights lie apart."""

    def is_apart(leaf: Any) -> bool:
        return isinstance(leaf, Apart)

    if not any(map(is_apart, jax.tree.leaves(groups, is_leaf=is_apart))):
        return jax.lax.scan(body, carry, groups)
    states = []
    for repeat in range(repeats):
        own = jax.tree.map(lambda leaf, at=repeat: of_repeat(leaf, at), groups, is_leaf=is_apart)
        carry, seen = body(carry, own)
        states.append(seen)
    return carry, tuple(zip(*states, strict=True))


def decoder_layer(
    shared: Shared,
    layer: LayerSpec,
    h: Array,
    w: dict[str, Any],
    memory: tuple[Any, Array, Any],
    tables: layers.RopeTables,
    per_layer: Array | None,
) -> tuple[Array, Any]:
    """One decoder layer on the stream h [B, T, H]. w: its weights by name. memory: its store, which
    of its repeats this is, and the donor's K/V. tables: for the positions of its queries.
    per_layer [B, T, P]: the layer's own. -> the stream, and the store."""
    eps, (store, repeat, donor) = shared.arch.eps, memory
    x = layers.rms_norm(h, w["input_layernorm"], eps)
    turning = tables[layer.rope, layer.head_dim]
    q = layers.queries(x, w, layer, turning, eps)
    if donor is None:
        new_k, new_v = layers.keys_values(x, w, layer, turning, eps)
        store, seen = shared.exchange.exchange(store, repeat, layer, new_k, new_v)
    else:
        seen = donor
    mixed = shared.exchange.attend(q, seen, layer, w.get("self_attn.k_norm"))
    mixed = layers.project(mixed, w["self_attn.o_proj"])
    h = h + layers.rms_norm(mixed, w["post_attention_layernorm"], eps)
    h = h + feed_forward(h, shared.real, w, layer.moe, eps)
    if per_layer is not None:
        gate = jax.nn.gelu(layers.project(h, w["per_layer_input_gate"]), approximate=True)
        extra = layers.project(gate * per_layer, w["per_layer_projection"])
        h = h + layers.rms_norm(extra, w["post_per_layer_input_norm"], eps)
    return h * w["layer_scalar"], store

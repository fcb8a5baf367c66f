"""The target chooses: logits and a request's parameters to one token id per position.

Order as in vLLM: bias and suppression, penalties, temperature, min-p, top-k, top-p, then
Gumbel-max with keyed noise. The filters are thresholds found by bisection over the bits of
float32, so nothing is sorted and each row's reductions never depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from specdec.core.constraint import WORD
from specdec.core.types import MAX_LOGPROBS, Array, LogprobRows
from targets.jax.noise import gumbel
from targets.sampling_params import FLOATS, SPREAD, SamplingTable


def choose_greedy(logits: Array, bias: Array) -> Array:
    """logits [B, T, V], bias [B, V] -> [B, T] int32; ties go to the lowest id."""
    return jnp.argmax(logits + bias[:, None], -1).astype(jnp.int32)


def choose(
    logits: Array, bias: Array, sampling_params: SamplingTable, history: Array, start: Array
) -> Array:
    """Any mixture of greedy and sampled rows.

    logits [B, T, V] float32: row t follows position start + t. history [B, S] int32: what was fed
    at each position, this call's tokens included. -> [B, T] int32.
    """
    tokens = logits.shape[1]
    penalised = logits + bias[:, None]
    penalised = _penalise(penalised, sampling_params, history, start)
    warm = jnp.where(sampling_params.temperature > 0, sampling_params.temperature, 1.0)[
        :, None, None
    ]
    kept = _filter(penalised / warm, sampling_params)
    position = start[:, None] + jnp.arange(tokens) + 1  # of the token that is chosen
    seeds = jnp.broadcast_to(sampling_params.seed[:, None], (*position.shape, 2))
    drawn = (sampling_params.temperature > 0).any()
    noisy = _where_wanted(drawn, lambda: kept + gumbel(seeds, position, logits.shape[-1]), kept)
    sampled = jnp.argmax(noisy, -1)
    greedy = jnp.argmax(penalised, -1)
    return jnp.where(sampling_params.temperature[:, None] > 0, sampled, greedy).astype(jnp.int32)


def masked(logits: Array, masks: Array) -> Array:
    """logits [B, T, V] where masks [B, T, words] uint32 have a bit, -inf elsewhere."""
    bits = (masks[..., None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(*masks.shape[:-1], -1)[..., : logits.shape[-1]]
    return jnp.where(allowed == 1, logits, -jnp.inf)


def _penalise(logits: Array, sampling_params: SamplingTable, history: Array, start: Array) -> Array:
    """Repetition over prompt and output, presence and frequency over the output (as in vLLM)."""
    everything, output = _counts(logits.shape, sampling_params, history, start)
    factor = jnp.where(everything > 0, sampling_params.repetition[:, None, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - sampling_params.frequency[:, None, None] * output
    return logits - sampling_params.presence[:, None, None] * (output > 0)


def _counts(
    shape: tuple[int, ...], sampling_params: SamplingTable, history: Array, start: Array
) -> tuple[Array, Array]:
    """How often each id occurs up to position start + t [B, T, V]: anywhere, and in the output."""
    batch, tokens, vocab = shape
    position = jnp.arange(history.shape[1])
    row = jnp.arange(batch)[:, None]
    valid = (history >= 0) & (history < vocab)
    ids = jnp.where(valid, history, vocab)  # out of range: dropped

    def count(up_to: Array, after: Array) -> Array:
        inside = (position <= up_to[:, None]) & (position >= after[:, None])
        zeros = jnp.zeros((batch, vocab), jnp.float32)
        return zeros.at[row, ids].add(inside.astype(jnp.float32), mode="drop")

    none = jnp.zeros_like(start)
    base = jnp.stack([count(start, none), count(start, sampling_params.prompt_len)])  # [2, B, V]
    if tokens == 1:
        return base[0][:, None], base[1][:, None]
    drafted = start[:, None] + 1 + jnp.arange(tokens - 1)  # positions of the call's later tokens
    later = jnp.take_along_axis(ids, drafted, 1)
    steps = jax.nn.one_hot(later, vocab, dtype=jnp.float32)  # an id of `vocab` is all zeros
    grown = jnp.cumsum(jnp.concatenate([jnp.zeros((batch, 1, vocab)), steps], 1), 1)
    everything, output = base[:, :, None] + grown
    return everything, output


def _filter(logits: Array, sampling_params: SamplingTable) -> Array:
    """-inf where min-p, top-k or top-p cuts; ties at a threshold stay together."""
    best = logits.max(-1, keepdims=True)
    floor = jnp.where(
        sampling_params.min_p > 0, jnp.log(jnp.maximum(sampling_params.min_p, 1e-30)), -jnp.inf
    )
    logits = jnp.where(logits >= best + floor[:, None, None], logits, -jnp.inf)
    off = sampling_params.top_k <= 0
    wanted = jnp.where(off, logits.shape[-1], sampling_params.top_k)[:, None].astype(jnp.float32)
    ones = jnp.ones_like(logits)
    logits = _cut(logits, ones, wanted, off[:, None])
    mass = jnp.exp(logits - best)
    total = mass.sum(-1)
    return _cut(
        logits, mass, sampling_params.top_p[:, None] * total, (sampling_params.top_p >= 1)[:, None]
    )


def _cut(logits: Array, weight: Array, wanted: Array, off: Array) -> Array:
    """Keep the smallest set of largest logits with at least this total weight [B, T]; all where
    `off` [B, 1]."""

    def cut() -> Array:
        return jnp.where(_in_top_set(logits, weight, wanted) | off[..., None], logits, -jnp.inf)

    return _where_wanted(~off.all(), cut, logits)


def _where_wanted(wanted: Array, work: Callable[[], Array], otherwise: Array) -> Array:
    """work(), or `otherwise` if no row needs it. The branch is for CPUs only: it costs nothing
    there, and its result is stored in memory. Without it XLA's CPU compiler computes the noise
    within the search for the largest, a number at a time: ten times as slow."""

    def branch() -> Array:
        return jax.lax.cond(wanted, work, lambda: otherwise)

    return jax.lax.platform_dependent(cpu=branch, default=work)


@partial(jax.jit, inline=True)
def _in_top_set(logits: Array, weight: Array, wanted: Array) -> Array:
    """Which words are in it, [B, T, V]."""
    keys = _ordered(logits)

    def halve(bit: Array, threshold: Array) -> Array:
        trial = threshold | (jnp.uint32(1) << (jnp.uint32(31) - bit.astype(jnp.uint32)))
        total = jnp.where(keys >= trial[..., None], weight, 0.0).sum(-1)
        # the likeliest token always stays, however small the total is to be
        return jnp.where((total >= wanted) & (total > 0), trial, threshold)

    threshold = jax.lax.fori_loop(
        0, 32, halve, jnp.zeros(wanted.shape[:1] + logits.shape[1:2], jnp.uint32)
    )
    return keys >= threshold[..., None]


def _ordered(values: Array) -> Array:
    """float32 to uint32 with the same order."""
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(0x80000000))


def logprobs(
    logits: Array, chosen: Array, bias: Array, sampling_params: SamplingTable
) -> LogprobRows:
    """Log-probabilities of the unshaped distribution (temperature 1, nothing cut), best 20. The
    rows of logits [B, T, V], chosen [B, T], bias [B, V] and the table are the same."""
    log_p = jax.nn.log_softmax(logits, -1)
    values, ids = _best(log_p, min(MAX_LOGPROBS, log_p.shape[-1]))
    picked = jnp.take_along_axis(log_p, chosen[..., None], -1)[..., 0]
    words = _sampling_words(bias, sampling_params)
    return LogprobRows(picked, ids, values, _checksums(logits), words)


def _sampling_words(bias: Array, sampling_params: SamplingTable) -> Array:
    """`LogprobRows.sampling`, uint32."""
    floats = jnp.stack([sampling_params._asdict()[name] for name in FLOATS], -1)
    parts = (
        jax.lax.bitcast_convert_type(floats, jnp.uint32),
        sampling_params.top_k.astype(jnp.uint32)[:, None],
        sampling_params.seed,
        _checksums(bias),
    )
    return jnp.concatenate(parts, -1)


def _checksums(logits: Array) -> Array:
    """`LogprobRows.checksums` of logits [..., V], uint32. Each word's bits times an odd number of
    its own, so that a changed bit changes both sums."""
    bits = jax.lax.bitcast_convert_type(logits.astype(jnp.float32), jnp.uint32)
    word = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
    factors = 2 * word + 1, word * jnp.uint32(SPREAD) | 1
    return jnp.stack([(bits * factor).sum(-1, dtype=jnp.uint32) for factor in factors], -1)


PARTS = 8
"""Parts of the vocabulary, each searched for its best first: devices with whole parts then exchange
only those."""


def _best(log_p: Array, count: int) -> tuple[Array, Array]:
    """The largest [..., count] of [..., V] and their ids; ties as in `top_k`, by id."""
    vocab = log_p.shape[-1]
    if vocab % PARTS or vocab // PARTS < count:
        return jax.lax.top_k(log_p, count)
    values, ids = jax.lax.top_k(log_p.reshape(*log_p.shape[:-1], PARTS, -1), count)
    ids = ids + (jnp.arange(PARTS) * (vocab // PARTS))[:, None]
    flat = (*log_p.shape[:-1], PARTS * count)
    values, place = jax.lax.top_k(values.reshape(flat), count)
    return values, jnp.take_along_axis(ids.reshape(flat), place, -1)


jax.tree_util.register_dataclass(
    LogprobRows,
    data_fields=["chosen", "top_ids", "top_logprobs", "checksums", "sampling"],
    meta_fields=[],
)

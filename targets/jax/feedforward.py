"""The feed-forward branch of a layer: a dense MLP and, in mixtures, routed experts beside it.

Shapes and formulas as in layers.py. Experts are read once each, and only those that a row picked:
on one device or, where they are spread over a mesh, of each of them every device its part. (Whole
experts of its own would be read unevenly: of 8 picks the luckless one of four devices has 3.5.)
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specdec.core.types import Array
from targets.arch import MoeSpec
from targets.jax.layers import project, project_wide, rms_norm
from targets.jax.params import SpreadWeight


def gated_mlp(x: Array, w: dict[str, Any]) -> Array:
    gate = jax.nn.gelu(project(x, w["mlp.gate_proj"]), approximate=True)
    return project(gate * project(x, w["mlp.up_proj"]), w["mlp.down_proj"])


def feed_forward(
    h: Array, real: Array | None, w: dict[str, Any], moe: MoeSpec | None, eps: float
) -> Array:
    """The feed-forward branch of stream h [B, T, H], its own norms included. real [B, T]: which
    rows experts are read for; None: every expert is read, and gradients flow."""
    out = gated_mlp(rms_norm(h, w["pre_feedforward_layernorm"], eps), w)
    if moe:
        out = rms_norm(out, w["post_feedforward_layernorm_1"], eps)
        out = out + rms_norm(mixture(h, real, w, moe, eps), w["post_feedforward_layernorm_2"], eps)
    return rms_norm(out, w["post_feedforward_layernorm"], eps)


def route(h: Array, w: dict[str, Any], moe: MoeSpec, eps: float) -> tuple[Array, Array]:
    """Experts and their weights [B, T, top_k] from the raw stream (not the pre-normed one)."""
    x = rms_norm(h, None, eps) * w["router.scale"] * jnp.asarray(h.shape[-1] ** -0.5, h.dtype)
    shares = jax.nn.softmax(project(x, w["router.proj"]).astype(jnp.float32), -1)
    top, experts = jax.lax.top_k(shares, moe.top_k)
    top = top / top.sum(-1, keepdims=True)
    return experts, top * w["router.per_expert_scale"][experts].astype(jnp.float32)


def mixture(h: Array, real: Array | None, w: dict[str, Any], moe: MoeSpec, eps: float) -> Array:
    """The routed experts' sum [B, T, H] of the rows that are `real` (see feed_forward); others
    get nothing."""
    picks, shares = route(h, w, moe, eps)
    if real is not None:
        picks = jnp.where(real[..., None], picks, moe.experts)
    x = rms_norm(h, w["pre_feedforward_layernorm_2"], eps)
    rows = routed(
        x.reshape(-1, h.shape[-1]),
        picks.reshape(-1, moe.top_k),
        shares.reshape(-1, moe.top_k),
        w["experts"],
        every=real is None,
    )
    return rows.astype(h.dtype).reshape(h.shape)


def experts_a_round(experts: int) -> int:
    """Experts per round of the loop over them, so that weights of several are loaded at the same
    time: up to four, a divisor of their number. Those after the last picked one have weight 0."""
    return next(number for number in (4, 2, 1) if experts % number == 0)


class Experts(NamedTuple):
    """The experts of one repeat of a layer group: the group's weights [repeats, E, out, in] whole,
    so that a loop cuts one expert out of the stack; a scan would cut, and copy, a layer's."""

    gate_up: Any
    down: Any
    repeat: Array


def experts_of(w: dict[str, Any], repeat: Array) -> dict[str, Any]:
    """A layer's `experts`, from its stacked tensors; nothing if it has none."""
    if "experts.down_proj" not in w:
        return {}
    return {"experts": Experts(w["experts.gate_up_proj"], w["experts.down_proj"], repeat)}


def routed(x: Array, picks: Array, shares: Array, experts: Experts, every: bool) -> Array:
    """Sums [R, H] float32 for rows x [R, H] of experts picks [R, top_k], by their shares.

    Of weights that are `SpreadWeight` over a mesh each device multiplies its part; all are added.
    """
    if not isinstance(experts.down, SpreadWeight):
        return _sum_of_experts(x, picks, shares, experts, every)

    def one_device(x: Array, picks: Array, shares: Array, experts: Experts) -> Array:
        return jax.lax.psum(_sum_of_experts(x, picks, shares, experts, every), "tp")

    whole = PartitionSpec()
    parts = Experts(experts.gate_up.parts, experts.down.parts, whole)
    local = Experts(experts.gate_up.weight, experts.down.weight, experts.repeat)
    spread = jax.shard_map(
        one_device,
        mesh=experts.down.mesh,
        in_specs=(whole, whole, whole, parts),
        out_specs=whole,
        check_vma=False,
    )
    return spread(x, picks, shares, local)


def _sum_of_experts(x: Array, picks: Array, shares: Array, experts: Experts, every: bool) -> Array:
    """The sums over all experts, for the part of their width on this device; picks of -1 add
    nothing.

    Each picked expert takes all rows, in ascending order: its output for a row that did not pick
    it weighs exactly 0, so a row's sum has its own experts in their order, beside any other rows.
    """
    count = jax.tree.leaves(experts.down)[0].shape[1]
    picked = (picks[..., None] == jnp.arange(count)).any((0, 1))
    order = jnp.argsort(~picked, stable=True)
    together = experts_a_round(count)

    def add(number: Array, total: Array) -> Array:
        share = jnp.where(picks == number, shares, 0.0).sum(-1, keepdims=True)
        at = partial(jax.tree.map, lambda leaf: leaf[experts.repeat, number])
        gate, up = jnp.split(project(x, at(experts.gate_up)), 2, -1)
        out = project_wide(jax.nn.gelu(gate, approximate=True) * up, at(experts.down))
        return total + share * out

    def add_some(i: Array, total: Array) -> Array:
        for j in range(together):
            total = add(order[i * together + j], total)
        return total

    zeros = jnp.zeros(x.shape, jnp.float32)
    if every:  # a loop of known length: it can be differentiated
        return jax.lax.fori_loop(0, count, add, zeros)
    return jax.lax.fori_loop(0, -(-picked.sum() // together), add_some, zeros)

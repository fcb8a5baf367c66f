"""The tensors of a Gemma 4 text decoder: checkpoint name, shape, logical axes, quantisable or not.

One table serves loading (strict both ways), random weights, export and placing on a mesh.
Names are the checkpoint's own without their prefix and without `.weight`.
"""

from __future__ import annotations

from dataclasses import dataclass

from targets.arch import Arch, LayerSpec


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as the engine holds it; linears are [out, in] as in the checkpoint.

    axes: a logical name per dimension, which a backend's table maps to mesh axes. `heads`, `kv`,
    `ffw`, `vocab`, `per_layer` and `expert` are the ones that tensor parallelism splits.
    linear: quantised checkpoints and quantise-on-load apply to it.
    heads: attention projections split between whole heads only, and have this many.
    halves: two halves lie behind one another on the split axis, and each is split alike.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    linear: bool = False
    heads: int = 0
    halves: bool = False


def _norm(width: int) -> TensorSpec:
    return TensorSpec((width,), ("none",))


def _linear(
    out: int, inner: int, out_axis: str, in_axis: str = "none", heads: int = 0
) -> TensorSpec:
    return TensorSpec((out, inner), (out_axis, in_axis), linear=True, heads=heads)


def model_tensors(arch: Arch) -> dict[str, TensorSpec]:
    """Outside the layers: embedding, a head unless it is the embedding, final norm, per-layer
    inputs."""
    table = TensorSpec((arch.vocab, arch.hidden), ("vocab", "none"))
    tensors = {"embed_tokens": table, "norm": _norm(arch.hidden)}
    if arch.own_head:
        tensors["lm_head"] = table
    if arch.per_layer_input:
        width = len(arch.layers) * arch.per_layer_input
        tensors |= {
            "embed_tokens_per_layer": TensorSpec((arch.per_layer_vocab, width), ("vocab", "none")),
            "per_layer_model_projection": _linear(width, arch.hidden, "per_layer"),
            "per_layer_projection_norm": _norm(arch.per_layer_input),
        }
    return tensors


def layer_tensors(arch: Arch, layer: LayerSpec) -> dict[str, TensorSpec]:
    """One decoder layer's tensors, named as after `layers.{i}.`."""
    norms = ("input_layernorm", "post_attention_layernorm")
    norms += ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    tensors = {name: _norm(arch.hidden) for name in norms}
    tensors["layer_scalar"] = TensorSpec((1,), ("none",))
    tensors |= _attention(arch, layer)
    tensors |= {
        "mlp.gate_proj": _linear(layer.ffw, arch.hidden, "ffw"),
        "mlp.up_proj": _linear(layer.ffw, arch.hidden, "ffw"),
        "mlp.down_proj": _linear(arch.hidden, layer.ffw, "none", "ffw"),
    }
    if layer.moe:
        tensors |= _moe(arch, layer)
    if arch.per_layer_input:
        tensors |= {
            "per_layer_input_gate": _linear(arch.per_layer_input, arch.hidden, "none"),
            "per_layer_projection": _linear(arch.hidden, arch.per_layer_input, "none"),
            "post_per_layer_input_norm": _norm(arch.hidden),
        }
    return tensors


def _attention(arch: Arch, layer: LayerSpec) -> dict[str, TensorSpec]:
    query, key = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    tensors = {
        "self_attn.q_proj": _linear(query, arch.hidden, "heads", heads=layer.heads),
        "self_attn.o_proj": _linear(arch.hidden, query, "none", "heads", layer.heads),
        "self_attn.q_norm": _norm(layer.head_dim),
    }
    if layer.kv_from is None:
        tensors["self_attn.k_proj"] = _linear(key, arch.hidden, "kv", heads=layer.kv_heads)
        tensors["self_attn.k_norm"] = _norm(layer.head_dim)
        if not layer.k_eq_v:
            tensors["self_attn.v_proj"] = _linear(key, arch.hidden, "kv", heads=layer.kv_heads)
    return tensors


def _moe(arch: Arch, layer: LayerSpec) -> dict[str, TensorSpec]:
    moe = layer.moe
    assert moe is not None
    experts, width, hidden = moe.experts, moe.width, arch.hidden
    tensors = {
        "router.proj": TensorSpec((experts, hidden), ("none", "none")),
        "router.scale": _norm(hidden),
        "router.per_expert_scale": _norm(experts),
        "experts.gate_up_proj": TensorSpec(
            (experts, 2 * width, hidden), ("none", "expert", "none"), linear=True, halves=True
        ),
        "experts.down_proj": TensorSpec(
            (experts, hidden, width), ("none", "none", "expert"), linear=True
        ),
    }
    names = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1")
    names += ("post_feedforward_layernorm_2",)
    return tensors | {name: _norm(hidden) for name in names}


def all_tensors(arch: Arch) -> dict[str, TensorSpec]:
    """Every tensor of the text decoder by its full name (without prefix and `.weight`)."""
    tensors = model_tensors(arch)
    for i, layer in enumerate(arch.layers):
        tensors |= {f"layers.{i}.{n}": spec for n, spec in layer_tensors(arch, layer).items()}
    return tensors


def stored_name(prefix: str, name: str) -> str:
    """A tensor's name in a checkpoint: with its prefix, and with `.weight` but for bare ones."""
    if name == "lm_head":
        return "lm_head.weight"
    last = name.rsplit(".", 1)[-1]
    bare = last in ("layer_scalar", "scale", "per_expert_scale", "gate_up_proj")
    return prefix + name + ("" if bare or name.endswith("experts.down_proj") else ".weight")

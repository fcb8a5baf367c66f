"""Weights by layer, fused as the forward reads them, from a checkpoint or drawn (reader.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from targets.arch import Arch, LayerSpec
from targets.checkpoint import Checkpoint
from targets.cuda import four_bits
from targets.cuda.ops import Linear, NarrowHead, Ops
from targets.cuda.reader import Cut, Raw, Reader, whole, wide_dtype
from targets.cuda.soundness import check_sound
from targets.cuda.staging import Staging
from targets.cuda.upload import as_tensor, upload
from targets.cuda.widen import dequantised
from targets.tensors import all_tensors

CLOSING = "post_attention_layernorm", "post_feedforward_layernorm"
"""Norms of what a layer adds to the stream."""
LITTLE = 1 / 64
READERS = 4
"""Layers read at once: one thread copies out of the page cache at half the speed of the bus."""


@dataclass(frozen=True)
class Moe:
    router_scale: Tensor
    router: Linear
    per_expert: Tensor
    gate_up: Linear
    down: Linear
    pre_norm: Tensor
    dense_norm: Tensor
    routed_norm: Tensor


@dataclass(frozen=True)
class PerLayer:
    gate: Linear
    projection: Linear
    post_norm: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; norms and scalar [1] are float32. qkv: q's rows, then k's, then v's, as
    far as the layer has them; gate_up: gate's rows, then up's."""

    input_norm: Tensor
    post_attention_norm: Tensor
    pre_feedforward_norm: Tensor
    post_feedforward_norm: Tensor
    scalar: Tensor
    q_norm: Tensor
    k_norm: Tensor | None
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    moe: Moe | None
    per_layer: PerLayer | None


@dataclass(frozen=True)
class TopPerLayer:
    """table [vocab, L * P] in the wide dtype."""

    table: Tensor
    projection: Linear
    norm: Tensor


@dataclass(frozen=True)
class Weights:
    """embedding [V, H]: wide; the same object as head unless the model has a head of its own.
    head [V, H]: wide. narrow_head: its codes, None where choices are not certified."""

    embedding: Linear
    head: Linear
    narrow_head: NarrowHead | None
    norm: Tensor
    layers: tuple[LayerWeights, ...]
    per_layer: TopPerLayer | None

    @property
    def copied(self) -> bool:
        """Whether linear layers lie in plain order as well."""
        return self.layers[0].qkv.plain is not None


def load_params(
    checkpoint: Checkpoint, arch: Arch, dtype: str, device: str, ops: Ops, cut: Cut = whole
) -> Weights:
    """Read, quantise or widen, fuse and pack, a few layers at a time. Raises UserError."""

    def source(name: str) -> Raw:
        stored = checkpoint.read(name)
        values = upload(as_tensor(stored.values), device)
        scale = None if stored.scale is None else torch.from_numpy(stored.scale).to(device)
        check_sound((values, scale), checkpoint.path, name)
        if stored.code is None and stored.groups is None:
            return values, scale
        narrow = four_bits.from_stored(stored, values) if dtype == "int4" else None
        if narrow is not None:
            check_sound((narrow.scale, narrow.row), checkpoint.path, name)
            return narrow
        return check_sound((dequantised(stored, values), None), checkpoint.path, name)

    with _readers(device) as readers:

        def each(make: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
            return list(readers.map(make, items))

        rounds = not checkpoint.has_four_bits
        return _build(
            arch, Reader(source, all_tensors(arch), dtype, ops, Staging(device), rounds, cut), each
        )


def _readers(device: str) -> ThreadPoolExecutor:
    """Threads that read to this device. A thread of its own has the first GPU as the current one,
    and kernels that order weights are launched on that."""
    if device == "cpu":
        return ThreadPoolExecutor(READERS)
    chosen = torch.device(device).index
    current = torch.cuda.current_device() if chosen is None else chosen
    return ThreadPoolExecutor(READERS, initializer=torch.cuda.set_device, initargs=(current,))


def random_params(
    arch: Arch,
    dtype: str,
    device: str,
    ops: Ops,
    seed: int = 0,
    correlation: float = 0.0,
    cut: Cut = whole,
) -> Weights:
    """Random weights of true size, made on the device: linears with std 1 / sqrt(in), embeddings
    with 1 / sqrt(hidden), norms, scalars and router scales 1. correlation: that of any two
    words' embeddings, and of their streams in all layers: what layers add to them is made small
    (`targets.routing`)."""
    generator = torch.Generator(device).manual_seed(seed)
    specs = all_tensors(arch)
    wide = wide_dtype(dtype)

    def source(name: str) -> Raw:
        shape = specs[name].shape
        if len(shape) == 1:
            branch = correlation and name.endswith(CLOSING)
            return torch.full(shape, LITTLE if branch else 1.0, device=device), None
        inner = {"embed_tokens_per_layer": arch.per_layer_input}.get(name, shape[-1])
        values = torch.empty(shape, dtype=wide, device=device)
        values.normal_(0.0, inner**-0.5, generator=generator)
        if correlation and name == "embed_tokens":
            common = torch.empty(shape[-1], dtype=wide, device=device)
            common.normal_(0.0, (correlation / inner) ** 0.5, generator=generator)
            values.mul_((1 - correlation) ** 0.5).add_(common)
        return values, None

    reader = Reader(source, specs, dtype, ops, Staging(device), cut=cut)
    return _build(arch, reader, lambda make, items: [make(i) for i in items])


def copied(weights: Weights, ops: Ops) -> Weights:
    """With the linear layers in plain order as well, where long prompts find them."""
    layers = tuple(_each_linear(layer, ops.with_plain) for layer in weights.layers)
    return replace(
        weights, layers=layers, per_layer=_each_linear(weights.per_layer, ops.with_plain)
    )


def rounding(weights: Weights) -> Weights:
    """The same weights in the same memory; FP8 ones are read as w8a8, with inputs rounded to 8 bits
    too. Experts have no such kernel."""

    def read(weight: Linear) -> Linear:
        fits = weight.kind == "fp8" and not weight.layout.startswith("experts")
        return replace(weight, kind="w8a8", dealt="fp8") if fits else weight

    return replace(weights, layers=tuple(_each_linear(layer, read) for layer in weights.layers))


def _each_linear(part: Any, change: Callable[[Linear], Linear]) -> Any:
    """A part of the weights with each of its linear layers changed."""
    if isinstance(part, Linear):
        return change(part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    kept = {f.name: _each_linear(getattr(part, f.name), change) for f in fields(part)}
    return replace(part, **kept)


def _build(arch: Arch, reader: Reader, each: Callable) -> Weights:
    head, narrow = reader.heads(arch.head)  # packing needs room: before all else
    embedding = reader.linear(["embed_tokens"]) if arch.own_head else head
    per_layer = None
    if arch.per_layer_input:
        per_layer = TopPerLayer(
            reader.table("embed_tokens_per_layer"),
            reader.linear(["per_layer_model_projection"]),
            reader.vector("per_layer_projection_norm"),
        )
    layers = each(lambda i: layer_weights(reader, arch, i, arch.layers[i]), range(len(arch.layers)))
    norm = reader.vector("norm")
    return Weights(embedding, head, narrow, norm, tuple(layers), per_layer)


def layer_weights(reader: Reader, arch: Arch, i: int, layer: LayerSpec) -> LayerWeights:
    """The weights of layer i, by its tensors' names."""
    at = f"layers.{i}."
    own = layer.kv_from is None
    names = ["q_proj"] + ["k_proj"] * own + ["v_proj"] * (own and not layer.k_eq_v)
    return LayerWeights(
        input_norm=reader.vector(at + "input_layernorm"),
        post_attention_norm=reader.vector(at + "post_attention_layernorm"),
        pre_feedforward_norm=reader.vector(at + "pre_feedforward_layernorm"),
        post_feedforward_norm=reader.vector(at + "post_feedforward_layernorm"),
        scalar=reader.vector(at + "layer_scalar"),
        q_norm=reader.vector(at + "self_attn.q_norm"),
        k_norm=reader.vector(at + "self_attn.k_norm") if own else None,
        qkv=reader.linear([f"{at}self_attn.{name}" for name in names]),
        o=reader.linear([at + "self_attn.o_proj"], "row_parallel"),
        gate_up=reader.linear([at + "mlp.gate_proj", at + "mlp.up_proj"], "gated"),
        down=reader.linear([at + "mlp.down_proj"], "row_parallel"),
        moe=_moe(reader, at) if layer.moe else None,
        per_layer=_per_layer(reader, at) if arch.per_layer_input else None,
    )


def _moe(reader: Reader, at: str) -> Moe:
    return Moe(
        router_scale=reader.vector(at + "router.scale"),
        router=reader.linear([at + "router.proj"]),
        per_expert=reader.vector(at + "router.per_expert_scale"),
        gate_up=reader.linear([at + "experts.gate_up_proj"], "experts_gated"),
        down=reader.linear([at + "experts.down_proj"], "experts"),
        pre_norm=reader.vector(at + "pre_feedforward_layernorm_2"),
        dense_norm=reader.vector(at + "post_feedforward_layernorm_1"),
        routed_norm=reader.vector(at + "post_feedforward_layernorm_2"),
    )


def _per_layer(reader: Reader, at: str) -> PerLayer:
    return PerLayer(
        gate=reader.linear([at + "per_layer_input_gate"]),
        projection=reader.linear([at + "per_layer_projection"]),
        post_norm=reader.vector(at + "post_per_layer_input_norm"),
    )

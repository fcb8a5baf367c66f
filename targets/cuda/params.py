"""Weights by layer, fused as the forward reads them, straight from the file to the device.

dtype "fp8": every quantisable linear as e4m3 per output channel, taken from an FP8 file as it is
or quantised on load, and the rest bf16. "fp8-w8a8": the same weights, of kind "w8a8" but for
experts, whose inputs stay 16 bits wide: each of them meets few rows. "bfloat16" and "float32":
everything wide. "int4": 4 bits where the file has them, in a form that the kernels take, integers
or NVFP4 (four_bits.py), FP8 per channel as it is beside them, and the rest bf16; of a file without
any, every quantisable linear rounded on load. For the other dtypes files of 4 bits, int8 or FP8 in
blocks are dequantised first: fp8 rounds their values again.
Per-layer inputs (E2B, E4B) stay wide in any case: they are small, and the kernels read them so.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from targets.arch import Arch, LayerSpec
from targets.checkpoint import FOUR_BITS, Checkpoint
from targets.cuda import four_bits, int4
from targets.cuda.cache import FP8_MAX
from targets.cuda.four_bits import FourBits
from targets.cuda.ops import Linear, NarrowHead, Ops
from targets.cuda.soundness import check_sound
from targets.cuda.staging import Staging
from targets.cuda.upload import as_tensor, upload
from targets.cuda.widen import dequantised
from targets.tensors import TensorSpec, all_tensors

READERS = 4
"""Layers read at once: one thread copies out of the page cache at half the speed of the bus."""

QUANTISED = ("fp8", "fp8-w8a8", "int4")
"""Dtypes of narrow weights."""
DTYPES = ("float32", "bfloat16", *QUANTISED)

Raw = tuple[Tensor, Tensor | None] | FourBits
"""A tensor as stored and its scale (None where it is wide), or its 4 bits, on the device."""
Source = Callable[[str], Raw]


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
    """head [V, H]: wide, and the embedding's table too. narrow_head: its copy, where it is bf16."""

    head: Linear
    narrow_head: NarrowHead | None
    norm: Tensor
    layers: tuple[LayerWeights, ...]
    per_layer: TopPerLayer | None

    @property
    def copied(self) -> bool:
        """Whether linear layers lie in plain order as well."""
        return self.layers[0].qkv.plain is not None


def load_params(checkpoint: Checkpoint, arch: Arch, dtype: str, device: str, ops: Ops) -> Weights:
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

    with ThreadPoolExecutor(READERS) as readers:
        each = lambda make, items: list(readers.map(make, items))  # noqa: E731
        rounds = not checkpoint.has_four_bits
        return _build(
            arch, Reader(source, all_tensors(arch), dtype, ops, Staging(device), rounds), each
        )


def random_params(arch: Arch, dtype: str, device: str, ops: Ops, seed: int = 0) -> Weights:
    """Random weights of true size, made on the device: linears with std 1 / sqrt(in), embeddings
    with 1 / sqrt(hidden), norms, scalars and router scales 1."""
    generator = torch.Generator(device).manual_seed(seed)
    specs = all_tensors(arch)
    wide = _wide(dtype)

    def source(name: str) -> Raw:
        shape = specs[name].shape
        if len(shape) == 1:
            return torch.ones(shape, device=device), None
        inner = {"embed_tokens_per_layer": arch.per_layer_input}.get(name, shape[-1])
        values = torch.empty(shape, dtype=wide, device=device)
        return values.normal_(0.0, inner**-0.5, generator=generator), None

    reader = Reader(source, specs, dtype, ops, Staging(device))
    return _build(arch, reader, lambda make, items: [make(i) for i in items])


def copied(weights: Weights, ops: Ops) -> Weights:
    """With the linear layers in plain order as well, where long prompts find them."""

    def with_plain(part: Any) -> Any:
        if isinstance(part, Linear):
            return ops.with_plain(part)
        if not is_dataclass(part) or isinstance(part, type):
            return part
        return replace(part, **{f.name: with_plain(getattr(part, f.name)) for f in fields(part)})

    layers = tuple(with_plain(layer) for layer in weights.layers)
    return replace(weights, layers=layers, per_layer=with_plain(weights.per_layer))


def quantise_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 per output channel [..., out, in]: scale [..., out] = absmax / 448."""
    values = values.float()
    scale = values.abs().amax(-1).clamp(min=1e-12) / FP8_MAX
    return (values / scale[..., None]).to(torch.float8_e4m3fn), scale


def own_dtypes(checkpoint: Checkpoint, dtype: str) -> dict[str, str]:
    """Of the weights that a file of 4 bits keeps otherwise, by name."""
    if dtype != "int4" or not checkpoint.has_four_bits:
        return {}
    narrow = [name for name, spec in checkpoint.specs.items() if quantised(name, spec)]
    held = {name: checkpoint.stored_as(name) for name in narrow}
    others = {name: kind for name, kind in held.items() if kind not in FOUR_BITS}
    return {name: "fp8" if kind == "F8_E4M3" else "bfloat16" for name, kind in others.items()}


def quantised(name: str, spec: TensorSpec) -> bool:
    """Whether a narrow dtype narrows this tensor: per-layer inputs stay wide."""
    return spec.linear and "per_layer" not in name


class Reader:
    """Tensors by name in the form that the forward wants them."""

    def __init__(
        self,
        source: Source,
        specs: dict[str, TensorSpec],
        dtype: str,
        ops: Ops,
        staging: Staging,
        rounds: bool = True,
    ) -> None:
        """rounds: whether int4 is what wider weights are rounded to, too."""
        self.source, self.specs, self.ops = source, specs, ops
        self.staging, self.rounds = staging, rounds
        self.wide = _wide(dtype)
        self.wide_kind = "float32" if dtype == "float32" else "bf16"
        self.dtype = dtype

    def vector(self, name: str) -> Tensor:
        return self._wide(name).float()

    def table(self, name: str) -> Tensor:
        return self._wide(name)

    def numbers(self, name: str) -> Tensor:
        """int64, of a tensor of integers."""
        raw = self.source(name)
        assert not isinstance(raw, FourBits), name
        return raw[0].long()

    def linear(self, names: list[str], layout: str = "plain") -> Linear:
        """Several weights with one input, below each other. What is not quantisable stays wide."""
        with self.staging.aside():
            packed = self._packed(names, layout)
        return self.staging.settled(packed)

    def heads(self, name: str) -> tuple[Linear, NarrowHead | None]:
        """The table as the head, and its copy for certified choices (certified.py)."""
        with self.staging.aside():
            values = self._wide(name)
            head = self.ops.pack(values, None, self.wide_kind, "plain")
            narrow = self.ops.narrow_head(values) if self.wide_kind == "bf16" else None
        settled = self.staging.settled(head)
        if narrow is None:
            return settled, None
        return settled, NarrowHead(self.staging.settled(narrow.weight), narrow.error.clone())

    def _packed(self, names: list[str], layout: str) -> Linear:
        raw = [self.source(name) for name in names]
        narrows = all(quantised(name, self.specs[name]) for name in names)
        if narrows and self.dtype == "int4":
            narrow = [self._four_bits(each) for each in raw]
            there = [part for part in narrow if part is not None]
            joined = four_bits.joined(there) if len(there) == len(raw) else None
            if joined is not None:
                return self.ops.pack_codes(joined, layout)
            narrows = all(map(_is_fp8, raw))
        if narrows and self.dtype in QUANTISED:
            values, scales = zip(*map(_fp8, raw), strict=True)
            w8a8 = self.dtype == "fp8-w8a8" and not layout.startswith("experts")
            kind = "w8a8" if w8a8 else "fp8"
            return self.ops.pack(_joined(values), _joined(scales), kind, layout)
        wide = _joined([_widened(each).to(self.wide) for each in raw])
        return self.ops.pack(wide, None, self.wide_kind, layout)

    def _four_bits(self, raw: Raw) -> FourBits | None:
        if isinstance(raw, FourBits):
            return raw
        return int4.quantise(_widened(raw)) if self.rounds else None

    def _wide(self, name: str) -> Tensor:
        return _widened(self.source(name)).to(self.wide)


def _is_fp8(raw: Raw) -> bool:
    return not isinstance(raw, FourBits) and raw[0].dtype == torch.float8_e4m3fn


def _fp8(raw: Raw) -> tuple[Tensor, Tensor]:
    if not isinstance(raw, FourBits) and _is_fp8(raw):
        assert raw[1] is not None
        return raw[0], raw[1]
    return quantise_fp8(_widened(raw))


def _build(arch: Arch, reader: Reader, each: Callable) -> Weights:
    head, narrow = reader.heads("embed_tokens")  # packing needs room: before all else
    per_layer = None
    if arch.per_layer_input:
        per_layer = TopPerLayer(
            reader.table("embed_tokens_per_layer"),
            reader.linear(["per_layer_model_projection"]),
            reader.vector("per_layer_projection_norm"),
        )
    layers = each(lambda i: layer_weights(reader, arch, i, arch.layers[i]), range(len(arch.layers)))
    return Weights(head, narrow, reader.vector("norm"), tuple(layers), per_layer)


def layer_weights(reader: Reader, arch: Arch, i: int, layer: LayerSpec) -> LayerWeights:
    """Of layer i, by its tensors' names."""
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


def _wide(dtype: str) -> torch.dtype:
    return torch.float32 if dtype == "float32" else torch.bfloat16


def _joined(parts: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _widened(raw: Raw) -> Tensor:
    if isinstance(raw, FourBits):
        return raw.values().float() * raw.row[..., None]
    values, scale = raw
    return values if scale is None else values.float() * scale[..., None]

"""The tensors of a checkpoint's image side: names without the prefix before `vision_tower`,
`vision_embedder` and `embed_vision`, and their shapes. Linear layers are [out, in]."""

from __future__ import annotations

from math import prod

from targets.vision.spec import PROJECTOR, VisionSpec

Shape = tuple[int, ...]
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""Scalars beside each clipped linear layer."""
TOWER = "vision_tower."
EMBEDDER = "vision_embedder."
PATCHES = "patch_embedder.input_proj.weight"
TABLE = "patch_embedder.position_embedding_table"
"""[axis, position, D]; axis 0 is x."""
STD_BIAS = "std_bias"
STD_SCALE = "std_scale"


def vision_tensors(spec: VisionSpec, hidden: int) -> dict[str, Shape]:
    """All of them. hidden: the text model's size."""
    own = _embedder(spec) if spec.tower is None else _tower(spec)
    return own | {PROJECTOR: (hidden, spec.width)}


def vision_values(spec: VisionSpec, hidden: int) -> int:
    """How many values they have."""
    return sum(map(prod, vision_tensors(spec, hidden).values()))


def layer_tensors(spec: VisionSpec) -> dict[str, Shape]:
    """One layer's, as after `vision_tower.encoder.layers.{i}.`."""
    tower, width = spec.tower, spec.width
    assert tower is not None, "an encoder-free form has no layers"
    inner = tower.heads * tower.head_dim
    shapes: dict[str, Shape] = {f"{name}.weight": (width,) for name in NORMS}
    shapes |= {f"self_attn.{x}_norm.weight": (tower.head_dim,) for x in "qk"}
    for name in LINEARS:
        out = {"o_proj": width, "down_proj": width}.get(name.rpartition(".")[2])
        inputs = {"o_proj": inner, "down_proj": tower.ffw}.get(name.rpartition(".")[2], width)
        wide = inner if name.startswith("self_attn") else tower.ffw
        shapes[f"{name}.linear.weight"] = (wide if out is None else out, inputs)
        if tower.clipped:
            shapes |= {f"{name}.{bound}": () for bound in BOUNDS}
    return shapes


def _tower(spec: VisionSpec) -> dict[str, Shape]:
    tower = spec.tower
    assert tower is not None
    shapes: dict[str, Shape] = {
        TOWER + PATCHES: (spec.width, spec.patch_values),
        TOWER + TABLE: (2, spec.places, spec.width),
    }
    for i in range(tower.layers):
        own = layer_tensors(spec).items()
        shapes |= {f"{TOWER}encoder.layers.{i}.{name}": shape for name, shape in own}
    if tower.standardised:
        shapes |= {TOWER + name: (spec.width,) for name in (STD_BIAS, STD_SCALE)}
    return shapes


def _embedder(spec: VisionSpec) -> dict[str, Shape]:
    width, values = spec.width, spec.patch_values
    shapes: dict[str, Shape] = {
        "patch_dense.weight": (width, values),
        "patch_dense.bias": (width,),
        "pos_embedding": (spec.places, 2, width),
    }
    for name, size in (("patch_ln1", values), ("patch_ln2", width), ("pos_norm", width)):
        shapes |= {f"{name}.{part}": (size,) for part in ("weight", "bias")}
    return {EMBEDDER + name: shape for name, shape in shapes.items()}

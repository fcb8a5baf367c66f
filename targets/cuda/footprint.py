"""What a model needs of a GPU, to the byte, before anything is loaded.

Everything that decides a byte is a constant or a one-line rule here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod

from specdec.core.constraint import mask_words
from specdec.core.errors import TooLarge
from specdec.core.pages import PagePlan
from targets.arch import Arch, LayerSpec
from targets.cuda import tiles
from targets.cuda.attention import partial_bytes
from targets.cuda.cache import CHUNK, entries, padded_head, slack_of
from targets.cuda.graphs import BUCKETS, TOKENS, bucket_of, first_rows, padding_of, prompt_graphs
from targets.cuda.int4 import GROUP
from targets.cuda.int8 import WORDS
from targets.cuda.load import SHORT, first_of
from targets.cuda.mapped import page_of
from targets.cuda.plan import FINE
from targets.cuda.prefill_kernels import padded_keys, room_of
from targets.cuda.reader import QUANTISED, quantised
from targets.cuda.tower_graphs import MOST_PATCHES
from targets.cuda.untile import WHOLE_BYTES
from targets.memory import Need, gib, largest
from targets.tensors import TensorSpec, all_tensors
from targets.vision import memory as vision_memory
from targets.vision.spec import VisionSpec

WIDE = {"float32": 4, "bfloat16": 2, "fp8": 2, "fp8-w8a8": 2, "int4": 2}
"""Bytes per value of what stays wide: embeddings, head, router, per-layer inputs."""
LINEAR = {"float32": 4, "bfloat16": 2, "fp8": 1, "fp8-w8a8": 1, "int4": Fraction(9, 16)}
"""int4: with a float16 scale for each group of 32."""
KV = {"float32": 4, "bfloat16": 2, "fp8": 1}
EIGHT = ("fp8", "fp8-w8a8")
"""Dtypes with narrow values of one byte in plain order; 4-bit values have two."""
EXPERTS = 3
"""Dimensions of experts' tensors."""
EMBEDDINGS = ("embed_tokens", "embed_tokens_per_layer", "lm_head")
"""Matrices that prefill does not multiply with, except for the head's last row."""
ALIKE: Mapping[str, str] = {}
"""No tensor has a dtype of its own."""
NORM = SCALE = 4
"""Bytes of a norm's weight and of an output channel's scale: float32."""
LOGIT_COPIES = 3
"""float32 [rows, vocab] at once: logits, their shaped copy, and the sampler's work."""
GATES_AT_ONCE = 3
"""Prefill holds the gate and up rows of a chunk, and their result."""
K_PARTS = tiles.EIGHTHS
"""Most sums of parts of k that a layer's output has before they are added."""
RUNTIME = 768 << 20
"""CUDA context, library handles, compiled kernels, captured graphs."""
KEPT_SHARE = 8
"""Pages leave 1/KEPT_SHARE of the memory beside all else to kept prompts."""
MARGIN = 1 << 30
"""Left free beside all that is counted: for graphs of shapes that have not occurred yet."""


@dataclass(frozen=True)
class TargetShape:
    """What decides the bytes; dtype and kv as in LINEAR and KV, already resolved."""

    slots: int
    max_len: int
    width: int
    """Tokens per row of a verify, K + 1."""
    chunk: int
    """Tokens per prefill call."""
    dtype: str
    kv: str
    copied: bool = False
    """Whether linear layers lie in plain order as well."""
    own: Mapping[str, str] = field(default_factory=dict)
    """dtypes of tensors that have another than `dtype`."""
    vision: VisionSpec | None = None
    """The image side that is loaded too."""
    short: int = SHORT
    """`Plan.short`."""


def need(arch: Arch, shape: TargetShape) -> Need:
    """Bytes for weights, K/V cache and workspace."""
    weights = weight_bytes(arch, shape.dtype, shape.own) + copied_bytes(arch, shape)
    weights += vision_memory.weight_bytes(shape.vision, arch.hidden, WIDE[shape.dtype])
    workspace = _workspace(arch, shape)
    wide = WIDE[shape.dtype]
    workspace += vision_memory.workspace_bytes(shape.vision, wide, captured=MOST_PATCHES)
    workspace += picture_feed_bytes(arch, shape)
    return Need(weights, cache_bytes(arch, shape), workspace)


def weight_bytes(arch: Arch, dtype: str, own: Mapping[str, str] = ALIKE) -> int:
    """Bytes of all weights in their form on the device."""
    tensors = all_tensors(arch).items()
    sizes = (tensor_bytes(name, spec, own.get(name, dtype)) for name, spec in tensors)
    return head_scale_bytes(arch, dtype) + sum(sizes)


def copied_bytes(arch: Arch, shape: TargetShape) -> int:
    """Bytes of the linear layers' copies in plain order, if there are any."""
    return plain_bytes(arch, shape.dtype, shape.own) if shape.copied else 0


def plain_bytes(arch: Arch, dtype: str, own: Mapping[str, str] = ALIKE) -> int:
    """Bytes of the linear layers' values in plain order, as library matmuls read them; 0 for
    tensors that these do not read."""

    def value(name: str, spec: TensorSpec) -> int:
        if not _in_plain_order(name, spec, own.get(name, dtype)):
            return 0
        return 1 if own.get(name, dtype) in EIGHT and quantised(name, spec) else WIDE[dtype]

    tensors = all_tensors(arch).items()
    linear = [
        (name, spec) for name, spec in tensors if len(spec.shape) > 1 and name not in EMBEDDINGS
    ]
    return sum(prod(spec.shape) * value(name, spec) for name, spec in linear)


def _in_plain_order(name: str, spec: TensorSpec, dtype: str) -> bool:
    """Whether long prompts read it so, and not as it is stored, as they do experts of 4 bits."""
    return not (dtype == "int4" and len(spec.shape) == EXPERTS and quantised(name, spec))


def head_scale_bytes(arch: Arch, dtype: str) -> int:
    """Bytes of a certified head beside two per value: a float16 scale for each 32 values, a row's
    power of two and bound (int8.py); 0 for other heads."""
    if dtype == "float32" or arch.vocab % WORDS:
        return 0
    return arch.vocab * (2 * -(-arch.hidden // GROUP) + 2 * SCALE)


def codes_bytes(arch: Arch, dtype: str) -> int:
    """Bytes of a certified head that few rows read: its codes and scales; 0 for other heads."""
    scales = head_scale_bytes(arch, dtype)
    return arch.vocab * arch.hidden + scales if scales else 0


def tensor_bytes(name: str, spec: TensorSpec, dtype: str) -> int:
    """Bytes of one tensor, including its scales."""
    values = prod(spec.shape)
    if len(spec.shape) == 1:
        return NORM * values
    if not quantised(name, spec):
        return WIDE[dtype] * values
    scales = SCALE * values // spec.shape[-1] if dtype in QUANTISED else 0
    return int(LINEAR[dtype] * values) + scales


def cache_bytes(arch: Arch, shape: TargetShape) -> int:
    """Bytes of keys, values and fed tokens, for all slots."""
    slack, first = slack_of(shape.chunk, shape.short), _first_rows(shape)
    fed = 4 * max(shape.max_len + slack, first)
    own = (layer for layer in arch.layers if layer.kv_from is None)
    return shape.slots * (fed + sum(_slot_bytes(layer, shape) for layer in own))


def _slot_bytes(layer: LayerSpec, shape: TargetShape) -> int:
    """Bytes of a slot's keys and values in a layer that has its own."""
    return _held(layer, shape) * _position_bytes(layer, shape)


def _held(layer: LayerSpec, shape: TargetShape) -> int:
    """Entries of a slot."""
    return entries(layer, shape.max_len, slack_of(shape.chunk, shape.short), _first_rows(shape))


def _position_bytes(layer: LayerSpec, shape: TargetShape) -> int:
    """Bytes of a position's keys and values, of all heads."""
    return 2 * layer.kv_heads * padded_head(layer.head_dim) * KV[shape.kv]


def fitted(
    arch: Arch,
    shape: TargetShape,
    free: int,
    drafter: int = 0,
    pages: bool = True,
) -> PagePlan | None:
    """Pages of the cache where the longest text of every slot does not fit into `free` bytes; None
    where it does. drafter: bytes of them that the drafter takes. pages: whether slots may hold
    some. Raises UserError, with what would fit, where one such text and a short one in every other
    slot are too much."""
    needed, free = need(arch, shape), free - drafter
    if needed.total <= free:
        return None
    plan = _paged(arch, shape, free) if pages else None
    if plan is not None:
        return plan
    beside = f" beside {gib(drafter)} for the drafter" if drafter else ""
    raise TooLarge(
        f"this needs {needed} of GPU memory but {gib(free)} are free"
        f"{beside}: {_remedy(arch, shape, free, pages)}"
    )


def _paged(arch: Arch, shape: TargetShape, free: int) -> PagePlan | None:
    """Pages of what is free beside all else, less a part for kept prompts; None where it is too
    little."""
    layers = [layer for layer in arch.layers if layer.kv_from is None and not layer.window]
    growing = sum(_slot_bytes(layer, shape) for layer in layers)
    beside = free - need(arch, shape).total + shape.slots * growing
    page = page_of([padded_head(layer.head_dim) * KV[shape.kv] for layer in layers])
    each = page * sum(_position_bytes(layer, shape) for layer in layers)
    total = (beside - beside // KEPT_SHARE) // each
    longest = max(_held(layer, shape) for layer in layers)
    ahead = max(
        padding_of(shape.short), 2 * shape.width
    )  # a device loop is a cycle ahead of the host
    plan = PagePlan(page, total, ahead, longest, FINE, mapped=True)
    return plan if total >= plan.least(shape.slots) else None


def _remedy(arch: Arch, shape: TargetShape, free: int, pages: bool) -> str:
    def fits(**change: int) -> bool:
        other = replace(shape, **change)
        if need(arch, other).total <= free:
            return True
        return pages and _paged(arch, other, free) is not None

    offers = []
    longest = CHUNK * largest(lambda n: fits(max_len=n * CHUNK), shape.max_len // CHUNK)
    if longest:
        offers.append(f"--max-len {longest}")
    slots = largest(lambda n: fits(slots=n), shape.slots)
    if slots:
        offers.append(f"--slots {slots}")
    if offers:
        return f"{' or '.join(offers)} would fit"
    if shape.dtype not in QUANTISED and need(arch, replace(shape, dtype="fp8")).total <= free:
        return "--dtype fp8 would fit"
    if fits(slots=1, max_len=CHUNK):
        return f"--slots 1 --max-len {CHUNK} would fit"
    return "not even one short sequence fits; free the GPU, or take a larger one or a smaller model"


def _workspace(arch: Arch, shape: TargetShape) -> int:
    """The runtime itself, the logits of a verify and of prompts' graphs, each slot's bias, masks,
    attention's partial results and angles, and a chunk's prefill."""
    rows = bucket_of(shape.slots) * shape.width
    logits = 4 * arch.vocab * (LOGIT_COPIES * rows + shape.slots) + graphs_logit_bytes(arch, shape)
    partial = max(
        partial_bytes(layer, max(rows, shape.short), shape.max_len) for layer in arch.layers
    )
    kinds = {(layer.rope, layer.head_dim) for layer in arch.layers}
    angles = sum(4 * shape.max_len * head_dim for _, head_dim in kinds)
    calls = first_call_bytes(arch, shape) + prefill_bytes(arch, shape)
    return RUNTIME + logits + mask_bytes(arch, shape) + partial + angles + calls


def mask_bytes(arch: Arch, shape: TargetShape) -> int:
    """The masks that graphs of guided cycles keep, each its own: of all batches once, at the full
    depth. Those of further depths and samplers come out of MARGIN."""
    most = bucket_of(shape.slots)
    rows = sum(batch for batch in BUCKETS if batch <= most) * shape.width
    return 4 * mask_words(arch.vocab) * rows


def _first_rows(shape: TargetShape) -> int:
    """`Plan.first_rows`."""
    return first_rows(first_of(shape.dtype), shape.chunk, shape.max_len)


def first_call_bytes(arch: Arch, shape: TargetShape) -> int:
    """What a prompt's first call through decoding's kernels holds at once, in memory that graphs
    keep: the stream, sums of parts of k, the widest input; experts' results; per-layer inputs."""
    widest = max(max(2 * layer.ffw, layer.heads * layer.head_dim) for layer in arch.layers)
    values = (1 + K_PARTS) * arch.hidden + widest
    if arch.moe:
        values += arch.moe.top_k * (arch.hidden + arch.moe.width)
    values += 2 * len(arch.layers) * arch.per_layer_input
    return 4 * _first_rows(shape) * values


def graphs_logit_bytes(arch: Arch, shape: TargetShape) -> int:
    """Logits that prompts' graphs keep: the results of each lie in memory of its own."""
    return 4 * arch.vocab * sum(prompts for prompts, _ in _prompt_graphs(shape))


def graphs_rows(shape: TargetShape) -> int:
    """Rows of which these graphs keep the features, where a head reads them."""
    return sum(prompts * tokens for prompts, tokens in _prompt_graphs(shape))


def _prompt_graphs(shape: TargetShape) -> list[tuple[int, int]]:
    if shape.dtype == "float32":  # references are not captured
        return []
    found = prompt_graphs(shape.slots, _first_rows(shape))
    seeing = [] if shape.vision is None else [graph for graph in found if graph[0] == 1]
    return found + seeing


def picture_feed_bytes(arch: Arch, shape: TargetShape) -> int:
    """What graphs of prompts with pictures, one for each padded length, are fed in place of
    embeddings."""
    if shape.vision is None:
        return 0
    rows = sum(size for size in TOKENS if size <= _first_rows(shape))
    return WIDE[shape.dtype] * rows * arch.hidden


def prefill_bytes(arch: Arch, shape: TargetShape) -> int:
    """What prefill takes: a chunk's widest layer; a long one also needs that layer's weights row by
    row again, all keys and values of a global one, and its scores."""
    chunk = min(shape.chunk, shape.max_len)
    widest = max(max(layer.ffw, layer.heads * layer.head_dim) for layer in arch.layers)
    total = 4 * chunk * (4 * arch.hidden + GATES_AT_ONCE * 2 * widest)
    if chunk <= SHORT:
        return total
    flat = [
        prod(spec.shape)
        for name, spec in all_tensors(arch).items()
        if spec.linear and _in_plain_order(name, spec, shape.own.get(name, shape.dtype))
    ]
    keys = max(layer.kv_heads * layer.head_dim for layer in arch.layers if not layer.window)
    copies = 2 * 2 * padded_keys(shape.max_len) * keys  # K and V of a global layer in rows
    room = 4 * max(room_of(layer, shape.max_len) for layer in arch.layers)
    return total + room + copies + (0 if shape.copied else _gate_and_up(shape.dtype, max(flat)))


def _gate_and_up(dtype: str, values: int) -> int:
    """Bytes of both, of so many values each, in plain order; of 4 bits one at a time where both
    are large."""
    both = 2 * values * (1 if dtype in EIGHT else WIDE[dtype])
    return both // 2 if dtype == "int4" and both > WHOLE_BYTES else both

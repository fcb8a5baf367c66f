"""From a checkpoint folder, or from nothing but an architecture, to a CudaTarget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specdec.core.errors import TooLarge, UserError
from specdec.core.pages import PagePlan
from specdec.core.types import MAX_DRAFT
from targets.arch import Arch, MoeSpec
from targets.checkpoint import Checkpoint
from targets.cuda import four_bits
from targets.cuda.attention import HEADS, reaching_variants
from targets.cuda.cache import padded_head
from targets.cuda.experts import kind_of, most_pairs
from targets.cuda.graphs import MOST_ROWS, TOKENS, bucket_of
from targets.cuda.ops import Ops
from targets.cuda.out_of_memory import catching_oom, use_pages
from targets.cuda.params import copied, load_params, random_params
from targets.cuda.plan import KV_DTYPES, Plan
from targets.cuda.prefill_kernels import FLASH_HEAD_DIM
from targets.cuda.reader import DTYPES, QUANTISED, own_dtypes, quantised
from targets.cuda.reference import Reference
from targets.cuda.target import CudaTarget
from targets.cuda.tower import PictureEncoder, load_vision, vision_dtype
from targets.cuda.w8a8 import WIDEST as WIDEST_INPUT
from targets.model_folder import read_arch
from targets.routing import correlation_for
from targets.tensors import all_tensors
from targets.vision.files import VisionFiles
from targets.vision.spec import VisionSpec

SHORTEST = 16
"""Least context: shorter ones can't even be checked."""
SHORT = 128
"""Tokens that a call of decoding's kernels prefills behind others (`Plan.short`)."""
FIRST = TOKENS[-1]
"""Tokens that a prompt's first call of decoding's kernels prefills (`Plan.first`)."""
FIRST_BF16 = 384
"""The same with weights of 16 bits, with which the library takes less time from there on."""
CHUNKS = {"cuda": 2048, "cpu": SHORT}
"""Tokens per prefill call: enough to be bound by arithmetic, where it matters."""
FP8_ROWS = 64
"""Rows of a verify, slots times K + 1, up to which FP8 files run as fp8 by default: with more,
their inputs are rounded to 8 bits too, as these files prescribe, which then takes less time."""
WIDEST = 8192
"""What a CTA of the norms holds of a row."""
LONGEST = 1_000_000
"""Positions: the kernels' divisions in floats are exact below 2 ** 20, a call's rows included."""


@dataclass(frozen=True)
class CudaOptions:
    """How to run a model with torch. None takes what suits the checkpoint and the device.

    dtype: int4, fp8, fp8-w8a8, bfloat16 or float32. By default a file of 4 bits runs as int4, an
    FP8 one as fp8, or for more than FP8_ROWS rows as fp8-w8a8, any other as bfloat16, and all as
    float32 on a CPU. fp8-w8a8 rounds the inputs
    of linear layers to 8 bits as well: for many rows at once. float32 is for comparing: it runs
    the references, on a GPU too.
    kv_dtype: fp8, bfloat16 or float32; by default as wide as dtype, but bfloat16 beside fp8.
    device: cuda runs the kernels, cpu their references in plain torch.
    """

    slots: int = 4
    max_len: int = 2048
    k: int = 4
    dtype: str | None = None
    kv_dtype: str | None = None
    features: tuple[int, ...] = ()
    device: str = "cuda"
    chunk: int | None = None
    short: int = SHORT
    first: int | None = None
    """`Plan.first`; None: `first_of` on a GPU, else `short`."""
    graphs: bool = True
    """Replay captured CUDA graphs; off to launch kernel by kernel (the text is the same)."""
    prefill_copy: bool = False
    """Keep linear layers in plain order as well, as long prompts are multiplied."""
    routing_overlap: float | None = None
    """For random weights; as in `TargetRequest`."""
    vision: VisionSpec | None = None
    """The checkpoint's image side; None: it is not read."""
    pages: PagePlan | None = None
    """As `Plan.pages`."""


def load_target(path: Path, options: CudaOptions, suppress: tuple[int, ...] = ()) -> CudaTarget:
    """Check, read, place. Raises UserError with one line for anything wrong in the folder or the
    options, and does so before gigabytes are read."""
    arch = read_arch(path)
    checkpoint = Checkpoint(path, arch)
    plan = plan_of(checkpoint, arch, options)
    spec, encoder = options.vision, None
    files = None if spec is None else VisionFiles(path, spec, arch.hidden)
    ops = make_ops(arch, plan, sees=spec is not None)
    with all_or_nothing():
        weights = load_params(checkpoint, arch, plan.dtype, plan.device, ops)
        weights = copied(weights, ops) if options.prefill_copy else weights
        if spec is not None and files is not None:
            seen = load_vision(files, spec, vision_dtype(plan.dtype), plan.device)
            encoder = PictureEncoder(spec, seen, arch.eps)
        graphs = _captures(options, ops)
        return CudaTarget(plan, arch, weights, ops, suppress, graphs, encoder)


def random_target(arch: Arch, options: CudaOptions, seed: int = 0) -> CudaTarget:
    """A model of this architecture with random weights (speed tests)."""
    plan = make_plan(arch, options, "bfloat16")
    ops = make_ops(arch, plan, sees=options.vision is not None)
    with all_or_nothing():
        weights = random_params(arch, plan.dtype, plan.device, ops, seed, plan.correlation)
        weights = copied(weights, ops) if options.prefill_copy else weights
        return CudaTarget(plan, arch, weights, ops, graphs=_captures(options, ops))


@contextmanager
def all_or_nothing() -> Iterator[None]:
    """What a load leaves behind is the target alone. Raises UserError where it has no room: another
    process may have taken what was free when it was checked."""
    try:
        with catching_oom("the weights and the K/V cache"):
            yield
    except MemoryError as problem:
        raise UserError(str(problem)) from problem
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def plan_of(checkpoint: Checkpoint, arch: Arch, options: CudaOptions) -> Plan:
    """`make_plan` for what a checkpoint holds. Raises UserError."""
    plan = make_plan(arch, options, stored_dtype(checkpoint))
    return replace(plan, own=own_dtypes(checkpoint, plan.dtype))


def make_plan(arch: Arch, options: CudaOptions, stored: str) -> Plan:
    """stored: what the checkpoint itself suggests as dtype. Raises UserError."""
    if options.slots < 1:
        raise UserError(f"--slots must be 1 or more, got {options.slots}")
    if not 0 <= options.k <= MAX_DRAFT:
        raise UserError(f"K must be 0 to {MAX_DRAFT}, got {options.k}")
    if not SHORTEST <= options.max_len <= arch.max_position:
        raise UserError(
            f"--max-len must be {SHORTEST} to {arch.max_position} (this model's limit), "
            f"got {options.max_len}"
        )
    if options.device not in CHUNKS:
        raise UserError(f"unknown device {options.device!r}: choose one of {', '.join(CHUNKS)}")
    dtype = options.dtype or _default_dtype(arch, options, stored)
    kv_dtype = options.kv_dtype or ("bfloat16" if dtype in QUANTISED else dtype)
    for name, known in ((dtype, DTYPES), (kv_dtype, tuple(KV_DTYPES))):
        if name not in known:
            raise UserError(f"unknown dtype {name!r}: choose one of {', '.join(known)}")
    if options.device != "cpu" and dtype != "float32":
        _refuse_for_kernels(arch, options, dtype, kv_dtype)
        if dtype == "fp8-w8a8":
            _refuse_for_w8a8(arch)
        _refuse_sizes(arch, dtype)
    return Plan(
        options.slots,
        options.max_len,
        min(options.chunk or CHUNKS[options.device], options.max_len),
        options.short,
        _first(options, dtype),
        dtype,
        kv_dtype,
        options.features,
        options.device,
        correlation=_correlation(arch, options.routing_overlap),
        pages=options.pages,
    )


def _default_dtype(arch: Arch, options: CudaOptions, stored: str) -> str:
    if options.device == "cpu":
        return "float32"
    many = options.slots * (options.k + 1) > FP8_ROWS
    return "fp8-w8a8" if stored == "fp8" and many and _takes_w8a8(arch) else stored


def _first(options: CudaOptions, dtype: str) -> int:
    if options.first is not None:
        return options.first
    return options.short if options.device == "cpu" else first_of(dtype)


def first_of(dtype: str) -> int:
    """`Plan.first` on a GPU."""
    return FIRST if dtype in QUANTISED else FIRST_BF16


def _correlation(arch: Arch, overlap: float | None) -> float:
    return correlation_for(overlap, arch.moe) if arch.moe and overlap is not None else 0.0


def _refuse_for_kernels(arch: Arch, options: CudaOptions, dtype: str, kv_dtype: str) -> None:
    """What only the references can do. Raises UserError."""
    slots = options.slots
    if kv_dtype == "float32":
        raise UserError("the kernels cache no float32: choose --kv-dtype bfloat16 or fp8")
    if slots > MOST_ROWS:
        raise UserError(
            f"--slots must be 1 to {MOST_ROWS} (the largest batch that is captured), got {slots}"
        )
    if options.max_len > LONGEST:
        raise UserError(f"--max-len must be up to {LONGEST} on a GPU, got {options.max_len}")
    if arch.moe:
        _refuse_pairs(arch, arch.moe, options, dtype)
    dims = {layer.head_dim for layer in arch.layers}
    if arch.hidden > WIDEST or any(padded_head(d) not in HEADS or d % 8 for d in dims):
        raise UserError(
            f"the kernels take hidden sizes up to {WIDEST} and heads that fill up to 64, 128, 256 "
            f"or 512, not {arch.hidden} with heads of {sorted(dims)}: run it with --device cpu"
        )
    if options.vision is not None:
        _refuse_pictures(arch, options, options.vision)


def _refuse_pictures(arch: Arch, options: CudaOptions, vision: VisionSpec) -> None:
    """Raises UserError."""
    sliding = [layer.head_dim for layer in arch.layers if layer.sliding]
    if arch.pictures_both_ways and max(sliding, default=0) > FLASH_HEAD_DIM:
        raise UserError(
            f"with pictures the kernels take sliding layers' heads up to {FLASH_HEAD_DIM}, not "
            f"{max(sliding)}: leave them off (--images off)"
        )
    if vision.budget > (options.chunk or CHUNKS["cuda"]):
        raise UserError(
            f"--image-tokens {vision.budget} is more than one prefill call reads "
            f"({options.chunk or CHUNKS['cuda']}): choose fewer"
        )


def _refuse_pairs(arch: Arch, moe: MoeSpec, options: CudaOptions, dtype: str) -> None:
    """Raises UserError for a verify whose rows pick more experts than its kernels can list."""
    pairs = bucket_of(options.slots) * (options.k + 1) * moe.top_k
    most = most_pairs(arch, moe, kind_of(dtype))
    if pairs > most:
        raise TooLarge(
            f"{options.slots} slots at K = {options.k} route {pairs} pairs of row and expert at "
            f"once, the kernels at most {most}: choose fewer --slots or a smaller --k"
        )


def _refuse_sizes(arch: Arch, dtype: str) -> None:
    """The library's matmuls read rows of whole 16 bytes, and of 8-bit weights as many of them.
    Raises UserError: a long prompt would be the first to meet a weight of another size."""
    for name, spec in all_tensors(arch).items():
        if len(spec.shape) < 2 or name == "embed_tokens_per_layer":
            continue
        narrow = dtype in QUANTISED and quantised(name, spec)
        multiple, sizes = (16, spec.shape[-2:]) if narrow else (8, spec.shape[-1:])
        if any(size % multiple for size in sizes):
            raise UserError(
                f"{name} has shape {list(spec.shape)}: with --dtype {dtype} the kernels take "
                f"multiples of {multiple}; try --dtype bfloat16, or --device cpu"
            )


def _refuse_for_w8a8(arch: Arch) -> None:
    """Raises UserError for what its kernels don't fit."""
    if not _takes_w8a8(arch):
        raise UserError(
            f"fp8-w8a8 takes feed-forward and attention widths that are multiples of 8 up to "
            f"{WIDEST_INPUT}, not {', '.join(map(str, sorted(_widths(arch))))}: choose --dtype fp8"
        )


def _takes_w8a8(arch: Arch) -> bool:
    return all(width <= WIDEST_INPUT and width % 8 == 0 for width in _widths(arch))


def _widths(arch: Arch) -> set[int]:
    """Of row_parallel weights' inputs."""
    return {w for layer in arch.layers for w in (layer.ffw, layer.heads * layer.head_dim)}


def make_ops(
    arch: Arch, plan: Plan, kernels: Callable[..., Ops] | None = None, sees: bool = False
) -> Ops:
    """The kernels on the current GPU; plain torch on a CPU, and for float32 anywhere. kernels: of a
    card that has a part of each layer. sees: with those that pictures need."""
    if plan.device == "cpu":
        # rows are computed one by one: threads would wait for each other far longer than they work
        torch.set_num_threads(1)
    else:
        use_pages()
    if plan.device == "cpu" or plan.dtype == "float32":
        return Reference(arch)
    from targets.cuda.kernels import Kernels
    from targets.cuda.prefill_launch import compiled
    from targets.cuda.variants import rounding_variants

    kv = KV_DTYPES[plan.kv_dtype]
    more = rounding_variants(arch.hidden) if plan.dtype == "fp8" else set()
    if sees and arch.pictures_both_ways:
        more |= reaching_variants(arch, int(plan.kv_dtype == "fp8"))
    common = plan.positions, kv, _kinds(arch, plan), more
    ops = Kernels(arch, *common) if kernels is None else kernels(*common)
    compiled(torch.cuda.current_device())  # now, not within the first request
    return ops


def _kinds(arch: Arch, plan: Plan) -> set[str]:
    """The kinds of weights that kernels are needed for: the head and its codes, and others."""
    dtype = plan.dtype
    if dtype not in QUANTISED:
        return {"bf16", "int8"}
    if dtype == "int4":
        return {"bf16", "int8", *four_bits.KINDS} | ({"fp8"} & {*plan.own.values()})
    return {"bf16", "int8", "fp8" if dtype == "fp8" else "w8a8"} | ({"fp8"} if arch.moe else set())


def _captures(options: CudaOptions, ops: Ops) -> bool:
    """Whether operations can be captured: kernels can, references read results on the host."""
    return options.graphs and not isinstance(ops, Reference)


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The default dtype for what the files hold."""
    if checkpoint.has_four_bits:
        return "int4"
    return "fp8" if checkpoint.has_fp8 else "bfloat16"

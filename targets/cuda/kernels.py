"""The operations as launches of our own kernels (`kernels/*.cu`): `ops.Ops` on a Hopper GPU.

Nothing here waits for the device or asks it anything, so that all of it can be captured in a CUDA
graph. Outputs come from torch's allocator; kernels are launched on torch's current stream.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from targets.arch import Arch, LayerSpec, MoeSpec, Rope
from targets.cuda import experts, tiles
from targets.cuda.cache import CHUNK, LayerCache
from targets.cuda.formulas import inverse_frequencies
from targets.cuda.launch import Library, Variant, launch
from targets.cuda.ops import Linear, Rows
from targets.cuda.sampling import Rules

BLOCKS = (8, 16, 32, 64)
"""Tokens per CTA of the skinny GEMM; longer calls take several blocks of the last."""
RING_BYTES = {8: 168 << 10, 16: 168 << 10, 32: 168 << 10, 64: 200 << 10}
PARTS = 8
"""K groups of the weights that `gemm_spread` takes."""
SPREAD_FROM = 32
"""Tokens per CTA from which their inputs cost more than adding up partial sums."""
AHEAD_BYTES = 64 << 10
"""Weights per CTA on their way to L2 before a kernel's inputs are ready."""
THREADS = 256
NORM_THREADS = 512
PARTIAL_BYTES = 256 << 20
"""Most that attention's partial results may take; longer calls are cut by tokens."""


@dataclass(frozen=True)
class Input:
    """A linear layer's input [rows, k] as 16-bit words, blocked (`x_offset` in common.cuh)."""

    data: torch.Tensor
    rows: int
    block: int
    k_blocks: int


class _Gemm(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "x", "out", "inputs")),
        *((name, c_int) for name in ("inputs_stride", "n", "ctas", "tiles", "passes", "steps")),
        *((name, c_int) for name in ("row_groups", "k_groups", "depth", "k_blocks")),
        *((name, c_int) for name in ("stages", "ahead", "rows", "out_stride", "epilogue")),
        ("softcap", c_float),
    )


class _Attention(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "q_norm", "k_norm", "cosine", "sine", "k", "v")),
        *((name, c_void_p) for name in ("q", "start", "slot", "partial", "weight")),
        *((name, c_int) for name in ("stride", "tokens", "group", "kv_heads", "head_dim")),
        *((name, c_int) for name in ("entries", "window", "chunks", "own", "k_eq_v")),
        ("eps", c_float),
    )


class _Untile(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tiled", "out")),
        *((name, c_int) for name in ("n", "k", "passes", "tiles", "row_groups", "k_groups")),
        *((name, c_int) for name in ("wide", "depth", "gated", "fp8")),
    )


class _Choose(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "bias", "history", "start", "slot")),
        *((name, c_void_p) for name in Rules._fields),
        *((name, c_void_p) for name in ("counts", "chosen")),
        *((name, c_int) for name in ("vocab", "stride", "tokens", "shaped")),
    )


PLAIN, GATED, LOGITS, PER_LAYER = range(4)
CLUSTER = 8
"""CTAs that choose one row's token together."""
CHOOSE, CYCLE, UNTILE = Variant("choose"), Variant("cycle"), Variant("untile")


class Kernels:
    """`ops.Ops` for one architecture on the current device."""

    def __init__(self, arch: Arch, max_len: int, kv: torch.dtype, kinds: set[str]) -> None:
        self.arch, self.positions = arch, max_len
        self.kv8 = int(kv == torch.float8_e4m3fn)
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.zeros(1, device=self.device)  # torch makes the context that modules are loaded into
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._scratch = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.library = Library(variants(arch, self.kv8, kinds))
        self._rope: dict[tuple[Rope, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in arch.layers:
            self._rope.setdefault(
                (layer.rope, layer.head_dim),
                _rope_tables(layer.rope, layer.head_dim, max_len, self.device),
            )

    def pack(
        self, values: torch.Tensor, scale: torch.Tensor | None, kind: str, layout: str
    ) -> Linear:
        if kind == "fp8":
            assert scale is not None
            scale = (scale.float() * tiles.ACTIVATION_SCALE).contiguous()
        n, k = values.shape[-2:]
        data = tiles.tile(values, kind, layout, self.processors)
        return Linear(n, k, kind, data, scale, layout)

    def dense(self, weight: Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
        plan, fp8 = tiles.schedule_of(weight, self.processors), weight.kind == "fp8"
        assert weight.k % 8 == 0, weight.k
        count = len(weight.data) if weight.layout.startswith("experts") else 1
        size = count * weight.n * weight.k * tiles.VALUE_BYTES[weight.kind]
        if len(self._scratch) < size:
            self._scratch = torch.empty(0)  # the old one goes before the new one comes
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
        job = _Untile(
            *map(_address, (weight.data, self._scratch)),
            *(weight.n, weight.k, plan.passes, plan.tiles),
            *(plan.row_groups, plan.k_groups, plan.wide, plan.depth),
            *(int(weight.layout.endswith("gated")), int(fp8)),
        )
        grid = (plan.ctas, plan.steps, count * plan.passes)
        self._launch(UNTILE, "untile", grid, THREADS, [job], early=False)
        values = self._scratch[:size].view(torch.float8_e4m3fn if fp8 else torch.bfloat16)
        scale = None if weight.scale is None else weight.scale.flatten() / tiles.ACTIVATION_SCALE
        return values.view(-1, weight.k), scale

    def embed(self, table: torch.Tensor, rows: Rows) -> torch.Tensor:
        m, hidden = rows.tokens.numel(), self.arch.hidden
        h = self._new(m, hidden)
        factor = float(torch.tensor(hidden**0.5).to(table.dtype))
        arguments = [_p(table), _p(rows.tokens), _p(h), c_int(hidden), c_int(self.arch.vocab)]
        # the first kernel of a call: everything before it has ended when it starts
        self._launch(
            _norm("bf16"),
            "embed",
            (m, 1, 1),
            NORM_THREADS,
            [*arguments, c_float(factor)],
            early=False,
        )
        return h

    def norm(
        self,
        h: torch.Tensor,
        branch: torch.Tensor | None,
        post: torch.Tensor | None,
        scalar: torch.Tensor | None,
        pre: torch.Tensor | None,
        kind: str,
    ) -> Input:
        m, hidden = h.shape
        x = self._input(m, hidden)
        arguments = [_p(t) for t in (h, branch, post, scalar, pre, x.data)]
        arguments += [c_int(hidden), c_float(self.arch.eps), c_int(x.k_blocks), c_int(x.block)]
        self._launch(_norm(kind), "add_norm", (m, 1, 1), NORM_THREADS, arguments)
        return x

    def linear(self, x: Input, weight: Linear) -> torch.Tensor:
        plan = tiles.schedule_of(weight, self.processors)
        whole = plan.row_groups == plan.passes == 1 and plan.k_groups == PARTS
        if x.block >= SPREAD_FROM and whole and weight.n % 4 == 0:
            return self._spread(x, weight, plan)
        out = self._new(x.rows, weight.n)
        self._gemm(x, weight, out, PLAIN, weight.n)
        return out

    def gated(self, x: Input, gate_up: Linear, kind: str) -> Input:
        out = self._input(x.rows, gate_up.n // 2)
        self._gemm(x, gate_up, out.data, GATED, out.k_blocks)
        return out

    def gated_per_layer(
        self, x: Input, gate: Linear, inputs: torch.Tensor, layer: int, kind: str
    ) -> Input:
        out = self._input(x.rows, gate.n)
        mine = inputs[:, layer * gate.n :]
        self._gemm(x, gate, out.data, PER_LAYER, out.k_blocks, mine)
        return out

    def head(self, x: Input, table: Linear, softcap: float | None) -> torch.Tensor:
        out = self._new(x.rows, table.n)
        self._gemm(x, table, out, LOGITS if softcap else PLAIN, table.n, softcap=softcap or 0.0)
        return out

    def choose(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor,
        rules: Rules,
        history: torch.Tensor,
        rows: Rows,
        shaped: bool,
    ) -> torch.Tensor:
        batch, tokens, vocab = logits.shape
        m = batch * tokens
        chosen = torch.empty((batch, tokens), dtype=torch.int32, device=self.device)
        counts = torch.empty((m, vocab) if shaped else 0, dtype=torch.int32, device=self.device)
        job = _Choose(
            *map(_address, (logits, bias, history, rows.start, rows.slot, *rules)),
            *map(_address, (counts, chosen)),
            *(vocab, history.stride(0), tokens, int(shaped)),
        )
        share = (vocab + 4 * CLUSTER - 1) // (4 * CLUSTER) * 4
        self._launch(CHOOSE, "choose", (m * CLUSTER, 1, 1), 1024, [job], 4 * share)
        return chosen

    def attention(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor | None,
        layer: LayerSpec,
        cache: LayerCache,
        rows: Rows,
        kind: str,
    ) -> Input:
        batch, tokens = rows.tokens.shape
        x = self._input(batch * tokens, layer.heads * layer.head_dim)
        step = self._tokens_at_once(batch, tokens, layer)
        for t in range(0, tokens, step):
            part = min(step, tokens - t)
            start = rows.start + t if t else rows.start
            arguments = (q_norm, k_norm, layer, cache, kind)
            self._attend(qkv[t:] if t else qkv, start, rows.slot, batch, part, t, x, *arguments)
        return x

    def per_layer_inputs(
        self,
        h: torch.Tensor,
        mixed: torch.Tensor,
        table: torch.Tensor,
        norm: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        arch, m = self.arch, len(mixed)
        width, layers = arch.per_layer_input, len(arch.layers)
        out = self._new(m, layers * width)
        factors = [float(torch.tensor(v).to(table.dtype)) for v in (arch.hidden**-0.5, width**0.5)]
        arguments = [_p(t) for t in (mixed, table, norm, rows.tokens, out)]
        arguments += [c_int(layers), c_int(width), c_int(arch.per_layer_vocab), c_float(arch.eps)]
        arguments += [c_float(factor) for factor in factors]
        self._launch(_norm("bf16"), "per_layer_inputs", (m, -(-layers // 8), 1), THREADS, arguments)
        return out

    def route(
        self,
        h: torch.Tensor,
        scale: torch.Tensor,
        proj: Linear,
        per_expert: torch.Tensor,
        moe: MoeSpec,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.linear(self.norm(h, None, None, None, scale, proj.kind), proj)
        return experts.pick(self._launch, logits, per_expert, moe, self.arch.hidden**-0.5)

    def experts(
        self,
        x: Input,
        chosen: tuple[torch.Tensor, torch.Tensor],
        gate_up: Linear,
        down: Linear,
        moe: MoeSpec,
    ) -> torch.Tensor:
        return experts.run(self._launch, x, chosen, gate_up, down)

    def join(
        self,
        dense: torch.Tensor,
        dense_norm: torch.Tensor,
        routed: torch.Tensor,
        routed_norm: torch.Tensor,
    ) -> torch.Tensor:
        m, hidden = dense.shape
        out = self._new(m, hidden)
        arguments = [_p(t) for t in (dense, dense_norm, routed, routed_norm, out)]
        arguments += [c_int(hidden), c_float(self.arch.eps)]
        self._launch(_norm("bf16"), "join", (m, 1, 1), NORM_THREADS, arguments)
        return out

    def _gemm(
        self,
        x: Input,
        weight: Linear,
        out: torch.Tensor,
        epilogue: int,
        stride: int,
        inputs: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> None:
        plan = tiles.schedule_of(weight, self.processors)
        stages, shared, ahead = _ring(plan, weight.kind, x.block)
        job = _Gemm(
            *map(_address, (weight.data, weight.scale, x.data, out, inputs)),
            0 if inputs is None else inputs.stride(0),
            *(weight.n, plan.ctas, plan.tiles, plan.passes, plan.steps),
            *(plan.row_groups, plan.k_groups, plan.depth, x.k_blocks),
            *(stages, ahead, x.rows, stride, epilogue, softcap),
        )
        grid = (plan.ctas, -(-x.rows // x.block), 1)
        variant = _gemm(weight.kind, x.block, plan.wide)
        self._launch(variant, "gemm", grid, 32 * (plan.warps + 1), [job], shared)

    def _spread(self, x: Input, weight: Linear, plan: tiles.Schedule) -> torch.Tensor:
        """As `_gemm`, bit for bit, with the k groups spread over CTAs: many tokens' inputs are
        then read once for eight CTAs."""
        rows, n = x.rows, weight.n
        partial, out = self._new(PARTS, rows, n), self._new(rows, n)
        stage = plan.step_bytes(weight.kind) + plan.depth * x.block * 2 * tiles.INPUTS
        stages = min(RING_BYTES[x.block] // stage, plan.steps)
        job = _Gemm(
            *map(_address, (weight.data, weight.scale, x.data, partial, None)),
            *(0, n, plan.ctas, plan.tiles, plan.passes, plan.steps),
            *(plan.row_groups, plan.k_groups, plan.depth, x.k_blocks),
            *(stages, 0, rows, n, PLAIN, 0.0),
        )
        grid = (-(-plan.ctas // PARTS) * PARTS, -(-rows // x.block), 1)
        variant, shared = _gemm(weight.kind, x.block, plan.wide), stages * (stage + 16)
        self._launch(variant, "gemm_spread", grid, 32 * (PARTS + 1), [job], shared)
        arguments = [*map(_p, (partial, weight.scale, out)), c_int(rows), c_int(n)]
        self._launch(variant, "gather", (-(-n // 1024), rows, 1), THREADS, arguments)
        return out

    def _attend(
        self,
        qkv: torch.Tensor,
        start: torch.Tensor,
        slot: torch.Tensor,
        batch: int,
        tokens: int,
        first: int,
        x: Input,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor | None,
        layer: LayerSpec,
        cache: LayerCache,
        kind: str,
    ) -> None:
        dim, group = _padded(layer.head_dim), layer.heads // layer.kv_heads
        rows, chunks = tokens * group, self._chunks(tokens, layer)
        q = torch.empty(batch * layer.kv_heads * rows * dim, dtype=torch.int16, device=self.device)
        partial = self._new(batch * layer.kv_heads, chunks, rows, dim)
        weight = self._new(batch * layer.kv_heads, chunks, rows, 2)
        cosine, sine = self._rope[layer.rope, layer.head_dim]
        window = layer.window or 0
        job = _Attention(
            *map(_address, (qkv, q_norm, k_norm, cosine, sine, cache.k, cache.v)),
            *map(_address, (q, start, slot, partial, weight)),
            *(qkv.stride(0), tokens, group, layer.kv_heads, layer.head_dim, cache.size, window),
            *(chunks, int(layer.kv_from is None), int(layer.k_eq_v), self.arch.eps),
        )
        high = 1 if rows <= 16 else 2
        variant = _attend(dim, high, self.kv8, kind)
        vectors = layer.heads + (layer.kv_heads if layer.kv_from is None else 0)
        # a later part's starts were computed just now: it can't overtake that
        grid = (batch * tokens, -(-vectors // 8), 1)
        self._launch(variant, "prepare", grid, THREADS, [job], early=not first)
        grid = (chunks, layer.kv_heads, batch * -(-rows // (16 * high)))
        self._launch(variant, "attend", grid, THREADS, [job], _attend_shared(dim, high))
        arguments: list[Any] = [*map(_p, (partial, weight, start, slot, x.data))]
        arguments += map(c_int, (tokens, group, layer.kv_heads, layer.head_dim, window, chunks))
        arguments += map(c_int, (x.k_blocks, x.block, first))
        grid = (batch * tokens, layer.heads, 1)
        self._launch(variant, "combine", grid, dim, arguments)

    def _chunks(self, tokens: int, layer: LayerSpec) -> int:
        """Most chunks that a call of this many tokens per sequence can see."""
        every = -(-self.positions // CHUNK)
        return min(every, (layer.window + tokens - 2) // CHUNK + 2) if layer.window else every

    def _tokens_at_once(self, batch: int, tokens: int, layer: LayerSpec) -> int:
        """All of them, unless a lone sequence's partial results would grow too large."""
        if batch > 1:
            return tokens
        per_token = self._chunks(tokens, layer) * layer.heads * _padded(layer.head_dim) * 4
        return max(1, min(tokens, PARTIAL_BYTES // per_token))

    def _input(self, rows: int, k: int) -> Input:
        block = next((b for b in BLOCKS if rows <= b), BLOCKS[-1])
        k_blocks = tiles.padded_inputs(k) // 32
        size = (-(-rows // block), k_blocks, block, 32)
        # inputs that only pad k meet weights of zero, and must not be NaN
        make = torch.empty if k % tiles.INPUT_ALIGN == 0 else torch.zeros
        data = make(size, dtype=torch.int16, device=self.device)
        return Input(data, rows, block, k_blocks)

    def _new(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _launch(
        self,
        variant: Variant,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: list[Any],
        shared: int = 0,
        early: bool = True,
    ) -> None:
        kernel = self.library.kernel(variant, name)
        stream = torch.cuda.current_stream().cuda_stream
        launch(kernel, grid, threads, arguments, stream, shared, early)

    def draft(
        self,
        history: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        k: int,
        lengths: tuple[int, int],
    ) -> tuple[torch.Tensor, Rows]:
        """Prompt lookup in each slot's text, and the verify that it leads to. state: length and
        live [slots]; lengths: the shortest and longest suffix, the longest 0 for no guesses."""
        batch = len(slots)
        make = lambda *shape: torch.empty(shape, dtype=torch.int32, device=self.device)  # noqa: E731
        guesses, rows = make(batch, k), Rows(make(batch, k + 1), make(batch), make(batch))
        tensors = (history, *state, slots, guesses, rows.tokens, rows.start, rows.slot)
        arguments = [*map(_p, tensors), *map(c_int, (history.stride(0), k, *lengths))]
        self._launch(CYCLE, "draft", (batch, 1, 1), 1024, arguments, early=False)
        return guesses, rows

    def commit(
        self,
        history: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        rows: Rows,
        chosen: torch.Tensor,
        accepted: torch.Tensor,
        limits: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Append chosen[: accepted + 1] to the texts, end what has come to its end; `accepted`
        [B] int32 becomes SAT_OUT where a row did not run. limits: stop ids [slots, 16], longest."""
        batch, tokens = chosen.shape
        tensors = (history, *state, rows.slot, chosen, accepted, *limits)
        arguments = [*map(_p, tensors), *map(c_int, (batch, history.stride(0), tokens))]
        self._launch(CYCLE, "commit", (-(-batch // 128), 1, 1), 128, arguments)


def stream_bandwidth(size: int = 16 << 30) -> float:
    """Bytes per second of a plain read of `size` bytes, the best of ten."""
    data = torch.empty(size, dtype=torch.uint8, device="cuda")
    variant = Variant("stream")
    kernel = Library({variant}).kernel(variant, "stream")
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    data.view(torch.int32).random_()
    best = float("inf")
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        stream = torch.cuda.current_stream().cuda_stream
        arguments = [_p(data), c_size_t(size // 16), _p(out)]
        launch(kernel, (528, 1, 1), 512, arguments, stream, early=False)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return size / best


def variants(arch: Arch, kv8: int, kinds: set[str]) -> set[Variant]:
    """All that this architecture launches with weights of these kinds, and an e4m3 cache or not."""
    needed = {CHOOSE, CYCLE, UNTILE} | experts.variants(arch, kinds)
    for kind in kinds:
        needed |= {_gemm(kind, block, wide) for block in BLOCKS for wide in (1, 2, 3)}
        needed.add(_norm(kind))
        dims = {_padded(layer.head_dim) for layer in arch.layers}
        needed |= {_attend(dim, high, kv8, kind) for dim in dims for high in (1, 2)}
    return needed


def _gemm(kind: str, block: int, wide: int) -> Variant:
    return Variant("gemm", (("FP8", int(kind == "fp8")), ("NT", block // 8), ("TW", wide)))


def _ring(plan: tiles.Schedule, kind: str, block: int) -> tuple[int, int, int]:
    """Stages of the ring, its bytes, and steps to prefetch beyond it. A ring takes most of a
    multiprocessor: two CTAs on one would leave another without any."""
    step = plan.step_bytes(kind)
    stage = step + plan.k_groups * plan.depth * block * 2 * tiles.INPUTS
    stages = max(2, min(RING_BYTES[block] // stage, plan.steps * plan.passes))
    return stages, stages * stage + 16 * stages, AHEAD_BYTES // step


def _norm(kind: str) -> Variant:
    return Variant("norm", (("FP8", int(kind == "fp8")),))


def _attend(dim: int, high: int, kv8: int, kind: str) -> Variant:
    return Variant(
        "attention", (("HD", dim), ("MT", high), ("KV8", kv8), ("FP8", int(kind == "fp8")))
    )


def _attend_shared(dim: int, high: int) -> int:
    rows = 16 * high
    return rows * dim * 2 + rows * (CHUNK + 4) * 4 + rows * CHUNK * 2


def _padded(head_dim: int) -> int:
    return next(dim for dim in (64, 128, 256, 512) if head_dim <= dim)


def _rope_tables(
    rope: Rope, head_dim: int, positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, head_dim / 2] float32; pairs that don't rotate get angle 0."""
    places = torch.arange(positions, device=device, dtype=torch.float32)
    angles = places[:, None] * inverse_frequencies(rope, head_dim, device)[: head_dim // 2]
    return angles.cos(), angles.sin()


@cache
def _null() -> c_void_p:
    return c_void_p(0)


def _p(tensor: torch.Tensor | None) -> c_void_p:
    return _null() if tensor is None else c_void_p(tensor.data_ptr())


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

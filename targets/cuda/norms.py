"""The residual stream's norms as launches of `kernels/norm.cu`: a part of `Kernels`."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p
from typing import Any, NamedTuple

from torch import Tensor

from targets.cuda import tiles
from targets.cuda.exchange import ROWS_AT_ONCE, PartialSum
from targets.cuda.experts import SORTED_BLOCK, Routed, are_sorted
from targets.cuda.inputs import Input, make_input, make_narrow_input
from targets.cuda.launch import Launcher, address, pointer
from targets.cuda.ops import NOTHING, Closing, Opening, Rows
from targets.cuda.variants import ROW_THREADS, norm_variant
from targets.cuda.w8a8 import Parts, as_groups


class _AddNorm(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("h", "post", "scalar", "pre", "x", "scale")),
        *((name, c_int) for name in ("hidden", "k_blocks", "block")),
        ("eps", c_float),
        ("pdl_trigger_late", c_int),
        ("kept", c_void_p),
        ("kept_stride", c_int),
    )


class _Mixture(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("dense_norm", "routed_norm", "parts", "shares", "numbers")),
        ("top_k", c_int),
    )


class _Others(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("router_norm", "experts_norm", "router", "experts")),
        *((name, c_int) for name in ("narrow_router", "narrow_experts")),
    )


class Mixture(NamedTuple):
    """A MoE layer's branch: the dense one and the routed experts, with the norm of each."""

    dense: Tensor | Parts
    dense_norm: Tensor
    routed: Routed
    routed_norm: Tensor


class Norms:
    def __init__(self, launch: Launcher, eps: float) -> None:
        self._launch, self._eps = launch, eps

    def norm(
        self, h: Tensor, opening: Opening, closing: Closing = NOTHING, kept: Tensor | None = None
    ) -> Input:
        """`Ops.norm`."""
        make = make_narrow_input if opening.kind == "w8a8" else make_input
        m, hidden = h.shape
        return self._norm(h, opening, closing, make(m, hidden, h.device), kept)

    def _norm(
        self, h: Tensor, opening: Opening, closing: Closing, x: Input, kept: Tensor | None
    ) -> Input:
        m, hidden = h.shape
        name, branch = _added(closing.branch)
        pdl_trigger_late = isinstance(closing.branch, Mixture) and _pdl_trigger_late(opening)
        job = self._job(h, opening, closing, x, pdl_trigger_late)
        if kept is not None:
            job.kept, job.kept_stride = kept.data_ptr(), kept.stride(0)
        ranks = closing.branch.ranks if isinstance(closing.branch, PartialSum) else 1
        variant = norm_variant(opening.kind, hidden, ranks)
        if isinstance(closing.branch, PartialSum) and m > ROWS_AT_ONCE:
            ahead = [job, closing.branch.job()]
            self._launch(variant, "send_rows", (m, 1, 1), ROW_THREADS, ahead)
            branch = [closing.branch.job(sent=True)]
        self._launch(variant, name, (m, 1, 1), ROW_THREADS, [job, *branch])
        return x

    def norm_moe(
        self,
        h: Tensor,
        openings: tuple[Opening, Opening, Opening],
        rows: Rows,
        closing: Closing = NOTHING,
    ) -> tuple[Input, Input, Input]:
        """`Ops.norm_moe`. One kernel has no scale for w8a8 weights beside others, and one size of
        blocks."""
        dense, router, experts = openings
        m, hidden = h.shape
        if are_sorted(rows.tokens.shape[1], experts.kind):
            x = self.norm(h, dense, closing), self.norm(h, router)
            gathered = make_input(m, hidden, h.device, block=SORTED_BLOCK)
            return *x, self._norm(h, experts, NOTHING, gathered, None)
        if dense.kind == "w8a8":
            return self.norm(h, dense, closing), self.norm(h, router), self.norm(h, experts)
        x, x_router, x_experts = (make_input(m, hidden, h.device) for _ in openings)
        job = _Others(
            router_norm=address(router.pre),
            experts_norm=address(experts.pre),
            router=address(x_router.data),
            experts=address(x_experts.data),
            narrow_router=int(router.kind != "bf16"),
            narrow_experts=int(experts.kind != "bf16"),
        )
        arguments = [
            self._job(h, dense, closing, x, _pdl_trigger_late(dense)),
            pointer(closing.branch),
            job,
        ]
        self._launch(
            norm_variant(dense.kind, hidden), "add_norm_thrice", (m, 1, 1), ROW_THREADS, arguments
        )
        return x, x_router, x_experts

    def _job(
        self, h: Tensor, opening: Opening, closing: Closing, x: Input, pdl_trigger_late: bool
    ) -> _AddNorm:
        return _AddNorm(
            h=address(h),
            post=address(closing.post),
            scalar=address(closing.scalar),
            pre=address(opening.pre),
            x=address(x.data),
            scale=address(x.scale),
            hidden=h.shape[1],
            k_blocks=x.k_blocks,
            block=x.block,
            eps=self._eps,
            pdl_trigger_late=int(pdl_trigger_late),
        )


def _pdl_trigger_late(opening: Opening) -> bool:
    """In a mixture: whether memory stands still for most of a layer. Then what a norm reads comes
    first, and the next kernel's weights later. With more than 4 bits these take longer than that
    (docs/performance.md)."""
    return tiles.BITS[opening.kind] == 4


def _added(branch: Tensor | Parts | Mixture | PartialSum | None) -> tuple[str, list[Any]]:
    """The kernel that adds such a branch, and its arguments after the job."""
    if isinstance(branch, Mixture):
        name, dense = _added(branch.dense)
        routed = branch.routed
        job = _Mixture(
            dense_norm=address(branch.dense_norm),
            routed_norm=address(branch.routed_norm),
            parts=address(routed.parts),
            shares=address(routed.shares),
            numbers=address(routed.numbers),
            top_k=routed.numbers.shape[1],
        )
        return name.replace("add_norm", "add_norm_mixture"), [*dense, job]
    if isinstance(branch, Parts):
        return "add_norm_groups", [as_groups(branch)]
    if isinstance(branch, PartialSum):
        return "add_norm_exchange", [branch.job()]
    return "add_norm", [pointer(branch)]

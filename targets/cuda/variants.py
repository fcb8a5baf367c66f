"""The kernels that an architecture needs: a start compiles them, or finds them in the cache."""

from __future__ import annotations

from targets.arch import Arch
from targets.cuda import attention, candidates, experts, gemm, sampler, untile, w8a8
from targets.cuda.launch import Variant

ROW_THREADS = 512
"""Threads of a CTA with a row of the residual stream, four values at a time."""


def variants(arch: Arch, kv8: int, kinds: set[str]) -> set[Variant]:
    """All that this architecture launches with weights of these kinds, and an e4m3 cache or not."""
    parts = (
        gemm.variants(kinds),
        untile.variants(kinds),
        w8a8.variants() if "w8a8" in kinds else set(),
        attention.variants(arch, kv8),
        experts.variants(arch, kinds - {"w8a8", "int8"}),
    )
    certified = {candidates.SCREEN, candidates.RESCORE} if "int8" in kinds else set()
    norms = {norm_variant(kind, arch.hidden) for kind in kinds}
    return {sampler.SAMPLE, sampler.CYCLE, *certified, *norms}.union(*parts)


def rounding_variants(hidden: int) -> set[Variant]:
    """What a prefill call of more than `plan.FINE` tokens needs beside FP8's own kernels: for all
    rows, and for the last one of each prompt."""
    return w8a8.variants() | {norm_variant("w8a8", hidden)}


def norm_variant(kind: str, hidden: int, ranks: int = 1) -> Variant:
    """What feeds weights of this kind from a stream of this width. ranks: cards whose sums it
    adds."""
    kinds = ("FP8", int(kind != "bf16")), ("W8A8", int(kind == "w8a8"))
    common = *kinds, ("QUADS_PER_THREAD", -(-hidden // (4 * ROW_THREADS)))
    if ranks == 1:
        return Variant("norm", common)
    return Variant("norm_exchange", (*common, ("RANKS", ranks)))

"""The CUDA backend: our kernels on one Hopper GPU, or their torch references on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.core.config import Loop, ModelConfig
from specdec.core.errors import UserError
from specdec.core.protocols import Cycle
from specdec.core.script import Script
from specdec.core.types import Check
from targets.backend import TargetRequest

if TYPE_CHECKING:
    import numpy as np

    from specdec.core.pages import PagePlan
    from targets.arch import Arch
    from targets.cuda.cards import CardsTarget, OnCards
    from targets.cuda.device_drafter import DeviceDrafter
    from targets.cuda.footprint import TargetShape
    from targets.cuda.load import CudaOptions
    from targets.cuda.plan import Plan
    from targets.cuda.target import CudaTarget


class CudaBackend:
    def refuse(self, config: ModelConfig, loop: Loop | None = None) -> None:
        if config.tp != 1 and _asks_the_host(config):
            raise UserError("--tp with cuda needs GPUs: the references run on one device")
        if config.tp != 1 and config.prefill_copy:
            raise UserError(
                "--prefill-copy is for one card: several read prompts by decoding's kernels"
            )
        if config.int8:
            raise UserError("--int8 needs --backend jax: with cuda, use --dtype fp8")
        if config.cache is not None:
            raise UserError(
                "--cache needs --backend jax: cuda keeps its kernels in ~/.cache/specdec/kernels"
            )
        if config.prefill_copy and _asks_the_host(config):
            raise UserError(
                "--prefill-copy is for the kernels: the references (--device cpu, --dtype float32) "
                "keep weights in plain order"
            )
        if loop == "device" and _asks_the_host(config):
            raise UserError(
                "--loop device captures CUDA graphs: with --device cpu or --dtype float32 use "
                "--loop host"
            )

    def prepare(self, config: ModelConfig) -> None:
        pass  # kernels are compiled, and kept, as they are needed

    def compiled(self) -> None:
        return None

    def device(self, config: ModelConfig) -> str:
        from targets.cuda.device import device_name

        return device_name(config.device or "cuda")

    def context(
        self, arch: Arch, path: Path | None, config: ModelConfig, request: TargetRequest
    ) -> int:
        _check(config)
        from targets.checkpoint import Checkpoint
        from targets.cuda.footprint import need
        from targets.cuda.load import LONGEST, make_plan, plan_of
        from targets.memory import STEP, default_context, host_free

        shortest = _options(replace(config, max_len=min(arch.max_position, STEP)), request)
        if path is None:
            plan = make_plan(arch, shortest, "bfloat16")
        else:
            plan = plan_of(Checkpoint(path, arch), arch, shortest)
        shape, limit = _shape(shortest, plan, config.tp), arch.max_position
        if shortest.device == "cpu":
            own, free = arch, host_free()
        else:
            own, free = _of_each(arch, shortest, plan, config.tp)
            limit = min(limit, LONGEST)
        if free is not None:
            free -= request.extra_bytes(replace(shape, max_len=arch.max_position))
        return default_context(limit, free, lambda n: need(own, replace(shape, max_len=n)))

    def load(
        self, path: Path, config: ModelConfig, request: TargetRequest
    ) -> CudaTarget | CardsTarget:
        _check(config)
        from targets.checkpoint import Checkpoint
        from targets.cuda.load import load_target, plan_of
        from targets.model_folder import read_arch

        options, arch = _options(config, request), read_arch(path)
        plan = plan_of(Checkpoint(path, arch), arch, options)
        options = replace(options, pages=_pages(arch, options, plan, request, config.tp))
        if config.tp == 1:
            return load_target(path, options, request.suppress)
        from targets.cuda.load_cards import load_cards

        return load_cards(path, options, config.tp, request.suppress)

    def random(
        self, arch: Arch, config: ModelConfig, request: TargetRequest, seed: int = 0
    ) -> CudaTarget | CardsTarget:
        _check(config)
        from targets.cuda.load import make_plan, random_target

        options = _options(config, request)
        plan = make_plan(arch, options, "bfloat16")
        options = replace(options, pages=_pages(arch, options, plan, request, config.tp))
        if config.tp == 1:
            return random_target(arch, options, seed)
        from targets.cuda.load_cards import random_cards

        return random_cards(arch, options, config.tp, seed)

    def exact(self, target: CudaTarget | CardsTarget) -> bool:
        return target.device.type == "cpu"

    def self_check(self, target: CudaTarget | CardsTarget) -> Seqs[Check]:
        from targets.cuda.selfcheck import self_check

        return self_check(target)

    def loops(self, config: ModelConfig) -> Seqs[Loop]:
        return ("host",) if _asks_the_host(config) else ("device", "host")

    def device_loop(
        self,
        target: CudaTarget | CardsTarget,
        drafter: DeviceDrafter | OnCards,
        k: int,
        script: Script | None = None,
    ) -> Cycle:
        from targets.cuda.cards import CardsCycle, CardsTarget, OnCards
        from targets.cuda.device_loop import device_loop

        if isinstance(target, CardsTarget):
            assert isinstance(drafter, OnCards)
            return CardsCycle(target, drafter, k, script)
        assert not isinstance(drafter, OnCards)
        return device_loop(target, drafter, k, script=script)

    def warm(self, target: CudaTarget | CardsTarget) -> tuple[Seqs[int], Seqs[tuple[int, int]]]:
        if self.exact(target):
            return (), ((1, 1),)  # the references are not compiled
        from targets.cuda.graphs import BUCKETS, TOKENS, TOKENS_TOGETHER
        from targets.cuda.plan import CALLS

        plan, slots, fit = target.plan, target.slots, 3 * target.max_len // 4
        long = max(plan.first, CALLS * plan.short) + 1  # the library reads it, on one card
        alone = [(1, n) for n in (*TOKENS, long) if n <= min(fit, long)]
        counts = [2**i for i in range(1, slots.bit_length())]
        several = [
            (count, n)
            for n in TOKENS_TOGETHER
            for count in counts
            if len(target.together([n] * count)) == count and n <= fit
        ]
        batches = {*(b for b in BUCKETS if b < slots), slots} - {1}
        return sorted(batches), [*alone, *several]

    def scorer(self, target: CudaTarget | CardsTarget) -> Callable[[list[int]], np.ndarray]:
        from targets.cuda.score import window_nll

        return partial(window_nll, target)


def _asks_the_host(config: ModelConfig) -> bool:
    """The references do, as they go: nothing that can be captured."""
    return config.device == "cpu" or config.dtype == "float32"


def _check(config: ModelConfig) -> None:
    if config.device != "cpu":
        from targets.cuda.device import check_device

        check_device()


def _pages(
    arch: Arch, options: CudaOptions, plan: Plan, request: TargetRequest, cards: int
) -> PagePlan | None:
    """`footprint.fitted`: refuse before loading what will not fit. A CPU's memory is the system's
    own affair."""
    if options.device == "cpu":
        return None
    from targets.cuda.footprint import fitted

    shape = _shape(options, plan, cards)
    own, free = _of_each(arch, options, plan, cards)
    return fitted(own, shape, free, request.extra_bytes(shape), request.pages)


def _of_each(arch: Arch, options: CudaOptions, plan: Plan, cards: int) -> tuple[Arch, int]:
    """The part of the model that each card has, and the bytes that are free on all of them. Raises
    UserError for cards that aren't there or that can't share the model."""
    from targets.cuda.device import free_bytes

    if cards == 1:
        return arch, free_bytes()
    from targets.cuda.exchange import check_peers, exchange_bytes
    from targets.cuda.load_cards import most_rows
    from targets.cuda.ranks import Rank, refuse_ranks

    refuse_ranks(arch, cards)
    check_peers(range(cards))
    taken = exchange_bytes(cards, most_rows(options), arch.hidden)
    return Rank(0, cards, arch).own, min(map(free_bytes, range(cards))) - taken


def _shape(options: CudaOptions, plan: Plan, cards: int) -> TargetShape:
    from targets.cuda.footprint import TargetShape
    from targets.cuda.load_cards import SHORT

    sizes = plan.slots, plan.max_len, options.k + 1, plan.chunk
    more = options.prefill_copy, plan.own, options.vision
    short = plan.short if cards == 1 else SHORT
    return TargetShape(*sizes, plan.dtype, plan.kv_dtype, *more, short)


def _options(config: ModelConfig, request: TargetRequest) -> CudaOptions:
    from targets.cuda.load import CudaOptions

    assert config.max_len is not None, "Backend.context sets it"
    return CudaOptions(
        slots=config.slots,
        max_len=config.max_len,
        k=request.k,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        features=request.features,
        device=config.device or "cuda",
        prefill_copy=config.prefill_copy,
        routing_overlap=request.routing_overlap,
        vision=request.vision,
    )

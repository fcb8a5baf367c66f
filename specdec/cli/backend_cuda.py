"""The CUDA backend: our kernels on one Hopper GPU, or their torch references on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Rows
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specdec.bench import some_draft
from specdec.cli.config import ModelConfig, SpeculationConfig
from specdec.errors import UserError
from specdec.protocols import Cycle, Drafter
from specdec.types import Array, Check, Sequence

if TYPE_CHECKING:
    import numpy as np

    from drafters.eagle3.cuda.head import HeadModel
    from drafters.eagle3.spec import Head, HeadSpec
    from targets.arch import Arch
    from targets.cuda.device_drafter import Resident
    from targets.cuda.load import CudaOptions
    from targets.cuda.target import CudaTarget

LONG = 256
"""A prompt that is prefilled by the long path, which has programs of its own."""


class CudaBackend:
    def refuse(self, config: ModelConfig) -> None:
        if config.tp != 1:
            raise UserError("--tp needs --backend jax: cuda runs on one GPU")
        if config.int8:
            raise UserError("--int8 needs --backend jax: with cuda, use --dtype fp8")
        if config.cache is not None:
            raise UserError(
                "--cache needs --backend jax: cuda keeps its kernels in ~/.cache/specdec/kernels"
            )

    def prepare(self, config: ModelConfig) -> None:
        pass  # kernels are compiled, and kept, as they are needed

    def compiled(self) -> None:
        return None

    def load(
        self,
        path: Path,
        config: ModelConfig,
        speculation: SpeculationConfig,
        suppress: tuple[int, ...],
        head: HeadSpec | None = None,
    ) -> CudaTarget:
        self._check(config)
        from targets.arch import read_arch
        from targets.cuda.load import load_target, stored_dtype

        options = _options(config, speculation, head)
        self._fit(read_arch(path), options, stored_dtype(path), head)
        return load_target(path, options, suppress)

    def load_draft(self, path: Path, config: ModelConfig, suppress: tuple[int, ...]) -> CudaTarget:
        from targets.arch import read_arch

        return self.load(path, *_drafting(config, read_arch(path)), suppress)

    def random_draft(self, arch: Arch, config: ModelConfig) -> CudaTarget:
        return self.random(arch, *_drafting(config, arch))

    def place_head(self, head: Head, target: CudaTarget) -> HeadModel:
        from drafters.eagle3.cuda.head import HeadModel
        from targets.cuda.room import room_for

        try:
            with room_for("the EAGLE-3 head beside the model"):
                return HeadModel(head, target)
        except MemoryError as problem:
            raise UserError(str(problem)) from problem

    def eagle3(self, head: HeadModel, target: CudaTarget, k: int, greedy: bool) -> Drafter:
        from drafters.eagle3.cuda.drafter import EagleDrafter

        return EagleDrafter(head, k, greedy)

    def random(
        self,
        arch: Arch,
        config: ModelConfig,
        speculation: SpeculationConfig,
        head: HeadSpec | None = None,
    ) -> CudaTarget:
        self._check(config)
        from targets.cuda.load import random_target

        options = _options(config, speculation, head)
        self._fit(arch, options, "bfloat16", head)
        return random_target(arch, options)

    def device(self, config: ModelConfig) -> str:
        from targets.cuda.machine import device_name

        return device_name(config.device or "cuda")

    def exact(self, target: CudaTarget) -> bool:
        return target.device.type == "cpu"

    def self_check(self, target: CudaTarget) -> Rows[Check]:
        from targets.cuda.selfcheck import self_check

        return self_check(target)

    def cycle(
        self, target: CudaTarget, drafter: Drafter, k: int, accepted: Array | None = None
    ) -> Cycle:
        from targets.cuda.device_loop import device_cycle

        return device_cycle(target, _resident(drafter, target), k, accepted)

    def plain(self, target: CudaTarget) -> None:
        return None  # kernels do not pad: the exact one is the fastest

    def warm(self, target: CudaTarget) -> tuple[int, Rows[int]]:
        if self.exact(target):
            return 1, (1,)  # the references are not compiled
        from targets.cuda.graphs import TOKENS

        fit = target.max_len // 2
        return target.slots, (*(n for n in TOKENS if n <= fit), min(LONG, fit))

    def memory(self, target: CudaTarget) -> dict[str, int] | None:
        if target.device.type == "cpu":
            return None
        from targets.cuda.machine import used_bytes
        from targets.cuda.memory import Shape, need

        plan = target.plan
        sizes = plan.slots, plan.max_len, 1, plan.chunk
        counted = need(target.arch, Shape(*sizes, plan.dtype, plan.kv_dtype))
        return {"weights": counted.weights, "cache": counted.cache, "used": used_bytes()}

    def scorer(self, target: CudaTarget) -> Callable[[list[int]], np.ndarray]:
        from targets.cuda.score import window_nll

        return partial(window_nll, target)

    def at_width(self, target: CudaTarget, width: int) -> tuple[CudaTarget, int]:
        return target, width

    def fed_width(self, target: CudaTarget, k: int) -> int:
        return k + 1

    def loops(self, target: CudaTarget) -> Rows[Literal["host", "device"]]:
        from targets.cuda.layers import Reference

        return ("host",) if isinstance(target.ops, Reference) else ("host", "device")

    def loop(self, target: CudaTarget) -> Literal["host", "device"]:
        return self.loops(target)[-1]

    def step_bytes(self, target: CudaTarget, batch: int, width: int, context: int) -> int:
        from targets.cuda.roofline import cache_bytes, weight_bytes

        weights = weight_bytes(target.arch, target.dtype, batch * width)
        return weights + cache_bytes(target.arch, target.kv_dtype, batch, context)

    def read_bandwidth(self, target: CudaTarget) -> float:
        from targets.cuda.roofline import read_bandwidth

        return read_bandwidth(target.device.type)

    def forward_samples(
        self, target: CudaTarget, seqs: Rows[Sequence], width: int
    ) -> list[float] | None:
        if "device" not in self.loops(target) and target.device.type != "cpu":
            return None  # references on a GPU wait for the host: nothing that can be captured
        from targets.cuda.roofline import forward_samples

        rows = target.feed(seqs, some_draft(seqs, width - 1))
        return forward_samples(lambda: target.forward(rows, False), target.device.type)

    def _check(self, config: ModelConfig) -> None:
        if config.device != "cpu":
            from targets.cuda.machine import check_device

            check_device()

    def _fit(self, arch: Arch, options: CudaOptions, stored: str, head: HeadSpec | None) -> None:
        """Refuse before loading what will not fit. A CPU's memory is the system's own affair."""
        if options.device == "cpu":
            return
        from drafters.eagle3.cuda.head import need_bytes
        from targets.cuda.load import make_plan
        from targets.cuda.machine import free_bytes
        from targets.cuda.memory import Shape, check_fits

        plan = make_plan(arch, options, stored)
        sizes = plan.slots, plan.max_len, options.k + 1, plan.chunk
        shape = Shape(*sizes, plan.dtype, plan.kv_dtype)
        check_fits(arch, shape, free_bytes(), need_bytes(head, shape) if head else 0)


def _resident(drafter: Drafter, target: CudaTarget) -> Resident:
    """What the drafter is to the captured cycle."""
    from drafters.eagle3.cuda.drafter import EagleDrafter, EagleOnDevice
    from drafters.model.cuda import ModelOnDevice
    from drafters.model.host import ModelDrafter
    from drafters.ngram.host import NgramDrafter
    from drafters.none.host import NoDrafter
    from targets.cuda.device_drafter import Lookup

    if isinstance(drafter, EagleDrafter):
        return EagleOnDevice(drafter)
    if isinstance(drafter, ModelDrafter):
        return ModelOnDevice(drafter, target)
    if isinstance(drafter, NgramDrafter):
        return Lookup(target, (drafter.n_min, drafter.n_max))
    if isinstance(drafter, NoDrafter):
        return Lookup(target, None)
    raise UserError(
        f"the device loop does not know the drafter {type(drafter).__name__}: use --loop host"
    )


def _drafting(config: ModelConfig, arch: Arch) -> tuple[ModelConfig, SpeculationConfig]:
    """How a draft model runs: no wider than it is fed, in the context that it has."""
    from drafters.model.host import CATCH_UP

    shorter = min(config.max_len, arch.max_position)
    return replace(config, max_len=shorter), SpeculationConfig(k=CATCH_UP - 1)


def _options(
    config: ModelConfig, speculation: SpeculationConfig, head: HeadSpec | None
) -> CudaOptions:
    from targets.cuda.load import CudaOptions

    return CudaOptions(
        slots=config.slots,
        max_len=config.max_len,
        k=speculation.k,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        features=head.layers if head else (),
        device=config.device or "cuda",
    )

"""The JAX backend: CPU, GPU and TPU through XLA."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence as Seqs
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specdec.core.config import Loop, ModelConfig
from specdec.core.errors import UserError
from specdec.core.protocols import Cycle
from specdec.core.script import Script
from specdec.core.types import Check
from targets import mini
from targets.backend import TargetRequest
from targets.checkpoint import Checkpoint
from targets.memory import Need, default_context
from targets.model_folder import read_arch

if TYPE_CHECKING:
    from targets.arch import Arch
    from targets.jax.device_drafter import DeviceDrafter
    from targets.jax.load import JaxOptions
    from targets.jax.target import JaxTarget

log = logging.getLogger("specdec.jax")
NODES = Path("/dev")
"""Where NVIDIA's driver makes a node for each GPU: nvidia0 and so on."""


class JaxBackend:
    def refuse(self, config: ModelConfig, loop: Loop | None = None) -> None:
        if config.dtype in ("fp8", "fp8-w8a8"):
            raise UserError(
                f"--dtype {config.dtype} needs --backend cuda: with jax, --int8 and --dtype int4 "
                "quantise on load"
            )
        if config.int8 and config.dtype == "int4":
            raise UserError("--int8 and --dtype int4 are two ways to quantise: leave one of them")
        if config.kv_dtype == "fp8":
            raise UserError("--kv-dtype fp8 needs --backend cuda: with jax, int8 is as small")
        if config.prefill_copy:
            raise UserError("--prefill-copy needs --backend cuda: jax keeps weights in one order")
        if config.device is not None:
            raise UserError("--device needs --backend cuda: JAX decides that by itself")

    def prepare(self, config: ModelConfig) -> None:
        from targets.jax import compile_cache

        if config.cache is None:
            compile_cache.keep_programs_if_possible()
        else:
            compile_cache.keep_programs(config.cache)
        if config.model not in mini.NAMES:
            _warn_of_unused_gpu()

    def compiled(self) -> tuple[int, int]:
        from targets.jax.compile_cache import programs_so_far

        return programs_so_far()

    def device(self, config: ModelConfig) -> str:
        import jax

        return f"{jax.default_backend()}: {jax.devices()[0].device_kind}"

    def context(
        self, arch: Arch, path: Path | None, config: ModelConfig, request: TargetRequest
    ) -> int:
        import jax

        from targets.jax import memory

        options = _options(replace(config, max_len=1), request)
        # processes of a mesh must not differ, whatever each of them has free
        free = memory.free_bytes() if jax.process_count() == 1 else None
        need = memory.need(arch, options, path and Checkpoint(path, arch))
        return default_context(arch.max_position, free, need)

    def load(self, path: Path, config: ModelConfig, request: TargetRequest) -> JaxTarget:
        from targets.jax.load import load_target

        options, arch = _options(config, request), read_arch(path)
        _check_fits(arch, options, Checkpoint(path, arch))
        return load_target(path, options, request.suppress)

    def random(
        self, arch: Arch, config: ModelConfig, request: TargetRequest, seed: int = 0
    ) -> JaxTarget:
        from targets.jax.load import random_target

        options = _options(config, request)
        _check_fits(arch, options, None)
        return random_target(arch, options, seed)

    def exact(self, target: JaxTarget) -> bool:
        return target.plan.mapped

    def self_check(self, target: JaxTarget) -> Seqs[Check]:
        from targets.jax.selfcheck import self_check

        return self_check(target)

    def loops(self, config: ModelConfig) -> Seqs[Loop]:
        import jax

        # E4B and 12B on one H200: 8 to 14 % faster with one slot, 10 to 16 % with 8
        alone = jax.process_count() == 1
        faster = alone and jax.default_backend() == "gpu"
        return ("device", "host") if faster else ("host", "device")

    def device_loop(
        self, target: JaxTarget, drafter: DeviceDrafter, k: int, script: Script | None = None
    ) -> Cycle:
        from targets.jax.device_loop import device_loop

        return device_loop(target, drafter, k, script=script)

    def warm(self, target: JaxTarget) -> tuple[Seqs[int], Seqs[tuple[int, int]]]:
        return (), ((1, 1),)  # all slots are one program, and chunks are padded to one length

    def scorer(self, target: JaxTarget) -> Callable[[list[int]], np.ndarray]:
        from targets.jax.score import window_nll

        return partial(window_nll, target)


def _check_fits(arch: Arch, options: JaxOptions, checkpoint: Checkpoint | None) -> None:
    """Raise UserError for a model that needs more memory than there is."""
    from targets.jax import memory

    def need(options: JaxOptions) -> Need:
        return memory.need(arch, options, checkpoint)(options.max_len)

    rounded = replace(options, narrow="int4")
    memory.check_fits(arch, need(options), memory.free_bytes(), lambda: need(rounded))


def _options(config: ModelConfig, request: TargetRequest) -> JaxOptions:
    from targets.jax.load import JaxOptions

    assert config.max_len is not None, "Backend.context sets it"
    return JaxOptions(
        slots=config.slots,
        max_len=config.max_len,
        k=request.k,
        width=None if request.exact else request.k + 1,
        dtype=None if config.dtype == "int4" else config.dtype,
        kv_dtype=config.kv_dtype,
        narrow="int4" if config.dtype == "int4" else "int8" if config.int8 else None,
        features=request.features,
        tp=config.tp,
        vision=request.vision,
    )


def _warn_of_unused_gpu() -> None:
    """JAX without its CUDA build computes on the CPU in silence: seconds a token."""
    import jax

    if jax.default_backend() == "cpu" and any(NODES.glob("nvidia[0-9]*")):
        log.warning(
            "an NVIDIA GPU of this machine is not used: a Hopper GPU takes --backend cuda, and any "
            'other one JAX with pip install "jax[cuda13]"'
        )

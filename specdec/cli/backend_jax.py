"""The JAX backend: CPU, GPU and TPU through XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Rows
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from specdec.cli.config import ModelConfig, SpeculationConfig
from specdec.errors import UserError
from specdec.protocols import Cycle, Drafter
from specdec.types import Array, Check, Sequence

if TYPE_CHECKING:
    from drafters.eagle3.spec import Head, HeadSpec
    from targets.arch import Arch
    from targets.jax.device_drafter import Resident
    from targets.jax.load import JaxOptions
    from targets.jax.target import JaxTarget


PROGRAMS = Path.home() / ".cache" / "specdec" / "xla"
"""Where compiled programs are kept unless --cache names a folder."""


class JaxBackend:
    def refuse(self, config: ModelConfig) -> None:
        if config.dtype in ("fp8", "fp8-w8a8"):
            raise UserError(
                f"--dtype {config.dtype} needs --backend cuda: with jax, --int8 quantises on load"
            )
        if config.kv_dtype == "fp8":
            raise UserError("--kv-dtype fp8 needs --backend cuda: with jax, int8 is as small")
        if config.device is not None:
            raise UserError("--device needs --backend cuda: JAX decides that by itself")

    def prepare(self, config: ModelConfig) -> None:
        from targets.jax.compile_cache import keep_programs

        keep_programs(config.cache or PROGRAMS)

    def compiled(self) -> tuple[int, int]:
        from targets.jax.compile_cache import programs_so_far

        return programs_so_far()

    def load(
        self,
        path: Path,
        config: ModelConfig,
        speculation: SpeculationConfig,
        suppress: tuple[int, ...],
        head: HeadSpec | None = None,
    ) -> JaxTarget:
        from targets.jax.load import load_target

        options = _options(config, speculation, head)
        return load_target(path, options, suppress)

    def load_draft(self, path: Path, config: ModelConfig, suppress: tuple[int, ...]) -> JaxTarget:
        from targets.arch import read_arch
        from targets.jax.load import load_target

        return load_target(path, _draft_options(config, read_arch(path)), suppress)

    def random_draft(self, arch: Arch, config: ModelConfig) -> JaxTarget:
        from targets.jax.load import random_target

        return random_target(arch, _draft_options(config, arch), seed=1)

    def place_head(self, head: Head, target: JaxTarget) -> Head:
        return head  # the drafter places it

    def eagle3(self, head: Head, target: JaxTarget, k: int, greedy: bool) -> Drafter:
        from drafters.eagle3.jax.drafter import EagleDrafter

        return EagleDrafter(head, target, k, greedy)

    def random(
        self,
        arch: Arch,
        config: ModelConfig,
        speculation: SpeculationConfig,
        head: HeadSpec | None = None,
    ) -> JaxTarget:
        from targets.jax.load import random_target

        return random_target(arch, _options(config, speculation, head))

    def device(self, config: ModelConfig) -> str:
        import jax

        return f"{jax.default_backend()}: {jax.devices()[0].device_kind}"

    def exact(self, target: JaxTarget) -> bool:
        return target.plan.mapped

    def self_check(self, target: JaxTarget) -> Rows[Check]:
        from targets.jax.selfcheck import self_check

        return self_check(target)

    def cycle(
        self, target: JaxTarget, drafter: Drafter, k: int, accepted: Array | None = None
    ) -> Cycle:
        from targets.jax.device_loop import device_cycle

        assert accepted is None, "the traced loop compares: bench asks the host loop"
        return device_cycle(target, _resident(drafter), k)

    def plain(self, target: JaxTarget) -> JaxTarget:
        """Width 1: the exact one is as wide as the widest verify."""
        from targets.jax.load import narrowed

        return narrowed(target)

    def warm(self, target: JaxTarget) -> tuple[int, Rows[int]]:
        return 1, (1,)  # all slots are one program, and chunks are padded to one length

    def memory(self, target: JaxTarget) -> None:
        return None  # XLA takes most of the device at once: what is in use says nothing

    def scorer(self, target: JaxTarget) -> Callable[[list[int]], np.ndarray]:
        from targets.jax.score import window_nll

        return partial(window_nll, target)

    def at_width(self, target: JaxTarget, width: int) -> tuple[JaxTarget, int]:
        target = self.plain(target) if width == 1 else target
        return target, target.plan.width

    def fed_width(self, target: JaxTarget, k: int) -> int:
        return target.plan.width

    def loops(self, target: JaxTarget) -> Rows[Literal["host", "device"]]:
        return "host", "device"

    def loop(self, target: JaxTarget) -> Literal["host", "device"]:
        import jax

        # E4B and 12B on one H200: 8 to 14 % faster with one slot, 10 to 16 % with 8
        alone = jax.process_count() == 1
        return "device" if alone and jax.default_backend() == "gpu" else "host"

    def step_bytes(self, target: JaxTarget, batch: int, width: int, context: int) -> int:
        from targets.jax.roofline import cache_bytes, weight_bytes

        weights = weight_bytes(target.params, target.arch, batch * width)
        return weights + cache_bytes(target.arch, target.kv_dtype, batch, context)

    def read_bandwidth(self, target: JaxTarget) -> float:
        from targets.jax.roofline import read_bandwidth

        return read_bandwidth()

    def forward_samples(self, target: JaxTarget, seqs: Rows[Sequence], width: int) -> None:
        return None  # XLA's programs return host ids: a step is what can be timed


def _resident(drafter: Drafter) -> Resident:
    """What the drafter is to the traced loop."""
    from drafters.eagle3.jax.drafter import EagleDrafter
    from drafters.model.host import ModelDrafter
    from drafters.model.jax import ModelOnDevice
    from drafters.ngram.host import NgramDrafter
    from drafters.ngram.jax import TracedNgram, TracedNone
    from drafters.none.host import NoDrafter
    from targets.jax.device_drafter import TextOnly

    if isinstance(drafter, EagleDrafter):
        return drafter
    if isinstance(drafter, ModelDrafter):
        return ModelOnDevice(drafter)
    if isinstance(drafter, NgramDrafter):
        return TextOnly(TracedNgram(drafter.n_min, drafter.n_max))
    if isinstance(drafter, NoDrafter):
        return TextOnly(TracedNone())
    raise UserError(
        f"the device loop does not know the drafter {type(drafter).__name__}: use --loop host"
    )


def _draft_options(config: ModelConfig, arch: Arch) -> JaxOptions:
    from drafters.model.host import CATCH_UP

    shorter = min(config.max_len, arch.max_position)
    options = _options(config, SpeculationConfig(), None)
    return replace(options, max_len=shorter, width=CATCH_UP)


def _options(
    config: ModelConfig, speculation: SpeculationConfig, head: HeadSpec | None
) -> JaxOptions:
    from targets.jax.load import JaxOptions

    return JaxOptions(
        slots=config.slots,
        max_len=config.max_len,
        k=speculation.k,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        int8=config.int8,
        features=head.layers if head else (),
        tp=config.tp,
    )

"""The backends' contract: everything in which they differ.

Each backend is a class without state. Its methods import their framework, so that neither is
needed where the other runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seqs
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specdec.core.config import Loop, ModelConfig
from specdec.core.errors import UserError
from specdec.core.pages import Pages
from specdec.core.prefix_cache.snapshots import TargetSnapshots
from specdec.core.protocols import Cycle, Target
from specdec.core.script import Script
from specdec.core.types import Array, Check, Sequence

if TYPE_CHECKING:
    import numpy as np

    from targets.arch import Arch
    from targets.vision.spec import VisionSpec

BACKENDS = {"jax": "targets.jax.backend:JaxBackend", "cuda": "targets.cuda.backend:CudaBackend"}
"""Where each backend's class is. Its module is imported on first use."""


class LoadedTarget(Target, Protocol):
    """A target as loaders use it: more members than the loop needs."""

    @property
    def backend(self) -> str:
        """The name of its backend."""
        ...

    @property
    def vocab(self) -> int: ...

    @property
    def arch(self) -> Arch: ...

    @property
    def dtype(self) -> Any:
        """The type of its arithmetic, as its backend names it."""
        ...

    @property
    def kv_dtype(self) -> Any:
        """The type of cached keys and values."""
        ...

    @property
    def plan(self) -> Any:
        """What it was made for, by the backend's own type; `features` is in each."""
        ...

    @property
    def pages(self) -> Pages | None:
        """Of its K/V; None: each slot has room for the longest text."""
        ...

    @property
    def vision(self) -> VisionSpec | None:
        """The image side that it was loaded with; None: it takes no pictures."""
        ...

    @property
    def identity(self) -> str:
        """What determines its results bit by bit, beside its weights."""
        ...


@dataclass(frozen=True)
class TargetRequest:
    """What a target is loaded for. Written by `specdec.assembly.model`."""

    k: int
    """Most draft tokens that a verify feeds."""
    suppress: tuple[int, ...] = ()
    """Token ids that it never chooses."""
    features: tuple[int, ...] = ()
    """Indices of the layers that return their outputs with each step."""
    routing_overlap: float | None = None
    """For random weights: the share of a verify's picks of experts that repeat (`targets.routing`);
    None: as many as repeat by chance."""
    vision: VisionSpec | None = None
    """The image side that is loaded with it; None: it takes no pictures."""
    exact: bool = True
    """Whether a row must be the same at any width. A draft model need not be exact: it is compiled
    no wider than it is fed."""
    extra_bytes: Callable[[Any], int] = lambda shape: 0
    """Bytes of GPU memory for the drafter, for `targets.cuda.footprint.TargetShape`."""
    pages: bool = True
    """Whether slots may hold pages where the longest text of each has no room. An engine gives back
    the pages of its target alone, not a draft model's."""


class Meter(Protocol):
    """Measurements of a target: for `specdec bench`, and for fast plain decoding."""

    def memory(self) -> dict[str, int] | None:
        """Bytes on the GPU: weights, second copies of weights, cache, and all that is in use; None
        where that is not measurable. Of several cards those of one, the most that is in use on any,
        and their number."""
        ...

    def sizes(self) -> tuple[int, int]:
        """Bytes of the weights, second copies included, and of the KV cache."""
        ...

    def plain(self) -> Any | None:
        """The target of the fastest plain decoding, where that isn't the exact one."""
        ...

    def at_width(self, width: int) -> tuple[Any, int]:
        """The target that feeds `width` tokens per row, and how many it really feeds."""
        ...

    def fed_width(self, k: int) -> int:
        """Tokens per row that decoding with up to k draft tokens feeds."""
        ...

    def step_bytes(self, batch: int, width: int, context: int) -> int:
        """Bytes that one step must read, of weights and of K/V."""
        ...

    def read_bandwidth(self) -> float:
        """Bytes per second that this device reads."""
        ...

    def forward_samples(self, seqs: Seqs[Sequence], draft: Array) -> list[float] | None:
        """Seconds of the forward's device time alone; None where that is not measurable."""
        ...


class Backend(Protocol):
    def refuse(self, config: ModelConfig, loop: Loop | None = None) -> None:
        """Raise UserError for options that make no sense here; imports nothing."""
        ...

    def prepare(self, config: ModelConfig) -> None:
        """Before anything is loaded or compiled. Raises UserError."""
        ...

    def compiled(self) -> tuple[int, int] | None:
        """Programs of this process that the cache had, and that were compiled; None where they
        are not counted."""
        ...

    def device(self, config: ModelConfig) -> str:
        """The device at hand, for people and records."""
        ...

    def context(
        self, arch: Arch, path: Path | None, config: ModelConfig, request: TargetRequest
    ) -> int:
        """Tokens: --max-len where it is not given. path: None for random weights."""
        ...

    def load(self, path: Path, config: ModelConfig, request: TargetRequest) -> Any:
        """The checkpoint's target; `config.max_len` is set. Raises UserError, before gigabytes are
        read."""
        ...

    def random(self, arch: Arch, config: ModelConfig, request: TargetRequest, seed: int = 0) -> Any:
        """A target with random weights. Raises UserError."""
        ...

    def exact(self, target: Any) -> bool:
        """Whether rows are exact by construction: then nothing need be proved."""
        ...

    def self_check(self, target: Any) -> Seqs[Check]:
        """Prove on the device that rows do not depend on place and neighbours."""
        ...

    def loops(self, config: ModelConfig) -> Seqs[Loop]:
        """The drivers that such a target has, the faster one first (as measured: docs/results)."""
        ...

    def device_loop(self, target: Any, drafter: Any, k: int, script: Script | None = None) -> Cycle:
        """The device-resident driver. drafter: what the drafter's folder brings for this backend's
        loop; script: the text that replaces the target's choices (speed tests)."""
        ...

    def warm(self, target: Any) -> tuple[Seqs[int], Seqs[tuple[int, int]]]:
        """What needs programs of its own: batches of more than one row, so many; prompts read
        together, how many and of how many tokens."""
        ...

    def scorer(self, target: Any) -> Callable[[list[int]], np.ndarray]:
        """tokens -> nll [len - 1] in nats (specdec.evaluation.perplexity.Score)."""
        ...


def backend_of(config: ModelConfig, loop: Loop | None = None) -> Backend:
    """The configured backend, with its options checked. Raises UserError."""
    if config.backend not in BACKENDS:
        raise UserError(f"unknown backend {config.backend!r}: choose one of {', '.join(BACKENDS)}")
    backend = _class_of(config.backend)()
    backend.refuse(config, loop)
    return backend


def meter_of(target: LoadedTarget) -> Meter:
    """The `Meter` of this target."""
    return import_module(f"targets.{target.backend}.meter").Meter(target)


def snapshots_of(target: LoadedTarget) -> TargetSnapshots:
    """Copies of this target's slots for the prefix cache."""
    return import_module(f"targets.{target.backend}.snapshots").snapshots_of(target)


def _class_of(name: str) -> type[Backend]:
    module, _, attribute = BACKENDS[name].partition(":")
    return getattr(import_module(module), attribute)

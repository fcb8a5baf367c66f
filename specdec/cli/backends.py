"""Who computes: everything in which the commands' backends differ, behind one contract.

Each backend is a class without state whose methods import their framework, so that neither is
needed where the other runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Rows
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from specdec.cli.config import ModelConfig, SpeculationConfig
from specdec.errors import UserError
from specdec.protocols import Cycle, Drafter, Target
from specdec.types import Check, Sequence

if TYPE_CHECKING:
    import numpy as np

    from drafters.eagle3.spec import Head, HeadSpec
    from targets.arch import Arch


class LoadedTarget(Target, Protocol):
    """What commands know of a target, beyond what the loop does."""

    @property
    def vocab(self) -> int: ...

    @property
    def arch(self) -> Arch: ...


class Backend(Protocol):
    def refuse(self, config: ModelConfig) -> None:
        """Raise UserError for options that make no sense here; imports nothing."""
        ...

    def prepare(self, config: ModelConfig) -> None:
        """Before anything is loaded or compiled. Raises UserError."""
        ...

    def compiled(self) -> tuple[int, int] | None:
        """Programs of this process that the cache had, and that were compiled; None where nobody
        counts."""
        ...

    def load(
        self,
        path: Path,
        config: ModelConfig,
        speculation: SpeculationConfig,
        suppress: tuple[int, ...],
        head: HeadSpec | None = None,
    ) -> Any:
        """The checkpoint's target; head: of the EAGLE-3 head that will read its states. Raises
        UserError, before gigabytes are read."""
        ...

    def load_draft(self, path: Path, config: ModelConfig, suppress: tuple[int, ...]) -> Any:
        """A draft model's target, with as many slots and as much of the context as it takes.
        Raises UserError."""
        ...

    def random_draft(self, arch: Arch, config: ModelConfig) -> Any:
        """A draft model with random weights. Raises UserError."""
        ...

    def place_head(self, head: Head, target: Any) -> Any:
        """An EAGLE-3 head beside its target, as `eagle3` takes it. Raises UserError."""
        ...

    def eagle3(self, head: Any, target: Any, k: int, greedy: bool) -> Drafter:
        """The drafter of an EAGLE-3 head that was placed."""
        ...

    def random(
        self,
        arch: Arch,
        config: ModelConfig,
        speculation: SpeculationConfig,
        head: HeadSpec | None = None,
    ) -> Any:
        """A target with random weights; head as in `load`. Raises UserError."""
        ...

    def device(self, config: ModelConfig) -> str:
        """The device at hand, for people and records."""
        ...

    def exact(self, target: Any) -> bool:
        """Whether rows are exact by construction: then nothing need be proved."""
        ...

    def self_check(self, target: Any) -> Rows[Check]:
        """Prove on the device that rows do not depend on place and neighbours."""
        ...

    def cycle(self, target: Any, drafter: Drafter, k: int, accepted: Any = None) -> Cycle:
        """The device-resident driver of what this drafter does; accepted: counts to take instead
        of comparing (bench)."""
        ...

    def plain(self, target: Any) -> Any | None:
        """The fastest plain decoding, where that isn't the exact one."""
        ...

    def warm(self, target: Any) -> tuple[int, Rows[int]]:
        """Up to how many rows each batch size, and which prompt lengths, need programs."""
        ...

    def memory(self, target: Any) -> dict[str, int] | None:
        """Bytes on the GPU: weights, cache, and all that is in use; None where it can't be told."""
        ...

    def scorer(self, target: Any) -> Callable[[list[int]], np.ndarray]:
        """tokens -> nll [len - 1] in nats (specdec.perplexity.Score)."""
        ...

    def at_width(self, target: Any, width: int) -> tuple[Any, int]:
        """The target that feeds `width` tokens per row, and how many it really feeds."""
        ...

    def fed_width(self, target: Any, k: int) -> int:
        """Tokens per row that decoding with up to k draft tokens feeds."""
        ...

    def loops(self, target: Any) -> Rows[Literal["host", "device"]]:
        """The drivers that it has."""
        ...

    def loop(self, target: Any) -> Literal["host", "device"]:
        """The faster one, as far as was measured (docs/results)."""
        ...

    def step_bytes(self, target: Any, batch: int, width: int, context: int) -> int:
        """What one step must read, of weights and of K/V."""
        ...

    def read_bandwidth(self, target: Any) -> float:
        """Bytes per second that this device reads."""
        ...

    def forward_samples(self, target: Any, seqs: Rows[Sequence], width: int) -> list[float] | None:
        """Seconds of the forward's device time alone; None where it can't be told."""
        ...


def backend_of(config: ModelConfig) -> Backend:
    """The backend that was asked for, its options checked. Raises UserError."""
    from specdec.cli.backend_cuda import CudaBackend
    from specdec.cli.backend_jax import JaxBackend

    known: dict[str, type[Backend]] = {"jax": JaxBackend, "cuda": CudaBackend}
    if config.backend not in known:
        raise UserError(f"unknown backend {config.backend!r}: choose one of {', '.join(known)}")
    backend = known[config.backend]()
    backend.refuse(config)
    return backend

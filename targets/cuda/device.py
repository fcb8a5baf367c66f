"""Whether this machine can run the kernels. No torch at import: a machine without it gets
one line, not a traceback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from specdec.core.errors import UserError

CAPABILITY = (9, 0)
"""Hopper, and nothing else: the binaries are for sm_90a, which no later GPU runs either."""
H200_BYTES_PER_CYCLE = 2432.0
"""What an H200's memory reads in a cycle of its multiprocessors."""


@dataclass(frozen=True)
class Machine:
    """What was found. None where it isn't there."""

    torch: str | None
    cuda: str | None
    """The CUDA that torch was built for."""
    gpu: str | None
    capability: tuple[int, int] = (0, 0)
    missing: tuple[str, ...] = ()
    """Modules that can't be imported."""


def check_device() -> None:
    """Raise UserError where the kernels can't run on this machine."""
    refuse(find_machine())


def refuse(machine: Machine) -> None:
    """One clear line for the first thing that is missing."""
    install = "pip install '.[cuda]' in specdec's clone"
    remedy = "or run with --backend jax"
    if machine.torch is None:
        raise UserError(f"--backend cuda needs torch: {install}, {remedy}")
    if machine.cuda is None:
        raise UserError(f"torch {machine.torch} was built without CUDA: {install}, {remedy}")
    if machine.gpu is None:
        raise UserError(
            f"torch {machine.torch} finds no NVIDIA GPU: check nvidia-smi, {remedy} "
            "(--device cpu runs the slow references)"
        )
    if machine.capability != CAPABILITY:
        has, wants = (".".join(map(str, c)) for c in (machine.capability, CAPABILITY))
        raise UserError(
            f"{machine.gpu} has compute capability {has}, the kernels need {wants} "
            "(Hopper): run with --backend jax"
        )
    if machine.missing:
        raise UserError(f"--backend cuda lacks {', '.join(machine.missing)}: {install}, {remedy}")


def find_machine() -> Machine:
    try:
        torch = import_module("torch")
    except ImportError:
        return Machine(None, None, None)
    gpu, capability = None, (0, 0)
    if torch.version.cuda and torch.cuda.is_available():
        gpu, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    missing = tuple(name for name, loads in PARTS.items() if gpu and not _works(loads))
    return Machine(torch.__version__, torch.version.cuda, gpu, capability, missing)


def _driver() -> Any:
    return import_module("cuda.bindings.driver")


def _compiler() -> Any:
    """The module imports without the library; its version query loads the library too."""
    return import_module("cuda.bindings.nvrtc").nvrtcVersion()


PARTS = {"cuda-bindings": _driver, "NVRTC": _compiler}


def _works(loads: Callable[[], Any]) -> bool:
    try:
        loads()
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def bytes_per_cycle(properties: Any) -> float:
    """Bytes that memory can read per cycle of the multiprocessors' fastest clock, from torch's
    properties of a GPU; an H200's value for virtual GPUs that report no clocks. Results do not
    depend on it."""
    twice_a_cycle = 2 * properties.memory_clock_rate * properties.memory_bus_width / 8
    if not twice_a_cycle or not properties.clock_rate:
        return H200_BYTES_PER_CYCLE
    return twice_a_cycle / properties.clock_rate


def free_bytes(card: int | None = None) -> int:
    """Free memory of this GPU, by default the current one."""
    return import_module("torch").cuda.mem_get_info(card)[0]


def used_bytes(device: Any = None) -> int:
    """Memory of this GPU, by default the current one, that is in use, by all processes."""
    free, total = import_module("torch").cuda.mem_get_info(device)
    return total - free


def device_name(device: str) -> str:
    """As people call it."""
    if device == "cpu":
        return "cpu: torch references"
    return f"cuda: {import_module('torch').cuda.get_device_name()}"

"""Creates an engine's prefix cache and sets its memory budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drafters.kind import PlacedDrafter
from specdec.assembly.model import Model
from specdec.core.config import PrefixConfig
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.types import Sequence
from targets.backend import snapshots_of
from targets.memory import host_free, host_total

GIB = 1 << 30
GRAIN = 64 << 20
"""Host memory is taken in pieces of so many bytes (targets.cuda.host_blocks)."""
HOST_GIB = 8
HOST_SHARE = 4
"""By default the cache takes at most 1/HOST_SHARE of the machine's memory, or of its container's,
and half of what is free."""
UNBOUNDED = 1 << 62


def make_prefix_cache(
    model: Model, placed: PlacedDrafter, drafter: Any, config: PrefixConfig
) -> PrefixCache | None:
    """The engine's prefix cache; None if it is turned off, or if no prompt can be longer than a
    chunk. It gets device memory later, by `grant`. Raises UserError."""
    (host, _), target = host_budget(config), model.target
    if not config.prefix_cache:
        return None
    own = snapshots_of(target)
    if not fits(own.unit, target.max_len):
        return None
    beside = placed.snapshots(drafter, own.unit)
    owners = [own] if beside is None else [own, beside]
    seed = f"{model.name} {target.identity}"
    return PrefixCache(own.unit, owners, SnapshotPool(Budget(device=0, host=host)), seed)


def fits(unit: int, max_len: int) -> bool:
    """Whether a context holds a whole chunk, a token of the prompt behind it, and an answer."""
    return unit + 2 <= max_len


def host_budget(config: PrefixConfig) -> tuple[int, str]:
    """Bytes, and where they came from. Raises UserError."""
    asked = config.cache_ram
    if asked is None:
        free = host_free()
        limits = {"default": HOST_GIB * GIB, "a quarter of all": host_total() // HOST_SHARE}
        if free is not None:
            limits["half of what is free"] = free // 2
        least = min(limits, key=lambda name: limits[name])
        return limits[least] // GRAIN * GRAIN, least
    if not 0 <= asked < 2**20:
        raise UserError(f"--cache-ram must be 0 or more GiB, got {asked:g}")
    return int(asked * GIB) // GRAIN * GRAIN, "as asked"


def warm_prefix_cache(engine: Engine) -> None:
    """Compile what keeping and resuming need: one prompt twice."""
    cache = engine.prefix_cache
    if cache is None:
        return
    budget, cache.pool.budget = cache.pool.budget, Budget(UNBOUNDED, 0)
    for _ in range(2):
        engine.run_to_end([Sequence([2] * (cache.unit + 1), max_tokens=1)])
    cache.clear()
    cache.pool.budget = budget


def grant(engine: Engine, budget: PrefixBudget) -> None:
    """Set the cache's budget: what is spare after warm-up."""
    if engine.prefix_cache is not None:
        engine.prefix_cache.pool.budget = Budget(budget.device, budget.host)


@dataclass(frozen=True)
class PrefixBudget:
    """Sizes and budgets of an engine's prefix cache, as printed at start-up."""

    unit: int
    """Tokens per chunk; prompts are reused in whole chunks."""
    max_len: int
    device: int
    host: int
    host_from: str
    """Where `host` came from."""
    wanted: bool

    def __str__(self) -> str:
        if not self.wanted:
            return "off (--no-prefix-cache)"
        if not fits(self.unit, self.max_len):
            return (
                f"off, for no prompt of a context of {self.max_len} tokens (--max-len) is longer "
                f"than a chunk of {self.unit}"
            )
        host = f"{self.host / GIB:.1f} GiB of host memory (--cache-ram: {self.host_from})"
        device = f"{self.device / GIB:.1f} GiB of device memory and " if self.device else ""
        return f"up to {device}{host}, in chunks of {self.unit} tokens"


def budget_for(model: Model, config: PrefixConfig) -> PrefixBudget:
    """The budget for an engine on this model, by the memory that is free now. Raises UserError."""
    own, longest = snapshots_of(model.target), model.target.max_len
    spare = own.spare_bytes()
    return PrefixBudget(own.unit, longest, spare, *host_budget(config), config.prefix_cache)

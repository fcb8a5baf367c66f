"""How long a step takes on a TPU v6e, from what it moves and computes.

An estimate, not a measurement: memory and matmuls are taken at their data sheet's rates and to
overlap, collectives to hide under nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdec.core.errors import UserError
from targets.jax.traffic import Collective, Traffic


@dataclass(frozen=True)
class Chip:
    """Bytes, bytes per second, operations per second, of one chip; latency of a hop in seconds."""

    memory: int
    bandwidth: float
    flops: float
    link: float
    hop: float


CHIPS = {"v6e": Chip(32 * 10**9, 1.64e12, 918e12, 100e9, 1e-6)}
"""docs.cloud.google.com/tpu/docs/v6e: 32 GB, 1,640 GB/s, 918 TFLOPs in bf16 (int8 weights are
multiplied in bf16), 800 GB/s over 4 links and both directions. A hop's latency is assumed."""


@dataclass(frozen=True)
class Estimate:
    """Seconds."""

    memory: float
    compute: float
    collectives: float

    @property
    def step(self) -> float:
        return max(self.memory, self.compute) + self.collectives


def chip_of(topology: str) -> Chip:
    """The chip of a topology's name. Raises UserError for chips that are not in `CHIPS`."""
    kind = topology.split(":")[0]
    if kind not in CHIPS:
        raise UserError(f"--topology {topology}: known are {', '.join(CHIPS)}, as in v6e:2x2x1")
    return CHIPS[kind]


def estimate(found: Traffic, chip: Chip, devices: int) -> Estimate:
    """The step's parts, on a ring of `devices` chips."""
    moved = collective_seconds(found.collectives, chip, devices)
    return Estimate(found.bytes / chip.bandwidth, found.flops / chip.flops, moved)


def collective_seconds(collectives: Iterable[Collective], chip: Chip, devices: int) -> float:
    """Rings in both directions: a phase sends (n - 1) / n of the result over two links and takes
    n / 2 hops; an all-reduce is two phases."""
    total = 0.0
    for one in collectives:
        phases = 2 if one.kind == "all-reduce" else 1
        sent = one.bytes * (devices - 1) / devices / (2 * chip.link)
        total += one.runs * phases * (sent + devices / 2 * chip.hop)
    return total

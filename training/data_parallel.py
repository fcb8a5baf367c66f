"""Data parallelism: each device takes its share of a batch's rows; weights are on all of them.

XLA adds the gradients up. Their order follows from the number of devices, so a run's bits hold for
one number of them.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specdec.core.errors import UserError
from training.packing import PackedRows


class DataParallel:
    def __init__(self, devices: int, batch: int) -> None:
        """Raises UserError where there are not so many devices, or rows don't divide evenly."""
        if not 1 <= devices <= jax.device_count():
            raise UserError(
                f"--data-parallel-size must be 1 to {jax.device_count()}, the devices that JAX "
                f"sees, got {devices}"
            )
        if batch % devices:
            raise UserError(
                f"the recipe's batch of {batch} rows does not divide among {devices} devices: "
                "choose a --data-parallel-size that divides it"
            )
        self.devices = devices
        mesh = Mesh(np.array(jax.devices()[:devices]), ("rows",))
        self._rows = NamedSharding(mesh, PartitionSpec("rows"))
        self._copies = NamedSharding(mesh, PartitionSpec())

    def copies(self, tree: Any) -> Any:
        """The same on every device."""
        return tree if self.devices == 1 else jax.device_put(tree, self._copies)

    def shares(self, rows: PackedRows) -> PackedRows:
        return rows if self.devices == 1 else jax.device_put(rows, self._rows)

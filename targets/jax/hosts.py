"""Several processes as one machine: `jax.distributed`, met once before anything else of JAX."""

from __future__ import annotations

import threading
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from specdec.core.errors import UserError

PATIENCE = 300
"""Seconds until all processes must have come."""
HEARTBEAT = 30
"""Seconds of silence after which JAX ends all processes."""
SHARED = 512
"""Most bytes that `share` can carry."""


def join(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    timed_out: Callable[[], None],
    patience: int = PATIENCE,
) -> tuple[int, int]:
    """Connect to the other processes -> (this one's index, how many there are).

    All None: JAX reads them from the cluster (Cloud TPU, Slurm, Open MPI). timed_out: called from
    another thread if processes are missing after `patience` seconds; it must end the process,
    because otherwise JAX does, with a stack trace. Raises UserError.
    """
    watch = threading.Timer(patience, timed_out)
    watch.daemon = True
    watch.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=patience + 30,  # `timed_out` comes first
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except (RuntimeError, ValueError) as problem:
        if coordinator is None:
            raise UserError(
                "--coordinator-address auto: JAX finds no cluster here (a Cloud TPU pod, Slurm, "
                "Open MPI): name HOST:PORT, --num-processes and --process-id"
            ) from None
        if "start RPC server" in str(problem):
            raise UserError(
                f"process 0 cannot listen at {coordinator}: choose another port"
            ) from None
        message = str(problem).splitlines()[0]
        raise UserError(f"the processes cannot meet at {coordinator}: {message}") from None
    finally:
        watch.cancel()
    return jax.process_index(), jax.process_count()


def leave() -> None:
    """Disconnect from the other processes, which do the same. A process that ends by a signal runs
    no exit handlers and can't disconnect: JAX then aborts the others."""
    jax.distributed.shutdown()


def check_split(tp: int) -> None:
    """Raise UserError unless the model is split over all devices: a process that holds no part
    could not take part."""
    if tp != jax.device_count():
        raise UserError(
            f"--tp must be {jax.device_count()}: {jax.process_count()} processes of "
            f"{jax.local_device_count()} devices each, all of which hold a part; got {tp}"
        )


def share(message: bytes) -> bytes:
    """Process 0's message, in every process. Others may pass anything."""
    padded = np.zeros(SHARED, np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    length, text = multihost_utils.broadcast_one_to_all((np.int32(len(message)), padded))
    return bytes(text[: int(length)])

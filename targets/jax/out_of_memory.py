"""Running out of a device's memory: JAX has a word for it. A copy may fail alone: nothing depends
on it. A program that is given the cache to write to may have lost it when it fails: that ends the
engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

EXHAUSTED = "RESOURCE_EXHAUSTED"


@contextmanager
def catching_oom(what: str) -> Iterator[None]:
    """Raise MemoryError, which names `what`, where a device has no room for it. Of several
    processes none does: each must go the same way, and only one may be short of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as problem:
        if EXHAUSTED not in str(problem) or jax.process_count() > 1:
            raise
        raise MemoryError(
            f"the device has no room for {what}: start with a smaller --max-len or fewer --slots"
        ) from problem

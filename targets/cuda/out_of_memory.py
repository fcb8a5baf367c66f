"""Running out of GPU memory: torch, the driver and libraries report it in different ways. It fails
the request that needed the memory, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def use_pages() -> None:
    """Let torch's memory on the GPU grow and shrink by pages. It takes it in blocks otherwise, of
    which those that something small still lies in are lost: 0.4 GiB after a long prompt of 31B.
    torch has no public name for it but an environment variable."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


@contextmanager
def catching_oom(what: str) -> Iterator[None]:
    """Raise MemoryError, which names `what`, where the GPU has no room for it. What torch keeps for
    reuse is given back: graphs and kernels are not made of torch's memory."""
    try:
        yield
    except RuntimeError as problem:
        if not ran_out(problem):
            raise
        torch.cuda.empty_cache()
        raise MemoryError(
            f"the GPU has no room for {what}: start with a smaller --max-len or fewer --slots"
        ) from problem


def ran_out(problem: BaseException | None) -> bool:
    """Whether memory is behind an error. torch has a class for it, driver and libraries have words,
    and a capture that ended early reports that instead: its cause is what it came from."""
    while problem is not None:
        message = str(problem).lower().replace("_", " ")
        if isinstance(problem, torch.cuda.OutOfMemoryError) or "out of memory" in message:
            return True
        problem = problem.__cause__ or problem.__context__
    return False

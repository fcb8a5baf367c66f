"""Time to the first token of prompts by length, and whether one call has the bits of short ones.

    PYTHONPATH=. python docs/log/first_tokens.py gemma-4-31b,fp8,bfloat16 gemma-4-e4b,fp8,bfloat16

Random weights of true size; each argument is NAME,DTYPE,KV_DTYPE. Needs a Hopper card.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from specdec.core.types import Sequence
from targets.arch import released
from targets.cuda.load import CudaOptions, random_target
from targets.cuda.target import CudaTarget

LENGTHS = (64, 128, 200, 256, 384, 385, 512, 768, 1000, 1024, 1025, 1200, 2000, 4000)
REPEATS = 6


def milliseconds(target: CudaTarget, ids: list[int]) -> float:
    """Median over repeats, after a first one that captures."""
    seq, samples = Sequence(list(ids), slot=0), []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        for start in range(0, len(ids), target.prefill_chunk):
            target.prefill(seq, start, min(len(ids), start + target.prefill_chunk))
        torch.cuda.synchronize()
        samples.append(1e3 * (time.perf_counter() - began))
    return statistics.median(samples[1:])


@torch.inference_mode()
def same_as_short_calls(target: CudaTarget, ids: list[int]) -> bool:
    rows = target._rows([ids], [0], [0])
    whole, parts = (target._in_calls(rows, size) for size in (target.plan.first, target.plan.short))
    assert whole.logits is not None and parts.logits is not None
    return torch.equal(whole.logits, parts.logits)


def main() -> None:
    print(torch.cuda.get_device_name())
    for argument in sys.argv[1:]:
        name, dtype, kv_dtype = argument.split(",")
        options = CudaOptions(slots=4, max_len=4608, dtype=dtype, kv_dtype=kv_dtype)
        target = random_target(released(name), options)
        for length in LENGTHS:
            ids = [(7919 * i + 3) % 50000 + 10 for i in range(length)]
            line = f"{argument} {length:5d} tokens {milliseconds(target, ids):8.2f} ms"
            if target.plan.short < length <= target.plan.first:
                line += f"; bits of short calls: {same_as_short_calls(target, ids)}"
            print(line, flush=True)
        del target
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

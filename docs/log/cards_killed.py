"""A process that works on two cards is killed again and again: the cards' memory is free each time.

    PYTHONPATH=. python docs/log/cards_killed.py --cards 0 1 --kills 50

Each child loads the first layers of 12B on both cards and decodes eight rows without end; every
fifth is killed while it loads. Needs two Hopper cards that nothing else uses.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from multiprocessing import Pipe

import torch  # before the forks: a child then starts at once

from drafters.none.host import NoDrafter
from specdec.core.engine import Engine
from specdec.core.types import Sampling, Sequence
from targets.arch import released
from targets.cuda.cards import CardsCycle, step_of
from targets.cuda.load import CudaOptions
from targets.cuda.load_cards import random_cards

LAYERS = 12
PATIENCE = 10
"""Seconds until memory that is still taken counts as lost."""
LOADING = 4.0
"""Seconds within which a child that is still loading is killed."""
RUNNING = 1.5
"""Seconds within which one that decodes is."""


def used(cards: list[int]) -> list[int]:
    """MiB that are taken on each card."""
    fields = "--query-gpu=memory.used", "--format=csv,noheader,nounits"
    which = ",".join(map(str, cards))
    out = subprocess.run(["nvidia-smi", *fields, "-i", which], capture_output=True, text=True)
    return [int(line) for line in out.stdout.split()]


def work(ready) -> None:
    """Decode without end."""
    from drafters.lookup.cuda import DeviceLookup

    options = CudaOptions(slots=8, max_len=8192, dtype="fp8", kv_dtype="fp8", k=4, graphs=True)
    whole = released("gemma-4-12b")
    target = random_cards(replace(whole, layers=whole.layers[:LAYERS]), options, 2)
    lookup = step_of(target, lambda rank: DeviceLookup(rank, 2, 5))
    engine = Engine(target, NoDrafter(), CardsCycle(target, lookup, 4))
    for i in range(8):
        sampling = Sampling(temperature=1.0, seed=i)
        engine.submit(Sequence([7 + i] * 100, sampling, max_tokens=8000))
    for number in range(10**9):
        engine.step()
        if number == 3:
            ready.send(torch.cuda.memory_allocated() >> 20)


def killed(cards: list[int], loading: bool, draw: random.Random) -> tuple[float, int]:
    """Seconds until the cards' memory is free again, and MiB that the child had on the first."""
    before, (here, there) = used(cards), Pipe()
    child = os.fork()
    if child == 0:
        try:
            work(there)
        finally:
            os._exit(1)
    taken = 0
    if loading:
        time.sleep(draw.uniform(0, LOADING))
    else:
        assert here.poll(120), "the child does not decode"
        taken = here.recv()
        time.sleep(draw.uniform(0, RUNNING))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child had ended by itself"
    began = time.perf_counter()
    while used(cards) > before:
        if time.perf_counter() - began > PATIENCE:
            raise SystemExit(f"memory is not free: {used(cards)} MiB, {before} before")
    return time.perf_counter() - began, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cards", type=int, nargs=2, default=[0, 1])
    parser.add_argument("--kills", type=int, default=50)
    asked = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, asked.cards))
    draw, longest, most, first = random.Random(1), 0.0, 0, used(asked.cards)
    for number in range(asked.kills):
        seconds, taken = killed(asked.cards, number % 5 == 4, draw)
        longest, most = max(longest, seconds), max(most, taken)
        if number % 5 == 4:
            print(f"{number + 1} kills, memory free after {longest:.1f} s at most", flush=True)
    print(
        f"{asked.kills} kills, a fifth of them while loading; tensors of up to {most} MiB a card; "
        f"memory free after {longest:.2f} s at most; MiB before {first}, after {used(asked.cards)}"
    )


if __name__ == "__main__":
    main()

"""Run by test_hosts.py, alone or as one of two processes: a tiny model's text over four devices.

`python -m tests.targets.jax.hosts_worker FOLDER [PORT PROCESS]` prints one JSON line: plain,
in the host loop, and, where there are two, with guesses of three drafters in the device loop.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import jax

from drafters.assistant.jax.drafter import AssistantDraftHead, PlacedAssistant
from drafters.assistant.spec import random_assistant, released_size
from drafters.eagle3.jax.drafter import EagleDraftHead
from drafters.eagle3.jax.snapshots import EagleSnapshots
from drafters.eagle3.spec import random_head
from drafters.lookup.jax import TracedLookup
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.types import Sampling, Sequence
from targets.backend import snapshots_of
from targets.jax import hosts
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.host_drafter import HostHead
from targets.jax.load import JaxOptions, load_target
from targets.jax.target import JaxTarget
from tests.support.eagle3_oracle import SPEC
from tests.targets.jax.mesh_worker import K, texts

LAYERS = (0, 1, 2)
"""Target layers with outputs that the head reads."""


def main(folder: Path, port: str = "", process: str = "") -> None:
    if port:
        hosts.join(f"localhost:{port}", 2, int(process), timed_out=lambda: os._exit(3))
        assert hosts.share(b"from %s" % process.encode()) == b"from 0"
    assert jax.device_count() == 4
    options = JaxOptions(slots=2, max_len=64, k=K, tp=4, mapped=False, chunk=8)
    target, none = load_target(folder, options), NoDrafter()
    said = {"host": texts(target, none, host_cycle(target, none, 0))}
    if port:
        looped = device_loop(target, TextDrafter(TracedLookup(1, 3)), K)
        said["device"] = texts(target, none, looped)
        target = load_target(folder, replace(options, features=LAYERS))
        head = random_head(replace(SPEC, hidden=48, vocab=target.vocab, layers=LAYERS))
        drafter = HostHead(EagleDraftHead(head, target, K))
        said["eagle3"] = texts(target, drafter, device_loop(target, drafter.head, K))
        said["warm"] = warm(target, drafter)
        said["assistant"] = assisted(folder, replace(options, features=(3,)))
    print(json.dumps(said), flush=True)


def assisted(folder: Path, options: JaxOptions) -> list[list[int]]:
    """Drafted by an assistant of the target's own width."""
    target = load_target(folder, options)
    spec = released_size(target.arch)
    layers = tuple(replace(layer, ffw=32) for layer in spec.arch.layers)
    made = random_assistant(replace(spec, arch=replace(spec.arch, hidden=48, layers=layers)))
    drafter = HostHead(AssistantDraftHead(PlacedAssistant(made, target, 1, False, False)))
    return texts(target, drafter, device_loop(target, drafter.head, K))


def warm(target: JaxTarget, drafter: HostHead) -> list:
    """The same prompt three times: with a prefix cache, resumed from host memory, and without."""
    own = snapshots_of(target)
    owners = own, EagleSnapshots(drafter.head, own.unit)
    cache = PrefixCache(own.unit, owners, SnapshotPool(Budget(device=0, host=2**30)))
    told = []
    for kept in (cache, cache, None):
        cycle = device_loop(target, drafter.head, K)
        engine = Engine(target, drafter, cycle, prefix_cache=kept)
        seq = Sequence([3, 1, 4, 1, 5] * 9, Sampling(temperature=1.0, seed=3), max_tokens=12)
        engine.run_to_end([seq])
        told.append([seq.cached, seq.acceptance.accepted, *seq.tokens])
    return told


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

"""Run by test_hosts.py, alone or as one of two processes: a tiny model's text over four devices.

`python -m tests.hosts_worker FOLDER [PORT PROCESS]` prints one JSON line: plain, in the host loop,
and, where there are two, with guesses in the device loop.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax

from drafters.device_cycle_jax import device_cycle
from drafters.ngram_jax import TracedNgram
from drafters.none import NoDrafter
from drafters.resident_jax import TextOnly
from specdec.cycle import host_cycle
from targets.jax import hosts
from targets.jax.load import JaxOptions, load_target
from tests.mesh_worker import K, texts


def main(folder: Path, port: str = "", process: str = "") -> None:
    if port:
        hosts.join(f"localhost:{port}", 2, int(process), late=lambda: os._exit(3))
        assert hosts.share(b"from %s" % process.encode()) == b"from 0"
    assert jax.device_count() == 4
    options = JaxOptions(slots=2, max_len=64, k=K, tp=4, mapped=False, chunk=8)
    target, none = load_target(folder, options), NoDrafter()
    said = {"host": texts(target, none, host_cycle(target, none, 0))}
    if port:
        looped = device_cycle(target, TextOnly(TracedNgram(1, 3)), K)
        said["device"] = texts(target, none, looped)
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

"""Gaps between the events of a constrained stream that is alone on a server, over HTTP, in cycles.

    python docs/log/gaps.py [--requests 8]

Starts `specdec serve --model mini --drafter none`, where each cycle of a free request is one token
and one event. The median gap of free requests, of the same run, is the cycle.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
from itertools import pairwise

import httpx

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 60, "maxLength": 80},
        "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}, "minItems": 8},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def gaps(url: str, seed: int, constrained: bool) -> list[float]:
    """Seconds between a stream's events that bring text."""
    body = {"prompt": "names =", "max_tokens": 80, "temperature": 1.0, "seed": seed}
    body |= {"stream": True, "ignore_eos": not constrained}
    body |= {"structured_outputs": {"json": SCHEMA}} if constrained else {}
    times = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0]["text"]:
                times.append(time.perf_counter())
    return [b - a for a, b in pairwise(times)]


def wait(server: subprocess.Popen[bytes], url: str) -> None:
    while server.poll() is None:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    sys.exit("the server ended")


def measured(url: str, requests: int, constrained: bool) -> dict[str, float]:
    gaps(url, 0, constrained)  # the first one compiles its grammar
    found = [gaps(url, seed, constrained) for seed in range(1, requests + 1)]
    each = sorted(gap for one in found for gap in one)
    return {
        "events": len(each),
        "median_ms": 1e3 * statistics.median(each),
        "p90_ms": 1e3 * each[int(0.9 * len(each))],
        "p99_ms": 1e3 * each[int(0.99 * len(each))],
        "largest_ms": 1e3 * each[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--backend", default="jax")
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specdec", "serve", "--model", "mini", "--drafter", "none"]
    command += ["--backend", asked.backend, "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        wait(server, url)
        free_ = measured(url, asked.requests, constrained=False)
        held = measured(url, asked.requests, constrained=True)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
    cycle = free_["median_ms"]
    print(
        json.dumps(
            {
                "cycle_ms": cycle,
                "free": free_,
                "constrained": held,
                "constrained_in_cycles": {
                    name: round(held[f"{name}_ms"] / cycle, 2) for name in ("median", "p90", "p99")
                },
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()

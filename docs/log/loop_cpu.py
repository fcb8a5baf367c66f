"""What the web server's thread costs: CPU seconds per streamed token, by how many streams
there are; the engine is a fake that decodes at a given pace, a token a cycle.

    PYTHONPATH=. python docs/log/loop_cpu.py [OUT.json]
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from tests.constrained import mini_tokenizer
from tests.serving import ServedTarget, served

PACE = 0.01
"""Seconds a cycle."""
TOKENS = 600
CLIENT = """
import http.client, json, sys, threading
host, port, body = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def one():
    c = http.client.HTTPConnection(host, port); c.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    r = c.getresponse(); assert r.status == 200, r.read(); r.read()
threads = [threading.Thread(target=one) for _ in range(int(sys.argv[4]))]
[t.start() for t in threads]; [t.join() for t in threads]
"""


def main() -> None:
    tokenizer = mini_tokenizer()
    found: dict[str, Any] = {}
    for streams in (1, 8):
        target = ServedTarget(PACE, slots=streams, max_len=4096)
        target.vocab = 2000  # tokens with text, of several characters
        drafter = NoDrafter()
        engine = Engine(target, drafter, host_cycle(target, drafter, 0))
        with served(engine, "fake", tokenizer=tokenizer, drafter="none", k=0) as server:
            measured(server.url, 1)  # what the first request of all costs
            found[f"{streams} streams"] = measured(server.url, streams)
    print(json.dumps(found))
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(found))


def measured(url: str, streams: int) -> dict[str, float]:
    web = next(t for t in threading.enumerate() if t.name == "specdec-web")
    assert web.ident is not None
    clock = time.pthread_getcpuclockid(web.ident)
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "stream": True}
    body |= {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    host, port = url.removeprefix("http://").split(":")
    began = time.clock_gettime(clock)
    command = [sys.executable, "-c", CLIENT, host, port, json.dumps(body), str(streams)]
    subprocess.run(command, check=True)
    took = time.clock_gettime(clock) - began
    return {"ms_per_token": 1e3 * took / (streams * TOKENS)}


if __name__ == "__main__":
    main()

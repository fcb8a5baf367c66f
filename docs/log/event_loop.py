"""What a streamed token costs the server's event loop, in CPU time: eight streams on a target that
chooses at once, plain decoding, so that every token is a chunk of its own.

    PYTHONPATH=. python docs/log/event_loop.py
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

from drafters.none.host import NoDrafter
from tests.support.serving import ServedTarget, Server, serving

STREAMS = 8
TOKENS = 1500
RUNS = 5
CLIENT = """
import http.client, sys, threading
def read(seed):
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
    body = sys.argv[2].replace('"SEED"', str(seed))
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    while reply.read(65536): pass
streams = [threading.Thread(target=read, args=(seed,)) for seed in range(int(sys.argv[3]))]
for stream in streams: stream.start()
for stream in streams: stream.join()
"""
GENERATED = 'vllm:generation_tokens_total{engine="0",model_name="fake"}'


def main() -> None:
    target = ServedTarget(slots=STREAMS, max_len=4096, pause=0.004)
    with serving(target, NoDrafter(), k=0) as server:
        told = {
            name: sorted(_milliseconds(server, extra) for _ in range(RUNS))[RUNS // 2]
            for name, extra in (("plain", {}), ("told", {"include_speculation": True}))
        }
    print(json.dumps({"streams": STREAMS, "runs": RUNS, "ms_per_token": told}))


def _milliseconds(server: Server, extra: dict[str, bool]) -> float:
    ask = {"prompt": "abc", "max_tokens": TOKENS, "stream": True, "ignore_eos": True, **extra}
    port, body = server.url.rpartition(":")[2], json.dumps({**ask, "seed": "SEED"})
    spent, tokens = _thread_time(server), server.metrics()[GENERATED]
    command = [sys.executable, "-c", CLIENT, port, body, str(STREAMS)]
    subprocess.run(command, check=True)
    spent, tokens = _thread_time(server) - spent, server.metrics()[GENERATED] - tokens
    return round(1000 * spent / tokens, 4)


def _thread_time(server: Server) -> float:
    """CPU seconds of the event loop's thread so far."""

    async def now() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(now(), server.web._uvicorn.loop).result()


if __name__ == "__main__":
    main()

"""Requests with random faults, against a real server of mini:

    python -m tests.fuzzed [--requests 10000] [--seed 0]

None may end in a 5xx or hang; requests that are in order, sent among them, must get the answers
that they get alone; and the server's memory must not grow. Prints what came back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx

from tests.support.agents import CLIENTS, TOOLS
from tests.support.serving import serving_mini

JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63),
    1e308,
    0.5,
    "",
    "x",
    "\0",
    "ü\u2028",
    [],
    {},
    [[]],
    [None],
    {"": {}},
    [1, "a", None],
    "<|turn>",
    "a" * 5000,
    [0] * 3000,
    [1] * 50,
    {"type": "json_object"},
    {"type": "function"},
    {"$ref": "#"},
    {"a": {"b": [1]}},
]
NAMES = [
    "temperature",
    "top_p",
    "top_k",
    "n",
    "stop",
    "seed",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "echo",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "reasoning_effort",
    "thinking_token_budget",
    "chat_template_kwargs",
    "continue_final_message",
    "max_tokens",
    "stop_token_ids",
    "made_up",
]
SCHEMAS: list[Any] = [
    {"type": "object"},
    {"enum": ["a", 1]},
    {"not": {}},
    {"$ref": "#"},
    {"type": "array"},
    True,
    {"type": "string", "pattern": "("},
    {"pattern": "(a+)+$"},
    {"oneOf": [{}, {}]},
    {"const": []},
]


def mutated(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """A copy with a fault in it, now and then."""
    if rng.random() < 0.01 + 0.005 * depth:
        return deepcopy(rng.choice(JUNK))
    if isinstance(value, dict):
        return {k: mutated(rng, v, depth + 1) for k, v in value.items() if rng.random() > 0.005}
    if isinstance(value, list):
        return [mutated(rng, v, depth + 1) for v in value]
    return value


def drawn(rng: random.Random) -> tuple[str, Any]:
    sent = rng.choice(CLIENTS)
    body = {**sent["body"], "max_tokens": 3}
    if rng.random() < 0.3 and sent["path"] == "chat/completions":
        body |= {"tools": TOOLS, "tool_choice": "required"}
    if rng.random() < 0.3:
        body["structured_outputs"] = {"json": rng.choice(SCHEMAS)}
    body = mutated(rng, body)
    if isinstance(body, dict):
        body.pop("max_completion_tokens", None)
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            body[rng.choice(NAMES)] = deepcopy(rng.choice([*JUNK, *SCHEMAS]))
        limit = body.get("max_tokens")
        if not isinstance(limit, int) or limit > 8:
            body["max_tokens"] = 3
    return sent["path"], body


def memory() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def run(url: str, requests: int, seed: int) -> dict[str, Any]:
    rng, counts = random.Random(seed), Counter()
    gate = asyncio.Semaphore(16)
    known = {"prompt": "def f(x):", "max_tokens": 12, "temperature": 1}
    async with httpx.AsyncClient(timeout=120) as client:

        async def good(number: int) -> str:
            body = {**known, "seed": number % 7}
            reply = await client.post(f"{url}/completions", json=body)
            while reply.status_code == 429:
                await asyncio.sleep(0.2)
                reply = await client.post(f"{url}/completions", json=body)
            return reply.json()["choices"][0]["text"]

        alone = [await good(number) for number in range(7)]

        async def bad(path: str, body: Any) -> None:
            try:
                reply = await client.post(f"{url}/{path}", content=json.dumps(body), headers=JSON)
            except httpx.TransportError as problem:
                counts["no answer"] += 1
                print(type(problem).__name__, path, json.dumps(body)[:3000])
                return
            counts[reply.status_code] += 1
            if reply.status_code >= 500 or '"code": 500' in reply.text:
                print("5xx", reply.status_code, path, json.dumps(body)[:2000], reply.text[:300])
            if reply.status_code >= 400:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

        async def one(number: int, path: str, body: Any) -> None:
            async with gate:
                if number % 10 == 0:
                    counts["cross-talk"] += await good(number) != alone[number % 7]
                else:
                    await bad(path, body)

        before = 0
        for start in range(0, requests, 500):
            batch = [(n, *drawn(rng)) for n in range(start, min(start + 500, requests))]
            await asyncio.gather(*(one(*job) for job in batch))
            before = before or memory()  # what the first ones bring is there to stay
            print(f"{start + len(batch)} of {requests}: {dict(counts)}", flush=True)
    grown = (memory() - before) / 2**20
    return {"replies": {str(k): v for k, v in counts.items()}, "memory grown, MiB": round(grown, 1)}


JSON = {"Content-Type": "application/json"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="jax")
    asked = parser.parse_args()
    with serving_mini(backend=asked.backend) as server:
        print(
            json.dumps(asyncio.run(run(f"{server.url}/v1", asked.requests, asked.seed)), indent=1)
        )


if __name__ == "__main__":
    main()

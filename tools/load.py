"""Load on a server of OpenAI's API: many streams at once, and how long each of them waits.

    python tools/load.py --url http://127.0.0.1:8000 --users 64 --input 500 --output 200
    python tools/load.py --url http://127.0.0.1:8000 --rate 4 --input 400 --output 100

--users N: a closed loop, each of N users sends its next request when its last one has ended.
--rate R: R requests a second on average, arriving as a Poisson process, whatever is running.
--long P,N: with probability P a prompt has N tokens instead.

Prompts are random token ids, answers have exactly --output tokens (ignore_eos). Of requests that
were sent in the measured time and answered whole:

    ttft  from sending to the first token; guidellm's and vLLM's TTFT
    tpot  from the first token to the last / (tokens - 1); vLLM's TPOT, guidellm's ITL (its TPOT is
          the whole time / tokens)
    gap   between two events of one stream, which may hold several tokens; vLLM's ITL

tokens_per_second are the output tokens of the measured time / its seconds, of all requests.

Where the server wants an API key, SPECDEC_API_KEY in the environment holds it. A request whose
connection breaks counts as failed.

The measured time excludes the first --warm seconds, and in a closed loop ends with --seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import httpx

FIRST_ID = 3
"""Ids from which prompts are drawn: below lie padding and the ends of texts."""
PROCESSES = 4
"""Processes of clients: one would not keep up with some thousand events a second."""
TIMEOUT_SECONDS = 600.0
PAUSE = 0.1
"""Seconds behind a request that failed: a server that refuses all would be asked without end."""


@dataclass
class Answer:
    """One request. Times are of `time.monotonic`, in seconds."""

    sent: float
    prompt: int
    """Tokens of its prompt."""
    events: list[float] = field(default_factory=list)
    """When each event with text came."""
    tokens: int = 0
    status: int = 0

    @property
    def whole(self) -> bool:
        return self.status == 200 and bool(self.events) and self.tokens > 0


async def ask(client: httpx.AsyncClient, prompt: list[int], output: int, model: str) -> Answer:
    """Stream one answer."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(time.monotonic(), len(prompt))
    with suppress(httpx.HTTPError, json.JSONDecodeError):  # broken off: not whole
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            answer.status = reply.status_code
            async for line in reply.aiter_lines():
                _note(answer, line)
    if not answer.whole:
        await asyncio.sleep(PAUSE)
    return answer


def _note(answer: Answer, line: str) -> None:
    if not line.startswith("data: {"):
        return
    event = json.loads(line[6:])
    if event.get("choices"):
        answer.events.append(time.monotonic())
    elif event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]


def prompts(asked: argparse.Namespace, seed: int) -> Callable[[], list[int]]:
    """Draws prompts; every process has a seed of its own."""
    draw = random.Random(seed)
    share, longest = asked.long or (0.0, 0)

    def one() -> list[int]:
        size = longest if draw.random() < share else asked.input
        return [draw.randrange(FIRST_ID, asked.vocab) for _ in range(size)]

    return one


async def closed_loop(asked: argparse.Namespace, seed: int, users: int) -> list[Answer]:
    """Each user sends requests one after another until the time is over."""
    draw, answers, ends = prompts(asked, seed), [], time.monotonic() + asked.warm + asked.seconds
    async with client_of(asked.url) as client:

        async def user() -> None:
            while time.monotonic() < ends:
                answers.append(await ask(client, draw(), asked.output, asked.model))

        await asyncio.gather(*(user() for _ in range(users)))
    return answers


async def fixed_rate(asked: argparse.Namespace, seed: int, rate: float) -> list[Answer]:
    """Requests arrive whatever is running."""
    draw, wait = prompts(asked, seed), random.Random(seed + 1)
    tasks, ends = [], time.monotonic() + asked.warm + asked.seconds
    async with client_of(asked.url) as client:
        while time.monotonic() < ends:
            tasks.append(asyncio.create_task(ask(client, draw(), asked.output, asked.model)))
            await asyncio.sleep(wait.expovariate(rate))
        return list(await asyncio.gather(*tasks))


def client_of(url: str) -> httpx.AsyncClient:
    unlimited = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=url,
        timeout=TIMEOUT_SECONDS,
        limits=unlimited,
        headers=key_headers(),
        trust_env=False,  # no proxy between the two
    )


def key_headers() -> dict[str, str]:
    """A key has no place in a command line: it is the environment's first one."""
    key = os.environ.get("SPECDEC_API_KEY", "").split(",")[0].strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def clients(asked: argparse.Namespace, number: int) -> list[Answer]:
    """One process's share of the load."""
    seed = asked.seed + 1000 * number
    if asked.rate is None:
        users = len(range(number, asked.users, PROCESSES))
        return asyncio.run(closed_loop(asked, seed, users)) if users else []
    return asyncio.run(fixed_rate(asked, seed, asked.rate / PROCESSES))


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    began = time.monotonic()
    with ProcessPoolExecutor(PROCESSES, context) as pool:
        shares = pool.map(partial(clients, asked), range(PROCESSES))
        answers = [answer for share in shares for answer in share]
    return report(answers, began + asked.warm, began + asked.warm + asked.seconds)


def report(answers: list[Answer], begins: float, ends: float) -> dict[str, Any]:
    """Of requests sent in the measured time; tokens per second of all events that fall into it."""
    measured = [a for a in answers if a.whole and begins <= a.sent < ends]
    ttft = [a.events[0] - a.sent for a in measured]
    tpot = [(a.events[-1] - a.events[0]) / (a.tokens - 1) for a in measured if a.tokens > 1]
    gaps = [b - a for answer in measured for a, b in pairwise(answer.events)]
    made = sum(
        a.tokens / len(a.events) for a in answers if a.whole for t in a.events if begins <= t < ends
    )
    return {
        "requests": len(measured),
        "failed": sum(not a.whole for a in answers),
        "tokens_per_second": round(made / (ends - begins), 1),
        "ttft_ms": spread(ttft),
        "tpot_ms": spread(tpot),
        "gap_ms": spread(gaps),
        "longest_gap_ms": spread([max_gap(a) for a in measured if len(a.events) > 1]),
    }


def max_gap(answer: Answer) -> float:
    return max(b - a for a, b in pairwise(answer.events))


def spread(seconds: list[float]) -> dict[str, float] | None:
    """Mean and percentiles (the smallest value that so many do not exceed), in milliseconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(1000 * ordered[math.ceil(share * len(ordered)) - 1], 2)

    mean = round(1000 * statistics.fmean(ordered), 2)
    return {"mean": mean, "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def long_prompts(text: str) -> tuple[float, int]:
    share, _, tokens = text.partition(",")
    return float(share), int(tokens)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="by default the server's first one")
    parser.add_argument("--users", type=int, default=8, help="of the closed loop")
    parser.add_argument("--rate", type=float, help="requests a second, instead of --users")
    parser.add_argument("--input", type=int, default=500, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--long", type=long_prompts, help="SHARE,TOKENS of long prompts")
    parser.add_argument("--vocab", type=int, default=4000, help="ids of prompts lie below this")
    parser.add_argument("--seconds", type=float, default=30.0, help="of measured time")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds before it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a file for the result, too")
    return parser.parse_args()


def main() -> None:
    asked = options()
    if asked.model is None:
        found = httpx.get(f"{asked.url}/v1/models", headers=key_headers(), trust_env=False)
        models = found.raise_for_status().json()
        asked.model = models["data"][0]["id"]
    result = {"load": {k: v for k, v in vars(asked).items() if k != "out"}} | measure(asked)
    text = json.dumps(result)
    if asked.out:
        with open(asked.out, "w") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

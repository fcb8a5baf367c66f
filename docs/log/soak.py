"""Hours of mixed requests on a started server: none may fail, none may change, none may stay.

    specdec serve --port 8123 --drafter auto --auto-with eagle3 --slots 8 --max-len 1024 \
        --cache-ram 0.1 --suffix-answers 20000 &
    python docs/log/soak.py OUT.json --url http://127.0.0.1:8123 --pid $! [--hours 2]

Sixteen clients draw from the table of `soak_requests.py`: chats, completions, messages, responses.
Each time one is asked it is dressed anew: streamed or whole, with another drafter, K or prediction.
What it says (text, calls, log-probabilities, why it ended) must be what it said the first time.
Some clients leave in the middle of an answer, which must be a beginning of the known one. Some send
what is wrong, which must be a 4xx. Some send what was never sent before, twice, so that whatever
is kept of prompts and schemas grows to its bound.

The server's memory is sampled every ten seconds. OUT.json is written anew each minute. Memory must
not grow by 1 MB an hour after the warm-up, and 5xx, broken and differing answers must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from soak_requests import MISTAKES, Asked, dressed, fresh, key, table
from soak_said import Said, ended, events, failure, is_beginning, spoken

CLIENTS = 16
SAMPLE_SECONDS = 10
WRITE_SECONDS = 60
LEAVES = 0.12
"""Share of requests whose client leaves."""
ERRS = 0.06
"""Share of requests with a mistake."""
FRESH = 0.06
"""Share of requests that begin a new chat."""


@dataclass
class Soak:
    """What was asked so far, and what came of it."""

    client: httpx.AsyncClient
    pid: int
    began: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter[str])
    known: dict[str, Said] = field(default_factory=dict[str, Said])
    """Of requests, whatever their dress -> their first whole answer."""
    findings: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    memory: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Seconds since the start, resident KiB."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def find(self, what: str, asked: Asked, **facts: Any) -> None:
        self.counts[what] += 1
        if len(self.findings) < 50:
            facts |= {"route": asked.route, "body": asked.body}
            self.findings.append({"what": what, "at": round(self.seconds), **facts})


async def one(soak: Soak, draw: random.Random, requests: list[Asked]) -> None:
    """Ask for something, in one of the ways a client may."""
    way = draw.random()
    if way < ERRS:
        await mistake(soak, draw.choice(MISTAKES))
    elif way < ERRS + FRESH:
        asked = fresh(draw.getrandbits(48))
        for _ in range(2):
            await ask(soak, dressed(asked, draw), leave_after=None)
        soak.known.pop(key(asked), None)
    else:
        leaves = draw.random() < LEAVES
        asked = dressed(draw.choice(requests), draw, streamed=True if leaves else None)
        await ask(soak, asked, draw.randint(1, 12) if leaves else None)


async def mistake(soak: Soak, asked: Asked) -> None:
    soak.counts["mistakes"] += 1
    answer = await soak.client.post(asked.route, json=asked.body)
    if answer.status_code >= 500:
        soak.find("5xx", asked, status=answer.status_code, text=answer.text[:300])
    elif answer.status_code < 400:
        soak.find("mistakes_served", asked, status=answer.status_code)


async def ask(soak: Soak, asked: Asked, leave_after: int | None) -> None:
    """Ask, and compare; `leave_after` so many events hang up."""
    soak.counts["asked"] += 1
    soak.counts[f"asked {asked.route}"] += 1
    said: Said = {}
    if asked.body.get("stream"):
        async with soak.client.stream("POST", asked.route, json=asked.body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return refused(soak, asked, answer)
            async for event in events(answer):
                if (problem := failure(event)) is not None:
                    return soak.find("broken", asked, text=problem)
                spoken(asked.route, event, said)
                if leave_after is not None:
                    leave_after -= 1
                    if leave_after == 0:
                        return left(soak, asked, said)
    else:
        answer = await soak.client.post(asked.route, json=asked.body)
        if answer.status_code != 200:
            return refused(soak, asked, answer)
        spoken(asked.route, answer.json(), said)
    compare(soak, asked, ended(said))


def refused(soak: Soak, asked: Asked, answer: httpx.Response) -> None:
    what = "5xx" if answer.status_code >= 500 else "refused"
    soak.find(what, asked, status=answer.status_code, text=answer.text[:300])


def left(soak: Soak, asked: Asked, said: Said) -> None:
    soak.counts["left"] += 1
    known = soak.known.get(key(asked))
    if known is not None and not is_beginning(said, known):
        soak.find("differing", asked, first=known, now=said)


def compare(soak: Soak, asked: Asked, said: Said) -> None:
    soak.counts["answered"] += 1
    if key(asked) not in soak.known:
        soak.known[key(asked)] = said
        return
    soak.counts["compared"] += 1
    if said != soak.known[key(asked)]:
        soak.find("differing", asked, first=soak.known[key(asked)], now=said)


async def client(soak: Soak, seed: int, requests: list[Asked], seconds: float) -> None:
    draw = random.Random(seed)
    while soak.seconds < seconds:
        try:
            await one(soak, draw, requests)
        except (httpx.HTTPError, LookupError, ValueError) as problem:  # cut off, or misshapen
            soak.counts["broken"] += 1
            soak.findings.append({"what": "broken", "text": repr(problem)[:300]})
            await asyncio.sleep(1)


def status(pid: int, name: str) -> int:
    """A number of /proc/PID/status: VmRSS in KiB, Threads."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"/proc/{pid}/status has no {name}")


async def watch(soak: Soak, out: Path, options: argparse.Namespace) -> None:
    """Sample the memory, and tell and write how it stands."""
    told = -float(WRITE_SECONDS)
    while True:
        soak.memory.append((round(soak.seconds, 1), status(soak.pid, "VmRSS")))
        scraped = await soak.client.get("/metrics")
        soak.counts["5xx"] += scraped.status_code >= 500
        if soak.seconds - told >= WRITE_SECONDS:
            told = soak.seconds
            write(soak, out, options)
        await asyncio.sleep(SAMPLE_SECONDS)


def slope(memory: list[tuple[float, int]], warm_up: float) -> tuple[float, float] | None:
    """MB an hour after the warm-up, by least squares, and its standard error."""
    points = np.array([point for point in memory if point[0] >= warm_up], float)
    if len(points) < 10:
        return None
    hours, megabytes = points[:, 0] / 3600, points[:, 1] * 1024 / 1e6
    (by_hour, _), spread = np.polyfit(hours, megabytes, 1, cov=True)
    return round(float(by_hour), 3), round(float(spread[0, 0] ** 0.5), 3)


def floors(memory: list[tuple[float, int]]) -> list[float]:
    """The least of each ten minutes, in MB: what is in use between requests."""
    least: dict[int, int] = {}
    for seconds, kib in memory:
        part = int(seconds // 600)
        least[part] = min(kib, least.get(part, kib))
    return [round(kib * 1024 / 1e6, 1) for kib in least.values()]


def write(soak: Soak, out: Path, options: argparse.Namespace) -> None:
    found = slope(soak.memory, options.warm_up * 60)
    rates = {name: soak.counts[name] for name in ("5xx", "broken", "differing", "refused")}
    megabytes = soak.memory[-1][1] * 1024 / 1e6
    report = {
        "hours": round(soak.seconds / 3600, 3),
        "clients": CLIENTS,
        "server": options.command,
        "commit": options.commit,
        **rates,
        "megabytes_an_hour": found and {"slope": found[0], "standard_error": found[1]},
        "megabytes_least_of_ten_minutes": floors(soak.memory),
        "counts": dict(sorted(soak.counts.items())),
        "descriptors": len(os.listdir(f"/proc/{soak.pid}/fd")),
        "threads": status(soak.pid, "Threads"),
        "findings": soak.findings,
        "memory_seconds_kib": soak.memory,
    }
    beside = out.with_suffix(".partial")
    beside.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(beside, out)
    grew = "warming up" if found is None else f"{found[0]:+.2f} ± {found[1]:.2f} MB/h"
    told = ", ".join(f"{count} {name}" for name, count in rates.items())
    asked = f"{soak.counts['asked']} asked, {soak.counts['compared']} compared, "
    asked += f"{soak.counts['left']} left, {soak.counts['mistakes']} mistakes"
    print(f"{soak.seconds / 60:5.1f} min: {asked}; {told}; {megabytes:.1f} MB, {grew}", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a server for hours, and watch it.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int, required=True, help="the server's process")
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--warm-up", type=float, default=20.0, help="minutes")
    parser.add_argument("--commit", help="the server's")
    options = parser.parse_args()
    command = Path(f"/proc/{options.pid}/cmdline").read_bytes().decode().split("\0")
    options.command = " ".join(command[command.index("serve") : -1])
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits) as http:
        soak = Soak(http, options.pid)
        watching = asyncio.create_task(watch(soak, options.out, options))
        seconds = 3600 * options.hours
        clients = (client(soak, seed, table(), seconds) for seed in range(CLIENTS))
        asking = asyncio.gather(*clients)
        await asyncio.wait({watching, asking}, return_when=asyncio.FIRST_COMPLETED)
        await (watching if watching.done() else asking)  # the server's end is the soak's
        watching.cancel()
        write(soak, options.out, options)


if __name__ == "__main__":
    asyncio.run(main())

"""A mixed load of all APIs on two servers, one that drafts and one that does not: equal answers.

python -m tests.mixed_load --answers 400 [options of serve for the drafting server]

Requests are drawn: Chat, Completions, Messages and Responses, whole and streamed, of several users
at once, with seeds, tools, schemas, stops, predictions, histories and log-probabilities. Exit code
1 if any answer differs but for its identifiers, times and statistics.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any

import httpx

from tests.support.commands import free_port, wait_until_ready

USERS = 6
"""Requests at a time."""
TOKENS = 24
"""Of an answer at most."""
VOLATILE = frozenset(
    "id item_id response_id call_id tool_call_id created created_at completed_at metrics usage "
    "system_fingerprint sequence_number seed".split()
)
"""Names whose values are of one answer alone, or tell how it was made."""
TEXTS = frozenset(
    "text content arguments delta thinking partial_json reasoning_content finish_reason "
    "stop_reason status name".split()
)
"""Names of what a stream's events add up to."""
NEAR = 1e-4
"""How far log-probabilities may be apart: programs of another width round otherwise."""
CODE = "def mean(values):\n    total = sum(values)\n    return"
TOOL = {
    "name": "read_file",
    "description": "Reads a file",
    "schema": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
        "required": ["path"],
    },
}
FORM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


def drawn(random: Random) -> tuple[str, dict[str, Any]]:
    """A request's path and body."""
    wish = {"seed": random.randrange(2**32), "temperature": random.choice([0.0, 0.7, 1.0, 1.3])}
    if random.random() < 0.4:
        wish |= {"top_p": random.choice([0.5, 0.9]), "top_k": random.choice([0, 20])}
    if random.random() < 0.2:
        wish["repetition_penalty"] = 1.2
    wish["stream"] = random.random() < 0.5
    api = random.choice([_completion, _chat, _message, _response])
    path, body = api(random)
    return path, {"model": "mini", **wish, **body}


def _text(random: Random) -> str:
    words = CODE.split() + ["for", "value", "in", "values", "print", "x", "=", "1"]
    return " ".join(random.choices(words, k=random.choice([3, 20, 120])))


def _turns(random: Random) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": _text(random)}]
    for _ in range(random.choice([0, 0, 1, 2])):
        turns += [
            {"role": "assistant", "content": _text(random)},
            {"role": "user", "content": _text(random)},
        ]
    return turns


def _completion(random: Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"prompt": random.choice([CODE, _text(random)]), "max_tokens": TOKENS}
    kind = random.randrange(5)
    if kind == 0:
        body["stop"] = ["\n", "return"]
    elif kind == 1:
        body["logprobs"] = 3
    elif kind == 2:
        body["prediction"] = {"type": "content", "content": " total / len(values)\n"}
    elif kind == 3:
        body["structured_outputs"] = {"regex": "[a-z]{2,9} = [0-9]+"}
    return "completions", body


def _chat(random: Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"messages": _turns(random), "max_tokens": TOKENS}
    kind = random.randrange(4)
    if kind == 0:
        function = {"name": TOOL["name"], "parameters": TOOL["schema"]}
        body["tools"] = [{"type": "function", "function": function}]
        body["tool_choice"] = random.choice(["auto", "required"])
    elif kind == 1:
        named = {"name": "sum", "schema": FORM}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    elif kind == 2:
        body |= {"n": 2, "logprobs": True}
    return "chat/completions", body


def _message(random: Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"messages": _turns(random), "max_tokens": TOKENS}
    if random.random() < 0.5:
        body["system"] = "Answer in one line."
    if random.random() < 0.4:
        body["tools"] = [{"name": TOOL["name"], "input_schema": TOOL["schema"]}]
    return "messages", body


def _response(random: Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"input": _turns(random), "max_output_tokens": TOKENS}
    if random.random() < 0.4:
        body["tools"] = [{"type": "function", "name": TOOL["name"], "parameters": TOOL["schema"]}]
    return "responses", body


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """The status and what was answered. Of a stream: its texts joined, and its last event."""
    reply = client.post(f"/v1/{path}", json=body)
    if not body["stream"]:
        return reply.status_code, plain(reply.json())
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    return reply.status_code, _joined([json.loads(line) for line in lines])


def _joined(events: list[Any]) -> Any:
    """A stream's strings by where they stand, in order: how an answer is cut into events is a
    matter of time."""
    found: dict[str, str] = {}
    for event in events:
        if event.get("type", "").endswith((".done", ".created", ".in_progress", ".added")):
            continue
        for place, text in _strings(plain(event), str(event.get("index", ""))):
            found[place] = found.get(place, "") + text
    return found


def _strings(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _strings(part, f"{place}.{name}")
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part, place)
    elif isinstance(value, str) and place.rsplit(".", 1)[-1] in TEXTS:
        yield place, value


def plain(value: Any) -> Any:
    """Without what differs between two servers."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items() if name not in VOLATILE}
    return [plain(part) for part in value] if isinstance(value, list) else value


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= NEAR
    return one == other


@contextmanager
def serving(*options: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "specdec", "serve", "--model", "mini", "--port", port]
    server = subprocess.Popen([*command, "--max-len", "1024", *options])
    try:
        wait_until_ready(server, url := f"http://127.0.0.1:{port}")
        yield url
    finally:
        server.terminate()
        server.wait()


def answers(requests: list[tuple[str, dict[str, Any]]], users: int, *options: str) -> list[Any]:
    with (
        serving(*options) as url,
        httpx.Client(base_url=url, timeout=300) as client,
        ThreadPoolExecutor(users) as pool,
    ):
        return list(pool.map(lambda request: answer(client, *request), requests))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    asked, options = parser.parse_known_args()
    random = Random(asked.seed)
    requests = [drawn(random) for _ in range(asked.answers)]
    drafted = answers(requests, USERS, *(options or ["--drafter", "auto", "--k", "7"]))
    alone = answers(requests, 1, "--drafter", "none", "--slots", "1", "--no-prefix-cache")
    wrong = [i for i in range(len(requests)) if not equal(drafted[i], alone[i])]
    for i in wrong[:5]:
        print(f"{requests[i]}\n  drafted: {drafted[i]}\n  plain:   {alone[i]}")
    counted = Counter(path for path, _ in requests)
    statuses = Counter(status for status, _ in alone)
    print(f"{dict(counted)}, statuses {dict(statuses)}: {len(wrong)} of {len(requests)} differ")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

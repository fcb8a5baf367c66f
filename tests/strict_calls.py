"""Strict tool calls of mini at temperature 1, on a real server:

    python -m tests.strict_calls [--calls 1000] [--tokens 300] [--drafter ngram] [--k 4]

Calls that end must be valid for their schemas; those that are cut by max_tokens must have
finish_reason "length", and are counted separately.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import jsonschema

from tests.support.serving import serving_mini

STRING = {"type": "string", "maxLength": 16}
SCHEMAS: dict[str, dict[str, Any]] = {
    "edit_file": {"path": STRING, "old": STRING, "new": STRING, "line": {"type": "integer"}},
    "get_weather": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1}},
    "search": {
        "query": STRING,
        "limit": {"type": ["integer", "null"]},
        "exact": {"type": "boolean"},
    },
    "plan": {
        "steps": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"title": STRING, "weight": {"type": "number", "maximum": 1}},
                "required": ["title"],
                "additionalProperties": False,
            },
        }
    },
    "choose": {
        "what": {"anyOf": [{"const": "all"}, {"type": "array", "items": STRING, "maxItems": 2}]}
    },
    "nothing": {},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties)[:2],
                "additionalProperties": False,
            },
        },
    }
    for name, properties in SCHEMAS.items()
]
PARAMETERS = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}


async def run(url: str, calls: int, tokens: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    gate = asyncio.Semaphore(16)
    async with httpx.AsyncClient(timeout=600) as client:

        async def ask(number: int) -> None:
            body = {
                "messages": [{"role": "user", "content": f"Task {number}"}],
                "tools": TOOLS,
                "tool_choice": "required",
                "parallel_tool_calls": number % 2 == 0,
                "temperature": 1,
                "seed": number,
                "max_tokens": tokens,
            }
            async with gate:
                reply = await client.post(f"{url}/chat/completions", json=body)
            if reply.status_code != 200:
                counts[f"status {reply.status_code}"] += 1
                return
            (choice,) = reply.json()["choices"]
            said = choice["message"]["tool_calls"]
            cut = choice["finish_reason"] == "length"
            counts["answers cut by max_tokens" if cut else "answers that end"] += 1
            for call in said[:-1] if cut else said:
                counts[_verdict(call["function"])] += 1
            speed = reply.json()["metrics"]["speculative_decoding"]
            counts["passes"] += speed["verify_passes"]
            counts["accepted"] += speed["accepted_tokens"]

        await asyncio.gather(*map(ask, range(calls)))
    return counts


def _verdict(function: dict[str, str]) -> str:
    try:
        jsonschema.validate(json.loads(function["arguments"]), PARAMETERS[function["name"]])
    except (ValueError, jsonschema.ValidationError) as problem:
        print("WRONG", function, str(problem)[:200])
        return "wrong calls"
    return "valid calls"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--backend", default="jax")
    asked = parser.parse_args()
    with serving_mini(asked.drafter, asked.k, 8, 1024, asked.backend) as server:
        print(json.dumps(asyncio.run(run(f"{server.url}/v1", asked.calls, asked.tokens)), indent=1))


if __name__ == "__main__":
    main()

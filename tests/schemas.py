"""Structured output against a file of JSON schemas with instances, on a real server:

    python -m tests.schemas FILE.jsonl [--tokens 2000] [--drafter ngram] [--k 4]

FILE has a line per schema: {"name", "schema", "tests": [{"valid", "data"}]}. Counts the accepted
schemas, the invalid answers, and the instances that our masks judge differently from the file;
prints tau of the same requests with and without their schemas.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np

from specdec.constraints.constraint import TextConstraint, TextRules
from specdec.constraints.json_schema import json_grammar
from specdec.core.constraint import mask_rows
from specdec.core.errors import UserError
from specdec.core.types import Sequence
from tests.support.constrained import mini_vocabulary
from tests.support.serving import serving_mini

VERDICTS = ("valid", "wrong", "cut by max_tokens")
PROMPT = "An example of a document in JSON:\n"


def judged_valid(schema: Any, data: Any) -> bool:
    """Whether our masks let a document through, and let it end."""
    vocabulary = mini_vocabulary()
    ids = vocabulary.load().tokenize_str(json.dumps(data, ensure_ascii=False))
    constraint = TextConstraint(TextRules(grammar=json_grammar(schema)), vocabulary)
    seq = Sequence([2], constraint=constraint)
    for at in range(0, len(ids) + 1, 8):
        part = ids[at : at + 8]
        masks = mask_rows([seq], np.array([part], np.int32).reshape(1, -1), vocabulary.size)
        assert masks is not None and constraint.failure is None, constraint.failure
        for mask, token in zip(masks[0], part, strict=False):
            if not mask[token // 32] >> (token % 32) & 1:
                return False
        seq.tokens += part
        if len(part) < 8:
            end = vocabulary.stop_ids[0]
            return bool(masks[0, len(part), end // 32] >> (end % 32) & 1)
    return False


def replay(rows: list[dict[str, Any]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in rows:
        try:
            json_grammar(row["schema"])
        except UserError as problem:
            counts["refused"] += 1
            print(f"  refused {row['name']}: {problem}", file=sys.stderr)
            continue
        counts["accepted"] += 1
        for test in row["tests"]:
            ours = judged_valid(row["schema"], test["data"])
            counts["instances"] += 1
            if ours != test["valid"]:
                word = "valid instance refused" if test["valid"] else "invalid instance let through"
                counts[word] += 1
                print(f"  {word}: {row['name']}", file=sys.stderr)
    return counts


async def answers(url: str, rows: list[dict[str, Any]], tokens: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    gate = asyncio.Semaphore(16)
    async with httpx.AsyncClient(timeout=3600) as client:

        async def ask(number: int, row: dict[str, Any], constrain: bool) -> None:
            body = {"prompt": PROMPT, "max_tokens": tokens if constrain else 200, "seed": number}
            body["temperature"] = 1.0
            if constrain:
                body["structured_outputs"] = {"json": row["schema"]}
            async with gate:
                reply = await client.post(f"{url}/completions", json=body)
            kind = "with" if constrain else "without"
            if reply.status_code != 200:
                counts[f"{reply.status_code}"] += 1
                return
            choice = reply.json()["choices"][0]
            speed = reply.json()["metrics"]["speculative_decoding"]
            counts[f"passes {kind}"] += speed["verify_passes"]
            counts[f"tokens {kind}"] += speed["verify_passes"] + speed["accepted_tokens"]
            if constrain:
                counts[_verdict(row, choice)] += 1
            if (done := sum(counts[word] for word in VERDICTS)) % 20 == 0:
                print(f"  {done} answers", file=sys.stderr, flush=True)

        await asyncio.gather(*(ask(i, row, True) for i, row in enumerate(rows)))
        await asyncio.gather(*(ask(i, row, False) for i, row in enumerate(rows)))
    return counts


def _verdict(row: dict[str, Any], choice: dict[str, Any]) -> str:
    if choice["finish_reason"] == "length":
        return "cut by max_tokens"
    try:
        document = json.loads(choice["text"])
        _validator(row["schema"]).validate(document)
    except (ValueError, jsonschema.ValidationError) as problem:
        print(f"  WRONG {row['name']}: {str(problem)[:200]}", file=sys.stderr)
        return "wrong"
    return "valid"


def _validator(schema: Any) -> Any:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--backend", default="jax")
    asked = parser.parse_args()
    rows = [json.loads(line) for line in asked.file.read_text().splitlines()]
    judged = replay(rows)
    with serving_mini(asked.drafter, asked.k, 8, asked.tokens + 256, asked.backend) as server:
        counts = asyncio.run(answers(f"{server.url}/v1", rows, asked.tokens))
    kinds = "with", "without"
    tau = {kind: counts[f"tokens {kind}"] / counts[f"passes {kind}"] for kind in kinds}
    print(json.dumps({"masks": judged, "answers": counts, "tau": tau}, indent=1))


if __name__ == "__main__":
    main()

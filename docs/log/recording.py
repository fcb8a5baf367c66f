"""Records how mini's drafters fare on prompts of several categories: from every token of each
answer on, how many of seven guesses are right, greedily and at temperature 1.

    python docs/log/recording.py PROMPTS.jsonl OUT_FOLDER

PROMPTS: any file that `specdec eval-acceptance` reads, with categories. Of each category the first
EACH prompts that fit are asked. What is written (t0.jsonl, t1.jsonl) holds no prompt, only its id:
`choosing.py --recorded` reads both together.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from drafters import registry
from specdec.assembly.engine import make_engine
from specdec.assembly.model import load_model
from specdec.core.config import ModelConfig, SamplingConfig
from specdec.evaluation.prompts import Prompt, read_prompts
from specdec.evaluation.record import Recording, record, script_row
from specdec.evaluation.run import Question, Settings, questions_of
from targets import mini
from targets.tokenizer import Tokenizer, load_tokenizer

DRAFTERS = ("eagle3", "assistant")
K = 7
MAX_TOKENS = 128
CONFIG = ModelConfig("mini", slots=1, max_len=2048)


def fitting(prompts: list[Prompt], tokenizer: Tokenizer, each: int) -> list[Prompt]:
    found: list[Prompt] = []
    taken: Counter[str] = Counter()
    for prompt in prompts:
        ids = prompt.encode(tokenizer.encode, tokenizer.encode_chat)
        if taken[prompt.category] < each and len(ids) + MAX_TOKENS <= CONFIG.max_len:
            taken[prompt.category] += 1
            found.append(prompt)
    return found


def recorded(drafter: str, prompts: list[Prompt], temperature: float) -> list[Recording]:
    speculation = registry.resolved(
        registry.config_type()(drafter=drafter, k=K, loop="host"), CONFIG
    )
    model = load_model(CONFIG, speculation)
    tokenizer = model.tokenizer
    sampling = SamplingConfig(temperature=temperature).sampling(tokenizer.defaults)
    settings = Settings(drafter, K, MAX_TOKENS, sampling, frozenset(tokenizer.stop_ids))
    asked: list[Question]
    asked, _ = questions_of(
        prompts,
        lambda prompt: prompt.encode(tokenizer.encode, tokenizer.encode_chat),
        settings,
        CONFIG.max_len,
    )

    def tell(done: int, total: int) -> None:
        if done % 10 == 0:
            print(f"{drafter}, T = {temperature:g}: {done} of {total}", flush=True)

    return record(make_engine(model, speculation), asked, settings, tell)


def keep_others(rows: list[dict[str, Any]], file: Path) -> None:
    """What other drafters were recorded with in this file, beside what is new."""
    for row, line in zip(rows, file.read_text().splitlines(), strict=True):
        old = json.loads(line)
        assert old["answer"] == row["answer"], "drafters change no token"
        row["recorded"]["right"] = old["recorded"]["right"] | row["recorded"]["right"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=DRAFTERS, help="keep the others' in OUT")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(mini.path("mini"))
    prompts = fitting(read_prompts(options.prompts), tokenizer, options.each)
    for temperature in (1.0, 0.0):
        found = [recorded(drafter, prompts, temperature) for drafter in options.only]
        file = options.out / f"t{temperature:g}.jsonl"
        rows = []
        for prompt, *each in zip(prompts, *found, strict=True):
            row = script_row(each, options.only, K)
            del row["prompt"]
            rows.append({"id": prompt.id, "category": prompt.category} | row)
        if set(options.only) != set(DRAFTERS):
            keep_others(rows, file)
        lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        file.write_text("".join(lines))


if __name__ == "__main__":
    main()

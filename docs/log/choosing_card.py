"""`auto` in the captured loop of a card, on recorded texts, against single choices timed beside it,
and on texts of which nothing is ever guessed right.

The texts are `recording.py`'s; every forward is at full cost, on random weights. One process loads
the model once, and stops after the first kind that ends later than --seconds.

    PYTHONPATH=. python docs/log/choosing_card.py OUT.json --recorded docs/results/cpu/recording \
        --prompts FILE --kinds "eagle3, T = 1, coding" --with eagle3
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from choosing import K, useless  # noqa: E402
from recorded import Text, kinds_of  # noqa: E402

from drafters import registry  # noqa: E402
from specdec.assembly.model import Model  # noqa: E402
from specdec.bench.script_file import Recorded, ScriptRow  # noqa: E402
from specdec.bench.scripted import ScriptPlan, TimedPass, timed_passes  # noqa: E402
from specdec.cli.start import loaded_model  # noqa: E402
from specdec.core.config import ModelConfig, SpeculationConfig  # noqa: E402
from specdec.core.provenance import gpus  # noqa: E402

CUDA = "cuda", "fp8"
BESIDE = {1: (1, 3, 7), 8: (1, 3, 7), 32: (1, 3)}
"""By batch, the draft lengths of the drafter with weights that are timed alone."""
TEXTS = {1: 4, 8: 24, 32: 64}
"""By batch, how many are said."""


def loaded(
    name: str, random: str, slots: int, max_len: int = 1024, target: tuple[str, str] = CUDA
) -> tuple[Model, SpeculationConfig]:
    """A model of random weights, with `auto` beside this drafter. target: backend and dtype."""
    backend, dtype = target
    config = ModelConfig(backend=backend, dtype=dtype, slots=slots, max_len=max_len)
    asked = registry.config_type()(drafter="auto", k=K, auto_with=name)
    auto = registry.resolved(asked, config, random=bool(random))
    return loaded_model(config, auto, random=random), auto


def planned(texts: list[Text], batch: int, name: str) -> ScriptPlan:
    """As many as TEXTS says, each text again and again."""
    rows = [
        ScriptRow(text.prompt, text.answer, None, None, Recorded(K, {name: text.right}))
        for text in islice(cycle(texts), TEXTS[batch])
    ]
    return ScriptPlan(rows, None, (batch,), (K,), 1)


def speed(model: Model, speculation: SpeculationConfig, plan: ScriptPlan) -> float:
    """Tokens per second."""
    found: list[TimedPass] = [timed for _, timed in timed_passes(model, speculation, plan)]
    assert not any(timed.differing for timed in found)
    return sum(timed.tokens for timed in found) / sum(timed.seconds for timed in found)


def measured(
    model: Model, auto: SpeculationConfig, name: str, texts: list[Text], batch: int
) -> dict[str, Any]:
    plan, wrong = planned(texts, batch, name), planned(useless(texts), batch, name)
    singles = {"none 0": speed(model, registry.plain(auto), plan)}
    for k in BESIDE[batch]:
        singles[f"{name} {k}"] = speed(model, replace(auto, drafter=name, k=k), plan)
    for lookup in ("suffix", "ngram"):
        singles[f"{lookup} {K}"] = speed(model, replace(auto, drafter=lookup, k=K), plan)
    best = max(singles, key=lambda single: singles[single])
    own = speed(model, auto, plan)
    plain = speed(model, registry.plain(auto), wrong)
    return {
        "tokens_per_second": singles | {"auto": own},
        "best": best,
        "over_best": own / singles[best],
        "over_plain": own / singles["none 0"],
        "useless_over_plain": speed(model, auto, wrong) / plain,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--recorded", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", required=True)
    parser.add_argument("--with", dest="name", default="eagle3")
    parser.add_argument("--random", default="gemma-4-31b")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=1e9)
    given, began = parser.parse_args(), time.monotonic()
    batches = [int(batch) for batch in given.batches.split(",")]
    model, auto = loaded(given.name, given.random, max(batches))
    table: dict[str, Any] = {}
    kinds = dict(kinds_of(given.recorded, given.prompts))
    for kind in given.kinds:
        for batch in batches:
            if time.monotonic() - began > given.seconds:
                return
            found = measured(model, auto, given.name, kinds[kind], batch)
            table[f"{kind}, batch {batch}"] = found
            print(kind, batch, found, flush=True)
            given.out.write_text(json.dumps({"gpus": gpus(), "k": K, "rows": table}, indent=1))


if __name__ == "__main__":
    main()

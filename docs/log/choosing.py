"""What `auto` makes of its drafters, against the best one of them in hindsight, and a useless one.

No model is asked: the answers are given (edited files, code, English prose, random words, and texts
that change from one to another in the middle), and time is a table: 31B in FP8 on one H200, calls
of so many tokens as measured (docs/figures.md, "many users"), interpolated; a draft step of an
EAGLE-3 head 0.19 ms. The drafter with weights is right as often as a tau per kind of text says. The
policy is the product's, driven by the product's engine.

    python docs/log/choosing.py OUT.json
    python docs/log/choosing.py OUT.json --recorded docs/results/cpu/recording --prompts FILE

With --recorded texts and guesses are those of `recording.py`: mini's answers to FILE, and where its
own drafters were right on them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from edits import DEVICE_SUFFIX, cases, device_suffix, modules  # noqa: E402
from recorded import Text, kinds_of  # noqa: E402

from drafters.auto.host import AutoDrafter, Weighted  # noqa: E402
from drafters.ngram.host import NgramDrafter  # noqa: E402
from drafters.none.host import NoDrafter  # noqa: E402
from drafters.suffix.host import SuffixDrafter  # noqa: E402
from specdec.core.cycle import host_cycle  # noqa: E402
from specdec.core.engine import Engine  # noqa: E402
from specdec.core.policy.choice import Menu, Policy  # noqa: E402
from specdec.core.policy.costs import Work  # noqa: E402
from specdec.core.protocols import OneByOne  # noqa: E402
from specdec.core.script import (  # noqa: E402
    Line,
    Script,
    ScriptedDrafter,
    ScriptedTarget,
    drawn_right,
)
from specdec.core.types import Sequence, Step  # noqa: E402
from targets import mini  # noqa: E402
from targets.tokenizer import Tokenizer, load_tokenizer  # noqa: E402

K = 7
DEPTHS = 0, 1, 3, 7
TOKENS = 1, 8, 32, 64, 128, 256
MS = 8.71, 9.31, 12.2, 16.5, 28.0, 53.9
"""A call of so many tokens, 31B in FP8 on one H200: rows at once / tokens per second."""
DRAFT_MS = 0.19
MADE: dict[str, Callable[[], Any]] = {
    "none": NoDrafter,
    "suffix": SuffixDrafter,
    "ngram": NgramDrafter,
    DEVICE_SUFFIX: device_suffix,
}
PROMPT = 300
ANSWER = 400
SLOTS = 32
MAX_LEN = 6000
LEAST = 64
"""Texts of a row at least."""
RATES = {"edits": 0.8, "code": 0.85, "prose": 0.65, "words": 0.3}
"""Chance that the next guess of the drafter with weights is right, by kind of text."""


class Table:
    """The costs, and the time that has passed."""

    one_width = False
    """Whether all cycles verify K guesses, as one compiled program does."""

    def __init__(self) -> None:
        self.passed = 0.0

    def seconds(self, work: Work) -> float:
        call = np.interp(work.rows * ((K if self.one_width else work.depth) + 1), TOKENS, MS)
        return float(call + DRAFT_MS * work.drafted * (1 + work.rows / 64)) / 1e3

    def saw(self, work: Work, seconds: float) -> None:
        self.passed += self.seconds(work)

    def rows(self) -> list[tuple[Work, float]]:
        return []


class Silent(OneByOne):
    """A target that says nothing of its own."""

    slots, max_len, max_draft, prefill_chunk = SLOTS, MAX_LEN, 31, 1 << 20

    def prefill(self, seq: Sequence, start: int, stop: int) -> Step:
        return Step(np.zeros((1, 1), np.int32))

    def verify(self, seqs: Any, draft: Any) -> Step:
        return Step(np.zeros((len(seqs), np.shape(draft)[1] + 1), np.int32))


def drawn(kind: str, count: int, seed: int) -> np.ndarray:
    return drawn_right(RATES[kind] ** np.arange(1, 16), count, seed)  # pyright: ignore


def texts(kind: str, count: int, tokenizer: Tokenizer) -> Iterator[Text]:
    chance = random.Random(1)
    if kind == "edits":
        for number, case in enumerate(cases(count, 0.05, tokenizer)):
            answer = case.answer[: 3 * ANSWER]
            yield Text(case.prompt, answer, drawn(kind, len(answer), number))
        return
    if kind == "words":
        for number in range(count):
            ids = [chance.randrange(300, 4000) for _ in range(PROMPT + ANSWER)]
            yield Text(ids[:PROMPT], ids[PROMPT:], drawn(kind, ANSWER, number))
        return
    files = [path for path in modules() if (path.name == "topics.py") == (kind == "prose")]
    ids = tokenizer.encode("\n".join(p.read_text(errors="replace") for p in files[:60]))[1:]
    for number in range(count):
        at = chance.randrange(len(ids) - PROMPT - ANSWER)
        prompt, answer = ids[at : at + PROMPT], ids[at + PROMPT : at + PROMPT + ANSWER]
        yield Text(prompt, answer, drawn(kind, ANSWER, number))


def switched(first: list[Text], then: list[Text]) -> list[Text]:
    """Texts that are another kind of text from their middle on."""
    return [a.then(b, ANSWER) for a, b in zip(first, then, strict=True)]


class Outcome(NamedTuple):
    speed: float
    tau: float
    own_ms: float
    """What engine, text drafters and policy took per cycle, of this machine's time."""


Make = Callable[[Script, Table], tuple[Any, int]]


def said(known: list[Text], batch: int, make: Make) -> Outcome:
    """Tokens per second of the table's time; new requests come as others end, until none are left
    to fill the batch with: rows that end apart would leave it to few, which plain decoding's of one
    length do not."""
    lines = {str(i): Line(text.answer, text.right) for i, text in enumerate(known)}
    script, table = Script(lines, SLOTS, MAX_LEN), Table()
    target = ScriptedTarget(Silent(), script)
    drafter, k = make(script, table)
    auto = isinstance(drafter, AutoDrafter)
    inner, cycles, began = host_cycle(target, drafter, k), 0, time.perf_counter()

    def timed(seqs: Any, single: bool) -> Any:
        nonlocal cycles
        cycles += 1
        if not auto:
            table.saw(Work(len(seqs), k, k * isinstance(drafter, ScriptedDrafter)), 0.0)
        return inner(seqs, single)

    engine = Engine(target, drafter, timed)
    waiting = [
        Sequence(list(t.prompt), max_tokens=len(t.answer), request_id=str(i))
        for i, t in enumerate(known)
    ]
    while True:
        alive = SLOTS - len(engine.scheduler.free) + len(engine.scheduler.waiting)
        if alive < batch and not waiting:
            break
        for _ in range(min(batch - alive, len(waiting))):
            engine.submit(waiting.pop(0))
        engine.step()
    spent = 1e3 * (time.perf_counter() - began) / cycles
    tokens = engine.acceptance.emitted
    return Outcome(tokens / table.passed, engine.acceptance.tau, spent)


def auto(useless: bool = False) -> Make:
    def make(script: Script, table: Table) -> tuple[Any, int]:
        head = NoDrafter() if useless else ScriptedDrafter(NoDrafter(), script)
        menu = Menu.of(DEPTHS, (0, 1, 3, K))
        policy = Policy(K, table, menu, "head")
        drafters = {"suffix": SuffixDrafter(), "ngram": NgramDrafter()}
        return AutoDrafter(drafters, Weighted("head", head), policy), K

    return make


def alone(name: str, k: int) -> Make:
    def make(script: Script, table: Table) -> tuple[Any, int]:
        return (ScriptedDrafter(NoDrafter(), script) if name == "head" else MADE[name]()), k

    return make


SINGLES = [("none", 0), *((name, k) for name in ("suffix", "ngram", "head") for k in (1, 3, 7))]


Speeds = dict[tuple[Any, ...], float]
"""Of drafters without weights, by what they were given: each text comes once for each that has."""
Alone = Callable[[list[Text], int, str, int], float]
"""Texts, batch, a drafter and its K -> tokens per second."""


def row(known: list[Text], batch: int, seen: Speeds) -> dict[str, Any]:
    """`auto` over the best single drafter and K, which nobody knows beforehand."""
    singles = single_speeds(SINGLES, known, batch, seen, in_host_loop)
    best = max(singles, key=lambda name: singles[name])
    found = said(known, batch, auto())
    return {
        "auto_over_best": round(found.speed / singles[best], 3),
        "best": best,
        "auto_over_plain": round(found.speed / singles["none 0"], 3),
        "tau": round(found.tau, 3),
        "host_ms_per_cycle": round(found.own_ms, 3),
    }


def in_host_loop(known: list[Text], batch: int, name: str, k: int) -> float:
    return said(known, batch, alone(name, k)).speed


def single_speeds(
    choices: list[tuple[str, int]], known: list[Text], batch: int, seen: Speeds, speed: Alone
) -> dict[str, float]:
    """Of each drafter alone, with its K."""
    singles = {}
    for name, k in choices:
        key = name, k, batch, tuple(tuple(text.answer) for text in known)
        if name == "head" or key not in seen:
            seen[key] = speed(known, batch, name, k)
        singles[f"{name} {k}"] = seen[key]
    return singles


def useless_over_plain(known: list[Text], batch: int) -> float:
    """`auto` over plain decoding where nothing that is guessed is ever right."""
    wrong = useless(known)
    plain = in_host_loop(wrong, batch, "none", 0)
    return round(said(wrong, batch, auto()).speed / plain, 3)


def useless(known: list[Text]) -> list[Text]:
    """As long, repeating nothing, and of which nothing is ever guessed right."""
    words = [np.random.default_rng(len(t.answer)).permutation(4000) for t in known]
    return [
        t._replace(answer=own[: len(t.answer)].tolist(), right=t.right * 0)
        for t, own in zip(known, words, strict=True)
    ]


def enough(known: list[Text], batch: int) -> list[Text]:
    """Each as often as it takes for LEAST texts, and to fill a batch four times, in an order of
    chance: the cold start is in the figure, and is not all of it. A batch of 32 needs more texts
    than there are of most kinds."""
    times = math.ceil(max(LEAST, 4 * batch) / len(known))
    return random.Random(0).sample(known * times, len(known) * times)


def made_kinds(count: int) -> dict[str, list[Text]]:
    tokenizer = load_tokenizer(mini.path("mini"))
    kinds = {kind: list(texts(kind, count, tokenizer)) for kind in RATES}
    kinds["edits, then prose"] = switched(kinds["edits"], kinds["prose"])
    kinds["words, then code"] = switched(kinds["words"], kinds["code"])
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--recorded", type=Path)
    parser.add_argument("--prompts", type=Path)
    options = parser.parse_args()
    if options.recorded is None:
        kinds, about = made_kinds(options.texts), {"texts": options.texts, "rates": RATES}
    else:
        kinds = dict(kinds_of(options.recorded, options.prompts))
        about = {"texts": {kind: len(known) for kind, known in kinds.items()}}
    about |= {"k": K, "call_ms": dict(zip(map(str, TOKENS), MS, strict=True))}
    table: dict[str, dict[str, Any]] = {}
    seen: Speeds = {}
    for kind, known in kinds.items():
        for batch in map(int, options.batches.split(",")):
            filling = enough(known, batch)
            found = row(filling, batch, seen)
            if options.recorded is None:
                found["useless_over_plain"] = useless_over_plain(filling, batch)
            table[f"{kind}, batch {batch}"] = found
            print(kind, batch, found, flush=True)
        options.out.write_text(json.dumps(about | {"rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()

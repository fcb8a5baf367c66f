"""A random campaign: whatever is drawn, each request's text is that of its own lone plain run.

python -m tests.campaign --seconds 120 --seed 3 --backend cuda
python -m tests.campaign --case '<what a failure printed>'
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.types import Sequence, TokenLogprob
from tests.lossless import campaign_parts as parts
from tests.lossless.campaign_draw import Case, draw_case


class Failed(AssertionError):
    """A difference or a crash; the message has the command that reproduces it."""

    def __init__(self, problem: str, case: Case) -> None:
        line = json.dumps(case, separators=(",", ":"))
        again = f"python -m tests.campaign --case '{line}'"
        super().__init__(f"{problem}\ncase: {line}\nagain: {again}")
        self.case = case


@dataclass
class Outcome:
    """One request's events, accumulated."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None

    def agrees(self, plain: Outcome) -> bool:
        if self.finish == "cancelled":
            whole = plain.tokens[: len(self.tokens)], plain.logprobs[: len(self.logprobs)]
            return (self.tokens, self.logprobs) == whole
        return self == plain


@dataclass
class Counts:
    cases: int = 0
    runs: int = 0
    requests: int = 0
    tokens: int = 0
    cancelled: int = 0
    accepted: int = 0
    gave_way: int = 0
    refused: int = 0
    """Targets and drafters that this device refuses in one line, such as a target with rows that
    depend on their place there."""

    def __str__(self) -> str:
        return ", ".join(f"{value} {name}" for name, value in vars(self).items())


def drive(engine: Engine, seqs: list[Sequence], requests: list[dict[str, Any]]) -> list[Outcome]:
    """Submit and cancel each at its turn, until all have ended."""
    outcomes = {id(seq): Outcome() for seq in seqs}
    coming, turn = list(zip(seqs, requests, strict=True)), 0
    while coming or not engine.idle:
        for seq, _ in (pair for pair in coming if pair[1]["at"] <= turn):
            engine.submit(seq)
        coming = [pair for pair in coming if pair[1]["at"] > turn]
        for seq, request in zip(seqs, requests, strict=True):
            seq.cancelled |= request["cancel"] == turn
        for event in engine.step():
            outcome = outcomes[id(event.sequence)]
            assert outcome.finish is None, "an event after the last one"
            outcome.tokens += event.tokens
            outcome.logprobs += event.logprobs or ()
            outcome.finish, outcome.error = event.finish, event.error
        turn += 1
    for seq in seqs:
        assert seq.tokens[seq.prompt_len :] == outcomes[id(seq)].tokens, "text and events differ"
    return [outcomes[id(seq)] for seq in seqs]


def alone(bench: parts.Bench, request: dict[str, Any]) -> Outcome:
    """A request's outcome with plain decoding and no other requests."""
    lone = request | {"at": 0, "cancel": None}
    engine = bench.engine(parts.PLAIN)
    (plain,) = drive(engine, [parts.sequence(request, bench.target.vocab)], [lone])
    assert plain.error is None and plain.tokens, plain
    return plain


def check_run(
    bench: parts.Bench, engine: Engine, requests: list[dict[str, Any]], counts: Counts
) -> None:
    """Raise AssertionError if a request's outcome differs from `alone`."""
    plains = [alone(bench, request) for request in requests]
    seqs = [
        parts.sequence(request, bench.target.vocab, plain.tokens)
        for request, plain in zip(requests, plains, strict=True)
    ]
    outcomes = drive(engine, seqs, requests)
    for i, (plain, outcome) in enumerate(zip(plains, outcomes, strict=True)):
        assert outcome.agrees(plain), f"request {i} said {outcome}, alone and plainly {plain}"
        counts.requests += 1
        counts.tokens += len(outcome.tokens)
        counts.cancelled += outcome.finish == "cancelled"
    counts.runs += 1
    counts.accepted += engine.acceptance.accepted
    counts.gave_way += engine.gave_way


def check_case(case: Case, counts: Counts) -> None:
    """Raises Failed, with as many runs of the case as it took."""
    done = 0
    try:
        bench = allowed(lambda: parts.Bench(case["target"]), counts)
        for run in case["runs"] if bench else ():
            done += 1
            engine = allowed(partial(bench.engine, run), counts)
            if engine:
                check_run(bench, engine, run["requests"], counts)
        counts.cases += bench is not None
    except Exception as problem:  # whatever goes wrong, the case is what matters
        report = str(problem) if isinstance(problem, AssertionError) else traceback.format_exc()
        raise Failed(report, case | {"runs": case["runs"][:done]}) from problem


def allowed(make: Callable[[], Any], counts: Counts) -> Any | None:
    """What `make` makes, None where the product refuses it."""
    try:
        return make()
    except UserError as refusal:
        counts.refused += 1
        print(f"refused: {refusal}", file=sys.stderr)
        return None


def campaign(seconds: float, seed: int, backend: str, device: str, show: bool = False) -> Counts:
    """Draw and check cases until the seconds are over. Raises Failed at the first that fails."""
    counts, end, number = Counts(), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        case = draw_case(Random(f"{seed} {number}"), backend, device)
        if show:  # before it runs: some crashes take the process along
            print(json.dumps(case, separators=(",", ":")), flush=True)
        check_case(case, counts)
        number += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("jax", "cuda"), default="jax")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of --backend cuda")
    parser.add_argument("--case", type=json.loads, help="one case, as a failure printed it")
    parser.add_argument("--show", action="store_true", help="print each case before it runs")
    options = parser.parse_args()
    if options.case:
        counts = Counts()
        check_case(options.case, counts)
    else:
        device = options.device or (parts.cuda_device() if options.backend == "cuda" else "cpu")
        counts = campaign(options.seconds, options.seed, options.backend, device, options.show)
    print(f"no difference: {counts}")


if __name__ == "__main__":
    main()

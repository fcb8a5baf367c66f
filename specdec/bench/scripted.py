"""Speed on given texts: plain decoding, and each drafter with each K, as an engine drives them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence as Seqs
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from drafters.registry import find, plain
from specdec.assembly.engine import loop_of, make_engine
from specdec.assembly.model import Model, Status
from specdec.bench.aggregate import spread
from specdec.bench.script_file import ScriptRow
from specdec.bench.timing import prefilled
from specdec.core.config import SpeculationConfig
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.script import Line, Script, drawn_right
from specdec.core.stats import Acceptance
from specdec.core.types import Sequence
from targets.backend import LoadedTarget


@dataclass(frozen=True)
class Point:
    """One configuration that is timed."""

    drafter: str
    k: int
    predicted: bool
    """Whether the requests are sent with their predictions."""
    batch: int
    """Requests that decode together, as long as none has ended."""


@dataclass(frozen=True)
class TimedPass:
    """One pass over the script: decoding alone, without prompts and their first tokens."""

    tokens: int
    seconds: float
    tau: float
    differing: int
    """Requests with an answer that differs from the script."""


@dataclass(frozen=True)
class ScriptPlan:
    """The requests and configurations to time."""

    rows: Seqs[ScriptRow]
    acceptance: tuple[float, ...] | None
    """Acceptance of drafters with weights; None: their own guesses are used."""
    batches: tuple[int, ...]
    ks: tuple[int, ...]
    repeats: int

    def right(self, speculation: SpeculationConfig) -> list[np.ndarray | None]:
        """For each row int32 [tokens]: how many guesses of the drafter with weights are right if
        its draft begins at that token. None: its own guesses are used."""
        name = _weighted(speculation)
        return [
            None if name is None else self._right_of(row, name, number)
            for number, row in enumerate(self.rows)
        ]

    def _right_of(self, row: ScriptRow, name: str, number: int) -> np.ndarray | None:
        recorded, shares = row.recorded_of(name), row.acceptance or self.acceptance
        if recorded is not None or shares is None:
            return recorded
        return drawn_right(shares, len(row.answer), seed=number)

    def refuse(self, speculation: SpeculationConfig, random: bool, target: LoadedTarget) -> None:
        """Raise UserError for what can't be timed."""
        longest = max(len(row.prompt) + len(row.answer) for row in self.rows)
        if longest > target.max_len:
            raise UserError(
                f"--script has a request of {longest} tokens, prompt and answer: it does not fit "
                f"--max-len {target.max_len}"
            )
        largest = max(max(*row.prompt, *row.answer, *(row.prediction or ())) for row in self.rows)
        if largest >= target.vocab:
            raise UserError(
                f"--script has the token id {largest}, but the model's vocabulary ends at "
                f"{target.vocab - 1}"
            )
        if (name := _weighted(speculation)) is not None:
            self._refuse_shares(name, random)
        elif self.acceptance or any(row.acceptance for row in self.rows):
            raise UserError(
                f"--acceptance is of drafters with weights: what {speculation.drafter} guesses "
                "follows from the text"
            )

    def _refuse_shares(self, name: str, random: bool) -> None:
        drawn = [row for row in self.rows if row.recorded_of(name) is None]
        acceptances, k = [row.acceptance or self.acceptance for row in drawn], max(self.ks)
        if None in acceptances and (random or any(acceptances) or len(drawn) < len(self.rows)):
            raise UserError(
                f"--script needs --acceptance for --drafter {name}: random weights agree with no "
                "text; give the shares that eval-acceptance reports by position, or a script that "
                "it recorded"
            )
        if self.acceptance and not drawn:
            raise UserError(
                f"--acceptance has no use here: the script has recorded guesses of {name}; leave "
                "it out"
            )
        short = min((len(shares) for shares in acceptances if shares), default=k)
        if short < k:
            raise UserError(f"--acceptance has {short} positions, but up to {k} tokens are drafted")
        taken = [row.recorded for row in self.rows if row.recorded_of(name) is not None]
        short = min((recorded.k for recorded in taken if recorded), default=k)
        if short < k:
            raise UserError(
                f"--script was recorded with {short} guesses, but up to {k} are drafted"
            )


def _weighted(speculation: SpeculationConfig) -> str | None:
    return find(speculation.drafter).weighted_name(speculation)


def measure_script(
    model: Model, speculation: SpeculationConfig, plan: ScriptPlan, status: Status
) -> list[dict[str, Any]]:
    """A row per point: tokens per second, tau, and the speed over plain decoding's."""
    found: dict[Point, list[TimedPass]] = {}
    for _ in range(plan.repeats):
        for config in _configs(model, speculation, plan.ks):
            with status(f"decoding the script with {config.drafter}, K = {config.k}"):
                for point, timed in timed_passes(model, config, plan):
                    found.setdefault(point, []).append(timed)
    return rows_of(found, loop_of(model, speculation))


def _configs(
    model: Model, speculation: SpeculationConfig, ks: Seqs[int]
) -> list[SpeculationConfig]:
    """Plain decoding, and the drafter with each K; for a composite drafter also its parts."""
    composite = model.drafters[speculation.drafter].composite
    names = [*(composite.parts if composite else ()), speculation.drafter]
    device = loop_of(model, speculation) == "device"
    stepless = {name for name in names if model.target.backend not in find(name).device_loops}
    names = [n for n in names if find(n).most_k and not (device and n in stepless)]
    drafting = [replace(speculation, drafter=name, k=k) for name in names for k in ks]
    return [plain(speculation), *drafting]


def rows_of(found: dict[Point, list[TimedPass]], loop: str) -> list[dict[str, Any]]:
    speeds = {p: [t.tokens / t.seconds for t in times] for p, times in found.items()}
    median = {p: float(np.median(each)) for p, each in speeds.items()}
    rows = []
    for point, times in found.items():
        row = {**asdict(point), "loop": loop, "tokens_per_second": median[point]}
        row |= {"spread": spread(speeds[point]), "repeats": speeds[point]}
        row |= {"over_plain": median[point] / median[_plain_of(found, point)]}
        row |= {"tau": times[0].tau, "tokens": times[0].tokens}
        rows.append(row | {"differing": sum(t.differing for t in times)})
    return rows


def _plain_of(found: dict[Point, list[TimedPass]], point: Point) -> Point:
    return next(p for p in found if p.k == 0 and not p.predicted and p.batch == point.batch)


def timed_passes(
    model: Model, config: SpeculationConfig, plan: ScriptPlan
) -> Iterator[tuple[Point, TimedPass]]:
    """Every batch, without the predictions and with them; one engine for all."""
    target = model.target
    script = Script(_lines(plan, config), target.slots, target.max_len)
    engine = make_engine(model, config, script=script)
    predicts = any(row.prediction is not None for row in plan.rows) and config.k > 0
    for batch in plan.batches:
        for predicted in (False, True) if predicts else (False,):
            first = list(enumerate(plan.rows))[:batch]
            _say(engine, first, predicted)  # compiles and captures what is needed
            yield (
                Point(config.drafter, config.k, predicted, batch),
                _timed(engine, plan.rows, batch, predicted),
            )


def _lines(plan: ScriptPlan, config: SpeculationConfig) -> dict[str, Line]:
    rows = zip(plan.rows, plan.right(config), strict=True)
    return {str(number): Line(row.answer, right) for number, (row, right) in enumerate(rows)}


Numbered = list[tuple[int, ScriptRow]]


def _timed(engine: Engine, rows: Seqs[ScriptRow], batch: int, predicted: bool) -> TimedPass:
    """Decode the whole script in groups of `batch` requests."""
    engine.acceptance = Acceptance()
    numbered, tokens, seconds, differing = list(enumerate(rows)), 0, 0.0, 0
    for start in range(0, len(numbered), batch):
        group = numbered[start : start + batch]
        seqs, took = _say(engine, group, predicted)
        tokens, seconds = tokens + sum(s.emitted - 1 for s in seqs), seconds + took
        pairs = zip(seqs, group, strict=True)
        differing += sum(s.tokens[s.prompt_len :] != row.answer for s, (_, row) in pairs)
    return TimedPass(tokens, seconds, engine.acceptance.tau, differing)


def _say(engine: Engine, group: Numbered, predicted: bool) -> tuple[list[Sequence], float]:
    """Prefill all prompts, then decode. Returns the sequences and the seconds of decoding."""
    seqs = [_request(number, row, predicted) for number, row in group]
    prefilled(engine, seqs)
    started = time.perf_counter()
    while not engine.idle:
        engine.step()
    return seqs, time.perf_counter() - started


def _request(number: int, row: ScriptRow, predicted: bool) -> Sequence:
    seq = Sequence(list(row.prompt), max_tokens=len(row.answer), request_id=str(number))
    if predicted and row.prediction is not None:
        seq.prediction = Prediction(PredictedText(row.prediction), seq.prompt_len)
    return seq

"""The speed in a run's log is that of its steps, wherever evaluations and saves fall."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.eagle3_worker import RECIPE, answers
from training import pace, pretrain, trainer
from training.packing import pack


class Clock:
    """Stands still, but for what is said to take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def speeds(log: Path) -> dict[int, float]:
    rows = map(json.loads, log.read_text().splitlines())
    return {row["step"]: row["tokens_per_second"] for row in rows if "tokens_per_second" in row}


@pytest.mark.parametrize("start", [0, 7])
def test_a_head_s_log(tmp_path, monkeypatch, start) -> None:
    clock, rows = Clock(), pack(answers(60), RECIPE.length)
    monkeypatch.setattr(pace, "time", clock)
    run: Any = object.__new__(trainer.Trainer)
    run.run, run.rows, run.params = tmp_path, rows, None
    run.recipe = replace(RECIPE, evaluate_every=4, save_every=3)
    run.state = SimpleNamespace(step=start)
    run._spread = SimpleNamespace(shares=lambda batch: batch)

    def step(state: Any, *_: Any) -> tuple[Any, dict[str, Any]]:
        clock.passes(2)
        return state, {}

    run._step, run.evaluate = step, lambda: clock.passes(100) or {}
    run._save = lambda _: clock.passes(1000)
    run.train(trainer.LOG_EVERY + 1)
    expected = RECIPE.batch * RECIPE.length / 2
    assert speeds(tmp_path / "log.jsonl") == {
        trainer.LOG_EVERY: expected, trainer.LOG_EVERY + 1: expected,
    }  # fmt: skip


def test_a_model_s_log(tmp_path, monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    run: Any = object.__new__(pretrain.Pretrainer)
    run.run, run.state = tmp_path, SimpleNamespace(step=3)
    run.config = SimpleNamespace(evaluate_every=6, save_every=7)
    run.manager, run._rate = SimpleNamespace(wait_until_finished=lambda: None), lambda step: 0.1
    run._one = lambda step: (clock.passes(2) or 1.0, 64)
    run._evaluate, run._save = (lambda _: clock.passes(100)), (lambda _: clock.passes(1000))
    run.train(pretrain.LOG_EVERY + 1)
    assert speeds(tmp_path / "log.jsonl") == {pretrain.LOG_EVERY: 32, pretrain.LOG_EVERY + 1: 32}

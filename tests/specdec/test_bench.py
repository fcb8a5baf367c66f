"""The bench's measurements: requested acceptance, figures with their spread, tables and a plot."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from drafters.none.host import NoDrafter
from specdec.bench import aggregate, timing as bench
from specdec.bench.aggregate import Figures
from specdec.bench.display import plot_bench, print_bench
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.provenance import gpus, run_record
from tests.support.fakes import FakeTarget
from tests.support.places import ROOT


def test_rows_decode_together_however_many_prompts_there_are():
    """One prompt is read per turn; the first row must not be done when the last one joins."""
    target, met, made = FakeTarget(slots=12), [], []
    inner = host_cycle(target, NoDrafter(), 0)

    def watched(seqs, single):
        met.append(len(seqs))
        return inner(seqs, single)

    def make_engine():
        made.append(Engine(target, NoDrafter(), watched))
        return made[-1]

    prompts = [[3 + i, 5] for i in range(12)]
    run = bench.end_to_end("twelve", make_engine, prompts, max_tokens=6)
    assert met == [12] * 10 and run.tokens == 72 and run.tau == 1
    assert len(made) == 1  # what it compiled for the first run serves the second
    samples = bench.cycle_samples(made[0], prompts)
    assert len(samples) == bench.CYCLE_SAMPLES and set(met[10:]) == {12} and made[0].idle


def test_cycles_are_counted_by_round_and_the_engine_is_left_idle():
    target = FakeTarget(slots=2)
    inner = host_cycle(target, NoDrafter(), 0)
    engine = Engine(target, NoDrafter(), lambda seqs, single: inner(seqs, single))
    samples = bench.cycle_samples(engine, [[1, 2], [3]])
    assert len(samples) == bench.CYCLE_SAMPLES and min(samples) > 0 and engine.idle
    short = FakeTarget(slots=1, max_len=20)
    engine = Engine(short, NoDrafter(), host_cycle(short, NoDrafter(), 0))
    assert len(bench.cycle_samples(engine, [[1]])) < bench.CYCLE_SAMPLES and engine.idle


def test_first_tokens_and_steps_are_sampled():
    target = FakeTarget(slots=2)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    assert len(bench.first_token_samples(engine, 9, target.vocab)) == bench.FIRST_TOKENS
    seqs = bench.fill(target, 2, 9, target.vocab)
    assert seqs[0].tokens != seqs[1].tokens
    assert len(bench.step_samples(target, seqs, 4)) == bench.STEPS


def test_texts_that_do_not_fit_at_once_are_refused_in_one_line(monkeypatch):
    target = FakeTarget(slots=2)

    def prefill(seq, start, stop):
        raise MemoryError("no pages are left for a text of 9 tokens")

    monkeypatch.setattr(target, "prefill", prefill)
    with pytest.raises(UserError, match="2 texts of 9 tokens .* choose fewer --batches"):
        bench.fill(target, 2, 9, target.vocab)


def document() -> dict:
    """A receipt's figures by hand: the forward takes 4 s at T = 1, 5 s at T = 5; 8 bytes a step at
    a bandwidth of 4."""
    figures = Figures()
    for width, seconds in ((1, 4.0), (5, 5.0)):
        for batch in (1, 8):
            for drift in (0.0, 0.1):
                place = (batch, 512, width)
                figures.add("step", place, [seconds + 1 + drift] * 3)
                figures.add("forward", place, [seconds + drift])
    figures.add("forward", (1, 512, 7), None)
    figures.add("cycle", (1, 512, "ngram", "device", 5, 4), [5.5, 5.5])
    figures.add("first token", 128, [0.25])
    for speed in (90.0, 110.0):
        figures.add_run("end to end", bench.Run("none", speed, 1.0, 7, "same"))
    needed, runs = (lambda batch, context, width: 8), figures.run_rows("end to end")
    return {
        "architecture": "tiny",
        "gpus": [[], []],
        "read_bandwidth": 4.0,
        "steps": aggregate.step_rows(figures, needed, 4.0),
        "cycles": aggregate.cycle_rows(figures, needed, 4.0),
        "first_token": aggregate.first_token_rows(figures),
        "runs": runs,
        "synthetic": [],
        "equal": True,
    }


def test_figures_by_hand():
    found = document()
    plain, _, wide, _ = found["steps"]
    assert plain["seconds"] == pytest.approx(5.05) and plain["spread"] == pytest.approx(0.1 / 5.05)
    assert plain["forward_share"] == pytest.approx(8 / 4.05 / 4)
    assert plain["over_plain"] == 1 and wide["over_plain"] == pytest.approx(5.05 / 4.05)
    assert plain["samples"] == ((5.0,) * 3, (5.1,) * 3)
    (cycle,) = found["cycles"]
    assert cycle["overhead"] == pytest.approx(0.45)
    assert cycle["tokens_per_second_at_tau_1"] == pytest.approx(1 / 5.5)
    (run,) = found["runs"]
    assert (run["tokens_per_second"], run["spread"], run["repeatable"]) == (100.0, 0.2, True)


def test_a_receipt_is_printed_and_drawn(tmp_path):
    found = json.loads(json.dumps(document()))
    console = Console(file=io.StringIO(), width=80)
    print_bench(found, console)
    text = console.file.getvalue()
    assert "1.247" in text and "outputs equal" in text and "…" not in text
    assert "after the last run" not in text
    plot_bench(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="can't write the plot"):
        plot_bench(found, tmp_path / "missing" / "plot.png")


@pytest.mark.parametrize(
    ("clock", "power", "limited"),
    [("1830 MHz", "694.20 W", True), ("1980 MHz", "694.20 W", False), ("1830 MHz", "[N/A]", False)],
)
def test_a_gpu_at_its_limit_of_power_is_told(clock, power, limited):
    gpu = {"name": "NVIDIA H200", "clocks.sm": clock, "clocks.max.sm": "1980 MHz"}
    gpu |= {"power.draw": power, "power.limit": "700.00 W", "temperature.gpu": "61"}
    console = Console(file=io.StringIO(), width=120)
    print_bench(document() | {"gpus": [[], [gpu]]}, console)
    text = console.file.getvalue()
    assert f"{clock} of 1980 MHz, {power} of 700.00 W, 61 °C" in text
    assert ("limit of power" in text) == limited


def test_gpus_are_asked_of_nvidia_smi(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.1, 1980 MHz, 3201 MHz'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = gpus()
    assert found["name"] == "NVIDIA H200" and found["clocks.mem"] == "3201 MHz"
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert gpus() == []
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gpus() == []


def test_a_copy_without_history_says_its_commit(monkeypatch, tmp_path):
    from specdec.core import provenance

    here = Path(provenance.__file__).relative_to(ROOT)
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / here))
    assert run_record("cpu")["git"] is None
    (tmp_path / ".git-sha").write_text("abc123\n")
    assert run_record("cpu")["git"] == "abc123"

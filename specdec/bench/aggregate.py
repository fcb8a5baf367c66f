"""From samples of several repeats to figures with their spread."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence as Seqs
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from specdec.bench.timing import Run


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of the repeats' medians."""

    seconds: float
    spread: float
    """(largest - smallest) / median of the repeats' medians; 0 where there was one repeat."""
    quartiles: tuple[float, float]
    """The middle half of all samples."""
    samples: tuple[tuple[float, ...], ...]
    """All of them, by repeat."""


def timing(repeats: Seqs[Seqs[float]]) -> Timing:
    medians = [float(np.median(samples)) for samples in repeats]
    low, high = np.quantile(np.concatenate([np.asarray(r) for r in repeats]), [0.25, 0.75])
    kept = tuple(tuple(round(s, 9) for s in samples) for samples in repeats)
    return Timing(float(np.median(medians)), spread(medians), (float(low), float(high)), kept)


def spread(values: Seqs[float]) -> float:
    """(largest - smallest) / median."""
    middle = float(np.median(values))
    return (max(values) - min(values)) / middle if middle else 0.0


@dataclass
class Figures:
    """What was measured so far, by kind and place; `add` once per repeat."""

    samples: dict[str, dict[Hashable, list[list[float]]]] = field(default_factory=dict)
    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)

    def add(self, kind: str, place: Hashable, samples: list[float] | None) -> None:
        """Nothing is kept of None or no samples: what could not be timed has no figure."""
        if samples:
            self.samples.setdefault(kind, {}).setdefault(place, []).append(samples)

    def add_run(self, kind: str, run: Run) -> None:
        self.runs.setdefault(kind, {}).setdefault(run.name, []).append(run)

    def timings(self, kind: str) -> dict[Any, Timing]:
        return {place: timing(repeats) for place, repeats in self.samples.get(kind, {}).items()}

    def run_rows(self, kind: str) -> list[dict[str, Any]]:
        """A row per run: the median speed, its spread, and whether all repeats gave the same
        text."""
        rows = []
        for runs in self.runs.get(kind, {}).values():
            speeds = [run.tokens_per_second for run in runs]
            same = len({run.digest for run in runs}) == 1
            row = asdict(runs[0]) | {"tokens_per_second": float(np.median(speeds))}
            rows.append(row | {"spread": spread(speeds), "repeats": speeds, "repeatable": same})
        return rows


def step_rows(
    figures: Figures, needed: Callable[[int, int, int], int], bandwidth: float
) -> list[dict[str, Any]]:
    """A row per (batch, context, width): step and forward times, their share of the bandwidth,
    and how much longer they take than at width 1.

    needed: (batch, context, width) -> bytes that a step must read.
    """
    forwards, steps = figures.timings("forward"), figures.timings("step")
    rows = []
    for (batch, context, width), step in steps.items():
        size, forward = needed(batch, context, width), forwards.get((batch, context, width))
        row = {"batch": batch, "context": context, "width": width, "bytes": size}
        row |= asdict(step) | {"bandwidth_share": size / step.seconds / bandwidth}
        best, plain = steps, steps.get((batch, context, 1))
        if forward is not None:
            row |= {"forward": asdict(forward)}
            row |= {"forward_share": size / forward.seconds / bandwidth}
            best, plain = forwards, forwards.get((batch, context, 1))
        if plain is not None:
            row |= {"over_plain": best[batch, context, width].seconds / plain.seconds}
        rows.append(row)
    return rows


def cycle_rows(
    figures: Figures, needed: Callable[[int, int, int], int], bandwidth: float
) -> list[dict[str, Any]]:
    """A row per (batch, context, drafter, loop, width, k): a cycle's time, its share of the
    bandwidth, what it adds to the forward's own time, and plain tokens per second."""
    forwards = figures.timings("forward")
    rows = []
    for place, cycle in figures.timings("cycle").items():
        batch, context, drafter, loop, width, k = place
        forward = forwards.get((batch, context, width))
        row = {"batch": batch, "context": context, "drafter": drafter, "loop": loop}
        row |= {"width": width, "k": k, **asdict(cycle)}
        row |= {"bandwidth_share": needed(batch, context, width) / cycle.seconds / bandwidth}
        row |= {"tokens_per_second_at_tau_1": batch / cycle.seconds}
        row |= {} if forward is None else {"overhead": cycle.seconds - forward.seconds}
        rows.append(row)
    return rows


def first_token_rows(figures: Figures) -> list[dict[str, Any]]:
    timings = figures.timings("first token")
    return [{"prompt_length": n, **asdict(t)} for n, t in timings.items()]

"""A run's log as a picture: loss, agreement per draft step, and the tokens per cycle it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.core.writing import beside

PANELS = (
    ("divergence from the target (nats)", "divergence"),
    ("held-out accuracy by draft step", "accuracy"),
)


def read_log(run: Path, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind (train, heldout) in RUN/log.jsonl."""
    rows = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def plot_run(run: Path) -> None:
    """Write RUN/curve.png."""
    from matplotlib.figure import Figure

    rows = read_log(run, "heldout")
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, (title, name) in zip(axes, PANELS, strict=False):
        for n in range(len(rows[0][name])):
            axis.plot(steps, [row[name][n] for row in rows], marker=".", label=f"step {n + 1}")
        axis.set_title(title)
        axis.legend()
    for name, label in (("tau_t0", "T = 0"), ("tau_t1", "T = 1, shared noise")):
        (line,) = axes[2].plot(steps, [row[name] for row in rows], marker=".", label=label)
        real = [row.get(f"real_{name}") for row in rows]
        if None not in real:
            axes[2].plot(steps, real, ":", color=line.get_color(), label=f"{label}, real")
    axes[2].set_title("tau, simulated and real")
    axes[2].legend()
    for axis in axes:
        axis.set_xlabel("training step")
    with beside(run / "curve.png") as file:
        figure.savefig(file, dpi=120, format="png")

"""Draw what `docs/log/agent_day.py` measured.

python docs/log/agent_day_plot.py agent-day.json agent-day.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def drawn(record: dict[str, object], title: str) -> Figure:
    """First tokens and gaps, and memory, over the prompt's length."""
    turns = record["turns"]
    assert isinstance(turns, list)
    lengths = [turn["prompt"] / 1000 for turn in turns]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    times, memory = figure.subplots(1, 2)
    times.plot(lengths, [turn["first_token"] for turn in turns], label="its first token")
    times.plot(lengths, [turn["gap_reading"] for turn in turns], label="others' longest gap")
    times.set(xlabel="prompt, thousand tokens", ylabel="ms", ylim=(0, None))
    times.legend(frameon=False)
    memory.plot(lengths, [turn["gib"] for turn in turns])
    memory.set(xlabel="prompt, thousand tokens", ylabel="GiB in use", ylim=(0, None))
    figure.suptitle(title, fontsize=10)
    return figure


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    record = json.loads(source.read_text())
    title = f"{record['argv']['name']} {record['argv']['dtype']} on one {record['card']}"
    drawn(record, title).savefig(out, dpi=110)


if __name__ == "__main__":
    main()

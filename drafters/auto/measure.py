"""What cycles cost here: measured once an engine runs, so that the first choices are sound."""

from __future__ import annotations

from typing import Any

from drafters.auto.host import AutoDrafter
from specdec.core.policy.costs import COMPILED
from specdec.core.stats import Acceptance
from specdec.core.types import Sequence

CYCLES = 4
"""Measured cycles of each kind, after those in which programs are compiled."""
PROMPT = (2, 3, 4, 5)


def measure_costs(engine: Any, drafter: AutoDrafter) -> None:
    """Run cycles of every kind on the menu, with one row and with all slots' rows."""
    for rows in sorted({1, engine.target.slots}):
        for pair in drafter.policy.menu.pairs:
            drafter.forced = pair
            _run(engine, rows)
    drafter.forced = None
    engine.acceptance = Acceptance()


def _run(engine: Any, rows: int) -> None:
    """Some cycles with so many rows; prompts that differ by a token, so that none is reused."""
    room = engine.target.max_len - len(PROMPT) - 1
    wanted = COMPILED + CYCLES
    seqs = [Sequence([*PROMPT], max_tokens=room, reuse=None) for _ in range(rows)]
    for seq in seqs:
        engine.submit(seq)
    while len(engine.scheduler.running) < rows and not engine.idle:
        engine.step()
    for _ in range(wanted):
        if not engine.idle:
            engine.step()
    for seq in seqs:
        seq.cancelled = True
    engine.step()

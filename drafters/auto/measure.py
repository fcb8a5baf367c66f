"""What cycles cost here: measured once an engine runs, so that the first choices are sound."""

from __future__ import annotations

from typing import Any

from drafters.auto.host import AutoDrafter
from specdec.core.policy.costs import COMPILED
from specdec.core.stats import Acceptance
from specdec.core.types import Sampling, Sequence

CYCLES = 4
"""Measured cycles of each kind, after those in which programs are compiled."""
PROMPT = (2, 3, 4, 5)
SAMPLED = Sampling(temperature=1.0, seed=0)


def measure_costs(engine: Any, drafter: AutoDrafter) -> None:
    """Run cycles of every kind on the menu, with one row and with all slots' rows; and one of each
    with sampling, for which heads are other programs: else a request would wait for the compiler.
    """
    pairs = drafter.policy.menu.pairs
    for rows in sorted({1, engine.target.slots}):
        for drafter.forced in pairs:
            _run(engine, rows, Sampling(), COMPILED + CYCLES)
    for drafter.forced in pairs:
        _run(engine, 1, SAMPLED, COMPILED)
    drafter.forced = None
    engine.acceptance = Acceptance()


def _run(engine: Any, rows: int, sampling: Sampling, cycles: int) -> None:
    """So many cycles with so many rows."""
    room = engine.target.max_len - len(PROMPT) - 1
    seqs = [Sequence([*PROMPT], sampling, max_tokens=room, reuse=None) for _ in range(rows)]
    for seq in seqs:
        engine.submit(seq)
    while len(engine.scheduler.running) < rows and not engine.idle:
        engine.step()
    for _ in range(cycles):
        if not engine.idle:
            engine.step()
    for seq in seqs:
        seq.cancelled = True
    engine.step()

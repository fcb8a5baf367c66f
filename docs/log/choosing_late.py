"""What `auto` makes of its drafters in the captured loop, where the host chooses a cycle late.

As choosing.py, whose texts and times these are; the chooser is the product's
(`drafters/auto/late.py`), and the device is played: it guesses from the text as it really is, the
host chooses from the text as it was a cycle ago. Single choices are played in the same loop: there
too the host hears of a row's end a cycle late.

    python docs/log/choosing_late.py OUT.json --recorded docs/results/cpu/recording --prompts FILE

With --one-width it is JAX's traced loop: every cycle verifies K guesses, a choice holds for up to
eight cycles where the product says so, and the host has read them before it makes the next one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from choosing import (  # noqa: E402
    MADE,
    SINGLES,
    SLOTS,
    K,
    Speeds,
    Table,
    enough,
    single_speeds,
    useless,
)
from edits import DEVICE_SUFFIX  # noqa: E402
from recorded import Text, kinds_of  # noqa: E402

from drafters.auto.host import AutoDrafter, Weighted  # noqa: E402
from drafters.auto.kind import LATE_DEPTHS, LOOKUP  # noqa: E402
from drafters.auto.late import EITHER, NO_SOURCE, TEXT, WEIGHTS, LateChooser  # noqa: E402
from drafters.none.host import NoDrafter  # noqa: E402
from specdec.core.policy.choice import Menu, Policy  # noqa: E402
from specdec.core.policy.costs import Work  # noqa: E402
from specdec.core.types import NO_GUESS, Sequence  # noqa: E402
from targets.jax.device_loop import CYCLES  # noqa: E402

ON_DEVICE = [(DEVICE_SUFFIX if name == "suffix" else name, k) for name, k in SINGLES]
"""What device loops have."""


class Known(Table):
    """The costs, from the start."""

    def saw(self, work: Work, seconds: float) -> None:
        pass


@dataclass(eq=False)
class Row:
    """A request. seq is what the host knows, tokens what the device has said."""

    text: Text
    seq: Sequence
    tokens: list[int] = field(default_factory=list)

    @property
    def done(self) -> int:
        return len(self.tokens) - len(self.text.prompt)

    @property
    def ended(self) -> bool:
        return self.done >= len(self.text.answer)


Said = tuple[Row, int, list[int]]
"""A row, how many of its guesses were right, and what it said."""


class Chooser(Protocol):
    """What the device reads of a `LateChooser`."""

    take: np.ndarray
    runs: bool
    depth: int
    lasts: bool

    def choose(self, seqs: list[Sequence], /) -> None: ...


@dataclass
class Single:
    """A `Chooser` of one drafter and depth for every cycle."""

    name: str
    depth: int
    lasts = True

    def __post_init__(self) -> None:
        self.runs = self.name == "head"
        whose = {"none": NO_SOURCE, "head": WEIGHTS}.get(self.name, TEXT)
        self.take = np.full(SLOTS, whose)

    def choose(self, seqs: list[Sequence], /) -> None:
        pass


class Device:
    """The captured cycle: whose guesses a row takes is what the host wrote before it."""

    def __init__(self, chooser: Chooser, lookup: str) -> None:
        self._chooser, self._lookup = chooser, MADE[lookup]()

    def admit(self, seq: Sequence) -> None:
        self._lookup.reset(seq)

    def cycle(self, rows: list[Row]) -> list[Said]:
        return [(row, *self._said(row)) for row in rows if not row.ended]

    def _said(self, row: Row) -> tuple[int, list[int]]:
        coming = row.text.answer[row.done :]
        right = min(self._right(row, coming), len(coming) - 1)
        row.tokens += coming[: right + 1]
        return right, coming[: right + 1]

    def _right(self, row: Row, coming: list[int]) -> int:
        chooser, take = self._chooser, self._chooser.take[row.seq.slot]
        if not chooser.choice.depth or take == NO_SOURCE:
            return 0
        now = Sequence(list(row.tokens), slot=row.seq.slot)
        guesses = np.asarray(self._lookup.propose([now], chooser.choice.depth).tokens)[0]
        silent = guesses[0] == NO_GUESS
        if take in (TEXT, EITHER) and not silent:
            both = min(len(guesses), len(coming))
            return int((guesses[:both] == np.array(coming[:both])).cumprod().sum())
        weights = chooser.runs and (take == WEIGHTS or (take == EITHER and silent))
        return min(int(row.text.right[row.done]), chooser.choice.depth) if weights else 0


def dispatched(device: Device, rows: list[Row], most: int) -> list[list[Said]]:
    """Up to so many cycles, fewer where a row ends; of each what was said."""
    cycles: list[list[Said]] = []
    while len(cycles) < most and (came := device.cycle(rows)):
        cycles.append(came)
        if any(row.ended for row in rows):
            break
    return cycles


def auto(known: list[Text], batch: int) -> float:
    """Tokens per second of the table's time, as the product chooses."""
    costs = Known()
    drafter = AutoDrafter(
        {LOOKUP: MADE[DEVICE_SUFFIX]()},
        Weighted("head", NoDrafter()),
        Policy(K, costs, Menu(()), "head"),
    )
    depths = {K} if costs.one_width else {*LATE_DEPTHS, K}
    chooser = LateChooser(drafter, LOOKUP, SLOTS, depths)
    return played(known, batch, chooser, DEVICE_SUFFIX, drafter.reset)


def single(known: list[Text], batch: int, name: str, k: int) -> float:
    """The same of one drafter and K."""
    lookup = name if name in MADE else "none"
    return played(known, batch, Single(name, k), lookup, lambda seq: None)


def played(
    known: list[Text],
    batch: int,
    chooser: Chooser,
    lookup: str,
    reset: Callable[[Sequence], None],
) -> float:
    """Until there are no texts left to fill the batch with: rows that end apart would leave it to
    few, which plain decoding's of one length do not."""
    costs, passed, emitted = Known(), 0.0, 0
    device, waiting, free = Device(chooser, lookup), deque(enumerate(known)), list(range(batch))
    rows: list[Row] = []
    unread: list[Said] = []
    while True:
        while waiting and free:
            number, text = waiting.popleft()
            first = [*text.prompt, text.answer[0]]
            seq = Sequence(list(first), slot=free.pop(), request_id=str(number), max_tokens=10_000)
            reset(seq)
            device.admit(seq)
            rows.append(Row(text, seq, first))
        if free:
            return emitted / passed
        chooser.choose([row.seq for row in rows])
        cycles = dispatched(
            device, rows, CYCLES if costs.one_width and chooser.choice.repeats else 1
        )
        drafted = chooser.choice.depth if chooser.runs else 0
        works = [Work(len(each), chooser.choice.depth, drafted) for each in cycles]
        came = [row_said for each in cycles for row_said in each]
        passed += sum(map(costs.seconds, works))
        emitted += sum(len(tokens) for _, _, tokens in came)
        for row, right, tokens in came if costs.one_width else unread:
            row.seq.tokens += tokens
            row.seq.acceptance.add([], right, len(tokens))
        unread = came
        ended = [row for row in rows if row.ended and len(row.seq.tokens) == len(row.tokens)]
        free += [row.seq.slot for row in ended]
        rows = [row for row in rows if row not in ended]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--recorded", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--only", default="", help="kinds whose name begins so")
    parser.add_argument("--one-width", action="store_true", help="as JAX's loop runs")
    options = parser.parse_args()
    Table.one_width = options.one_width
    table: dict[str, dict[str, Any]] = {}
    seen: Speeds = {}
    for kind, texts in kinds_of(options.recorded, options.prompts):
        if not kind.startswith(options.only):
            continue
        for batch in map(int, options.batches.split(",")):
            known = enough(texts, batch)
            singles = single_speeds(ON_DEVICE, known, batch, seen, single)
            best = max(singles, key=lambda name: singles[name])
            wrong = useless(known)
            plain = single(wrong, batch, "none", 0)
            found: dict[str, Any] = {"best": best}
            speed = auto(known, batch)
            found["over_best"] = round(speed / singles[best], 3)
            found["over_plain"] = round(speed / singles["none 0"], 3)
            found["useless"] = round(auto(wrong, batch) / plain, 3)
            table[f"{kind}, batch {batch}"] = found
            print(kind, batch, found, flush=True)
        options.out.write_text(json.dumps({"k": K, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A script in the captured cycle (`specdec.core.script`): its tables on the device, and a drafter
with as many right guesses as were recorded."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import replace

import torch

from specdec.core.script import Script, recorded_draft
from specdec.core.types import CycleChoice, Proposal, Sequence, Step
from targets.cuda.device_drafter import CapturedBatch, DeviceDrafter
from targets.cuda.ops import Rows


class PlacedScript:
    """A script's tables on the device: graphs read them where they are."""

    def __init__(self, script: Script, device: torch.device) -> None:
        self.script = script
        self._scripted, self._right = (
            torch.from_numpy(table).to(device, copy=True)
            for table in (script.scripted, script.right)
        )

    def seat(self, slots: Seqs[int]) -> None:
        """Copy what is new: these slots' owners."""
        rows = list(slots)
        self._scripted[rows] = torch.from_numpy(self.script.scripted[rows]).to(
            self._scripted.device
        )
        self._right[rows] = torch.from_numpy(self.script.right[rows]).to(self._right.device)

    def coming(self, rows: Rows, count: int) -> torch.Tensor:
        """Each row's next tokens [B, count] int32, from the position behind its last token on."""
        offset = torch.arange(count, device=rows.start.device)
        return self._scripted[_slots(rows)[:, None], rows.start.long()[:, None] + 1 + offset]

    def right(self, rows: Rows) -> torch.Tensor:
        """How many guesses are right there [B] int32."""
        return self._right[_slots(rows), rows.start.long() + 1]


def _slots(rows: Rows) -> torch.Tensor:
    """Slots of the rows; padding reads slot 0, and its results are not used."""
    return rows.slot.clamp(min=0).long()


class ScriptedDeviceDrafter:
    """A `DeviceDrafter` around another."""

    def __init__(self, drafter: DeviceDrafter, placed: PlacedScript) -> None:
        self._drafter, self._placed = drafter, placed

    def ready(self, seqs: Seqs[Sequence]) -> CycleChoice:
        return self._drafter.ready(seqs)

    def take_back(self) -> None:
        self._drafter.take_back()

    def propose(self, batch: CapturedBatch, k: int) -> Proposal:
        own, rows = self._drafter.propose(batch, k), batch.rows
        offset = torch.arange(k, device=rows.start.device)
        scripted, right = self._placed.coming(rows, k), self._placed.right(rows)
        return replace(own, tokens=recorded_draft(scripted, right, own.tokens, offset))

    def observe(self, batch: CapturedBatch, step: Step, accepted: torch.Tensor) -> None:
        self._drafter.observe(batch, step, accepted)

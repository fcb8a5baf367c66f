"""What an assistant needs beyond a decoder layer's operations, and their plain torch twin.

States have a row per slot and one to spare, [S + 1, H] float32, which takes what idle rows would
write. Shape legend: as in ops.py; S slots, W tokens of a verify's rows, k draft steps.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafters.assistant.cuda.ordered import OrderedHead
from targets.arch import Arch
from targets.cuda.formulas import rms, scaled
from targets.cuda.guessing import Guess, reference_guess
from targets.cuda.ops import Linear, Ops, Rows, X
from targets.cuda.reference import Reference, as_input, embedded


class DraftLayout(NamedTuple):
    """seen [B]: the last position that all steps see. starts, slots [k, B]: the position that guess
    j follows, and the slot, -1 where no guess may lie. All int32."""

    seen: Tensor
    starts: Tensor
    slots: Tensor


class States(NamedTuple):
    """What a step is fed beside the token. rows [M, H], or with slot [M] (-1: the last) a row per
    slot [S + 1, H]; normed by weight norm [H], or as they are."""

    rows: Tensor
    slot: Tensor | None = None
    norm: Tensor | None = None


class AssistantOps(Ops, Protocol):
    @property
    def guess(self) -> Guess: ...

    def prepare_rows(self, rows: Rows, k: int, longest: int) -> DraftLayout:
        """rows: a verify's; their `start` is the position of each last token. longest: no guess
        lies at this position or beyond."""
        ...

    def beside(self, table: Linear, tokens: Tensor, states: States, kind: str) -> X:
        """The target's scaled embedding of tokens [M] beside the states [M, 2 H], for a weight of
        this kind. Ids outside the vocabulary count as 0."""
        ...

    def ordered(self, h: Tensor, norm: Tensor, head: OrderedHead) -> Tensor:
        """Logits [M, vocab] float32 of states h [M, d], normed by weight norm [d]; -inf for words
        that are not scored."""
        ...

    def keep(self, states: Tensor, rows: Rows, features: Tensor, accepted: Tensor) -> None:
        """Store row accepted [B] int32 of features [B, W, H] as the state of each row's slot,
        except for idle rows."""
        ...


class AssistantReference(Reference):
    """`AssistantOps` in torch. Rows need not be exact: no other text depends on a guess."""

    def __init__(self, arch: Arch) -> None:
        super().__init__(arch)
        self.guess = partial(reference_guess, self)

    def prepare_rows(self, rows: Rows, k: int, longest: int) -> DraftLayout:
        steps = torch.arange(k, dtype=torch.int32, device=rows.start.device)[:, None]
        starts = rows.start[None] + steps
        slots = torch.where(starts + 1 < longest, rows.slot, -1)
        return DraftLayout((rows.start - 1).clamp(min=0), starts, slots)

    def beside(self, table: Linear, tokens: Tensor, states: States, kind: str) -> Tensor:
        rows = states.rows if states.slot is None else states.rows[states.slot.long()]
        rows = rows if states.norm is None else rms(rows, states.norm, self.arch.eps)
        return as_input(torch.cat([scaled(embedded(table, tokens), table.k), rows], 1), kind)

    def ordered(self, h: Tensor, norm: Tensor, head: OrderedHead) -> Tensor:
        return head.logits(rms(h, norm, self.arch.eps))

    def keep(self, states: Tensor, rows: Rows, features: Tensor, accepted: Tensor) -> None:
        row = torch.arange(len(accepted), device=accepted.device)
        kept = features[row, accepted.long().clamp(0, features.shape[1] - 1)]
        states[rows.slot.long()] = kept  # -1: the spare row

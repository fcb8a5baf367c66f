"""What an EAGLE-3 head needs beyond a decoder layer's operations, and their plain torch twin.

`Pending` holds each slot's last step of the target (features and chosen tokens): the next draft
starts from it. A head's rows are those of a verify (`ops.Rows`): `start` is the position of the
text's last token.
Shape legend: as in ops.py; S slots, W pending tokens per slot, F features of a token, k draft
steps.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from targets.arch import Arch
from targets.cuda.formulas import rms
from targets.cuda.guessing import Guess, reference_guess
from targets.cuda.ops import Linear, Ops, Rows, X
from targets.cuda.reference import Reference, as_input, embedded


class Pending(NamedTuple):
    """features [S + 1, W, F] float32 and the tokens chosen [S + 1, W] from them; the first count
    [S + 1] of each are real, and the last of those ends the text. Row S takes what idle rows would
    write."""

    features: Tensor
    chosen: Tensor
    count: Tensor


class DraftLayout(NamedTuple):
    """pending: the entries that are pending, as a call [B, W]; last [B] int64: its rows that end
    the texts. starts, slots [k, B]: the position that guess j follows, and the slot, -1 where no
    guess may lie."""

    pending: Rows
    last: Tensor
    starts: Tensor
    slots: Tensor


class PairNorms(NamedTuple):
    """Weights [H]. feedback: of states that are the head's own output, None to take them as they
    are. residual: the residual is the normed state, not the raw one."""

    embedding: Tensor
    hidden: Tensor
    feedback: Tensor | None
    residual: bool


class DraftOps(Ops, Protocol):
    def prepare_rows(self, pending: Pending, rows: Rows, k: int, longest: int) -> DraftLayout:
        """longest: no guess lies at this position or beyond."""
        ...

    def features(
        self, features: Tensor, slot: Tensor, weight: Tensor | None, parts: int, kind: str
    ) -> X:
        """features [S, W, F] of slots [B] (-1: the last) -> B W rows, as they are, or each of
        `parts` equal parts normed by its share of weight [F]; for a weight of this kind."""
        ...

    def pair(self, table: Linear, tokens: Tensor, h: Tensor, norms: PairNorms, kind: str) -> X:
        """rms(embedding of tokens [M]) beside rms(h) [M, 2 H], for a weight of this kind; h becomes
        the layer's residual in place. Embeddings are as stored, ids outside the vocabulary 0."""
        ...

    def ends(self, h: Tensor, mixed: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Rows last [B] of h and of mixed, both [M, H] -> [B, H] each."""
        ...

    @property
    def guess(self) -> Guess: ...

    def keep(
        self, pending: Pending, rows: Rows, features: Tensor, chosen: Tensor, accepted: Tensor
    ) -> None:
        """features [B, N, F], chosen [B, N] int32 and accepted [B] int32 of a verify, of no more
        than W tokens a row, are pending now; not those of idle rows."""
        ...


class DraftReference(Reference):
    """`DraftOps` in torch."""

    def __init__(self, arch: Arch) -> None:
        super().__init__(arch)
        self.guess = partial(reference_guess, self)

    def prepare_rows(self, pending: Pending, rows: Rows, k: int, longest: int) -> DraftLayout:
        slot = rows.slot.long()  # -1: the last row, the spare one
        count = pending.count[slot]
        starts = rows.start[None] + torch.arange(k, dtype=torch.int32, device=slot.device)[:, None]
        slots = torch.where(starts + 1 < longest, rows.slot, -1)
        fed = Rows(pending.chosen[slot], rows.start - count, slots[0])
        last = torch.arange(len(slot), device=slot.device) * fed.tokens.shape[1] + count - 1
        return DraftLayout(fed, last, starts, slots)

    def features(
        self, features: Tensor, slot: Tensor, weight: Tensor | None, parts: int, kind: str
    ) -> Tensor:
        rows = features[slot.long()].flatten(0, 1)
        if weight is not None:
            own = weight.view(parts, -1)
            rows = rms(rows.unflatten(1, own.shape), None, self.arch.eps).mul(own).flatten(1)
        return as_input(rows, kind)

    def pair(self, table: Linear, tokens: Tensor, h: Tensor, norms: PairNorms, kind: str) -> Tensor:
        eps, rows = self.arch.eps, embedded(table, tokens).float()
        if norms.feedback is not None:
            h.copy_(rms(h, norms.feedback, eps))
        normed = rms(h, norms.hidden, eps)
        if norms.residual:
            h.copy_(normed)
        return as_input(torch.cat([rms(rows, norms.embedding, eps), normed], 1), kind)

    def ends(self, h: Tensor, mixed: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        return h[last], mixed[last]

    def keep(
        self, pending: Pending, rows: Rows, features: Tensor, chosen: Tensor, accepted: Tensor
    ) -> None:
        slot, width = rows.slot.long(), chosen.shape[1]
        pending.features[slot, :width], pending.chosen[slot, :width] = features, chosen
        pending.count[slot] = accepted + 1

"""Choose, lay a cycle out and commit it, as launches of `sample.cu` and `cycle.cu`: a part of
`Kernels`."""

from __future__ import annotations

import weakref
from ctypes import Structure, c_int, c_void_p
from typing import NamedTuple

import torch

from targets.cuda.guessing import LIKELIEST, DraftVocabulary
from targets.cuda.launch import Launcher, Variant, address, pointer
from targets.cuda.ops import Rows
from targets.sampling_params import Rules, SamplingTable

CLUSTER = 8
"""CTAs that choose one row's token together."""
THREADS, WARP = 1024, 32
TURNS = 2
"""Of cycle.cu."""
SAMPLE, CYCLE = Variant("sample"), Variant("cycle")


class _SampleJob(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "ids", "draft_ids", "bias", "history")),
        *((name, c_void_p) for name in ("start", "slot", *SamplingTable._fields)),
        *((name, c_void_p) for name in ("counts", "chosen", "masks", "guesses")),
        *((name, c_int) for name in ("words", "vocab", "stride", "tokens", "shaped")),
        *((name, c_int) for name in ("width", "j", "most")),
    )


class _Place(NamedTuple):
    """Where what is chosen goes: chosen [B, T], or guess j of guesses [B, W]."""

    chosen: torch.Tensor | None = None
    guesses: torch.Tensor | None = None
    j: int = 0


class Said(NamedTuple):
    """What a cycle chose: chosen [B, k + 1], accepted [B] and, where it is known, by whom each row
    was drafted [B]; int32."""

    chosen: torch.Tensor
    accepted: torch.Tensor
    by: torch.Tensor | None


class Told:
    """What the cycles of one graph tell the host: page-locked rows that they write to by turns, for
    the host reads one cycle while the next one is under way."""

    def __init__(self, batch: int, k: int, device: torch.device) -> None:
        self.words = torch.empty((TURNS, batch, 2 * k + 3), dtype=torch.int32, pin_memory=True)
        """Guesses, what was chosen, accepted (SAT_OUT: did not run), and by whom."""
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._next = 0
        # torch does not know that kernels write there: it lends the memory again once it is free
        weakref.finalize(self, _keep_until_written, self.words).atexit = False

    def begin(self) -> None:
        """Count from here on: the capture ran a cycle."""
        self.turn.zero_()

    def coming(self) -> torch.Tensor:
        """Where the cycle that is replayed next writes."""
        self._next = (self._next + 1) % TURNS
        return self.words[self._next]


def _keep_until_written(words: torch.Tensor) -> None:
    torch.cuda.synchronize()
    del words


class Sampler:
    def __init__(self, launch: Launcher, device: torch.device) -> None:
        self._launch, self._device = launch, device

    def choose(
        self,
        logits: torch.Tensor,
        rules: Rules,
        rows: Rows,
        needs_sampler: bool,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`Ops.choose`."""
        chosen = torch.empty(logits.shape[:2], dtype=torch.int32, device=self._device)
        self._choose(logits, None, rules, rows, needs_sampler, _Place(chosen), masks)
        return chosen

    def guess(
        self,
        logits: torch.Tensor,
        known: DraftVocabulary | None,
        rules: Rules,
        at: Rows,
        j: int,
        needs_sampler: bool,
    ) -> None:
        """`guessing.Guess`."""
        place = _Place(guesses=at.tokens, j=j)
        self._choose(logits[:, None], known, rules, at, needs_sampler, place)

    def _choose(
        self,
        logits: torch.Tensor,
        known: DraftVocabulary | None,
        rules: Rules,
        rows: Rows,
        needs_sampler: bool,
        place: _Place,
        masks: torch.Tensor | None = None,
    ) -> None:
        batch, tokens, words = logits.shape
        m, vocab = batch * tokens, rules.bias.shape[1]
        size = (m, words) if needs_sampler else 0
        counts = torch.empty(size, dtype=torch.int32, device=self._device)
        width, most = (0, 0) if place.guesses is None else (place.guesses.shape[1], LIKELIEST)
        job = _SampleJob(
            *map(address, (logits, *(known or (None, None)), rules.bias, rules.history)),
            *map(address, (rows.start, rows.slot, *rules.sampling_params)),
            *map(address, (counts, place.chosen, masks, place.guesses)),
            *(words, vocab, rules.history.stride(0), tokens, int(needs_sampler)),
            *(width, place.j, most),
        )
        share = (words + 4 * CLUSTER - 1) // (4 * CLUSTER) * 4
        room = 4 * share if needs_sampler else 0
        self._launch(SAMPLE, "choose", (m * CLUSTER, 1, 1), THREADS, [job], room)

    def lay_out(
        self,
        history: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        k: int,
        turn: torch.Tensor,
    ) -> Rows:
        """The verify of these slots [B] (-1: padding), before anybody has drafted: each text's last
        token, then k times NO_GUESS. state: length and live [slots]. turn [1] int32: goes on."""
        batch = len(slots)
        make = lambda *shape: torch.empty(shape, dtype=torch.int32, device=self._device)  # noqa: E731
        rows = Rows(make(batch, k + 1), make(batch), make(batch))
        tensors = (history, *state, slots, rows.tokens, rows.start, rows.slot, turn)
        arguments = [*map(pointer, tensors), *map(c_int, (history.stride(0), k))]
        self._launch(CYCLE, "lay_out", (batch, 1, 1), WARP, arguments, early=False)
        return rows

    def accept(self, rows: Rows, chosen: torch.Tensor) -> torch.Tensor:
        """`core.accept.accept` of the rows' guesses, which follow their last tokens: [B] int32."""
        batch, tokens = chosen.shape
        accepted = torch.empty(batch, dtype=torch.int32, device=self._device)
        tensors = rows.tokens, chosen, accepted
        arguments = [*map(pointer, tensors), *map(c_int, (batch, tokens - 1))]
        self._launch(CYCLE, "accept", (-(-batch // 128), 1, 1), 128, arguments)
        return accepted

    def commit(
        self,
        history: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        rows: Rows,
        said: Said,
        limits: tuple[torch.Tensor, torch.Tensor],
        told: Told,
    ) -> None:
        """Append chosen[: accepted + 1] to the texts, end what has come to its end, tell the host.
        limits: stop ids [slots, 16], longest."""
        batch, tokens = said.chosen.shape
        tensors = (history, *state, rows.slot, rows.tokens, *said, *limits, told.words, told.turn)
        arguments = [*map(pointer, tensors), *map(c_int, (history.stride(0), tokens - 1))]
        self._launch(CYCLE, "commit", (batch, 1, 1), WARP, arguments)

"""Choose, lay a cycle out and commit it, as launches of `sample.cu` and `cycle.cu`: a part of
`Kernels`."""

from __future__ import annotations

import weakref
from ctypes import Structure, c_int, c_void_p
from typing import NamedTuple

import numpy as np
import torch

from targets.cuda.guessing import LIKELIEST, DraftVocabulary
from targets.cuda.launch import Launcher, Variant, address, pointer
from targets.cuda.ops import Rows
from targets.sampling_params import Rules, SamplingTable

CLUSTER = 8
"""CTAs that choose one row's token together."""
THREADS = 1024
"""Threads per CTA of sample.cu."""
WARP = 32
"""Threads per CTA of cycle.cu."""
TURNS = 2
"""kTurns of cycle.cu: records, written in turn."""
SAMPLE = Variant("sample")
CYCLE = Variant("cycle")


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


class CycleResult(NamedTuple):
    """One cycle's outcome on the device, int32: chosen [B, k + 1], accepted [B] and, of a drafter
    that is made of others, the number of each row's drafter [B]."""

    chosen: torch.Tensor
    accepted: torch.Tensor
    source: torch.Tensor | None


class CycleRecord(NamedTuple):
    """One cycle's outcome for the host, int32: the fields of a row lie side by side in this order
    (`CycleRecord` of cycle.cu)."""

    draft: np.ndarray
    """[B, k]."""
    chosen: np.ndarray
    """[B, k + 1]."""
    accepted: np.ndarray
    """[B]; SAT_OUT: the row did not run."""
    source: np.ndarray
    """[B]; 0 where there is one drafter."""

    @staticmethod
    def words(k: int) -> int:
        """int32 words of a row."""
        return 2 * k + 3

    @classmethod
    def of(cls, words: np.ndarray) -> CycleRecord:
        """words [B, words(k)]."""
        k = (words.shape[1] - cls.words(0)) // 2
        draft, chosen = words[:, :k], words[:, k : 2 * k + 1]
        return cls(draft, chosen, words[:, 2 * k + 1], words[:, 2 * k + 2])


class HostRecords:
    """The `CycleRecord`s of one graph's cycles in page-locked memory. Cycles write two in turn: the
    host reads one while the next cycle writes the other."""

    def __init__(self, batch: int, k: int, device: torch.device) -> None:
        shape = TURNS, batch, CycleRecord.words(k)
        self.words = torch.empty(shape, dtype=torch.int32, pin_memory=True)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._next = 0
        # torch does not see that kernels write there: it would reuse the memory once it is freed
        weakref.finalize(self, _keep_until_written, self.words, device).atexit = False

    def begin(self) -> None:
        """Count from here on: the capture ran a cycle."""
        self.turn.zero_()

    def coming(self) -> torch.Tensor:
        """Where the cycle that is replayed next writes."""
        self._next = (self._next + 1) % TURNS
        return self.words[self._next]


def _keep_until_written(words: torch.Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)
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
        ids, draft_ids = known or (None, None)
        job = _SampleJob(
            logits=address(logits),
            ids=address(ids),
            draft_ids=address(draft_ids),
            bias=address(rules.bias),
            history=address(rules.history),
            start=address(rows.start),
            slot=address(rows.slot),
            **{name: address(leaf) for name, leaf in rules.sampling_params._asdict().items()},
            counts=address(counts),
            chosen=address(place.chosen),
            masks=address(masks),
            guesses=address(place.guesses),
            words=words,
            vocab=vocab,
            stride=rules.history.stride(0),
            tokens=tokens,
            shaped=int(needs_sampler),
            width=width,
            j=place.j,
            most=most,
        )
        share = (words + 4 * CLUSTER - 1) // (4 * CLUSTER) * 4
        room = 4 * share if needs_sampler else 0
        self._launch(SAMPLE, "choose", (m * CLUSTER, 1, 1), THREADS, [job], room)

    def prepare_rows(
        self,
        history: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        k: int,
        turn: torch.Tensor,
    ) -> Rows:
        """The verify's rows for these slots [B] (-1: padding), before drafting: each text's last
        token, then k times NO_GUESS. state: length and live [slots]. turn [1] int32: is
        advanced."""
        batch = len(slots)

        def make(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=self._device)

        rows = Rows(make(batch, k + 1), make(batch), make(batch))
        tensors = (history, *state, slots, rows.tokens, rows.start, rows.slot, turn)
        arguments = [*map(pointer, tensors), *map(c_int, (history.stride(0), k))]
        self._launch(CYCLE, "prepare_rows", (batch, 1, 1), WARP, arguments, pdl=False)
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
        result: CycleResult,
        limits: tuple[torch.Tensor, torch.Tensor],
        records: HostRecords,
    ) -> None:
        """Append chosen[: accepted + 1] to the texts, end the rows that stop, and write the next
        record. limits: stop ids [slots, 16], longest."""
        batch, tokens = result.chosen.shape
        texts, written = (history, *state), (records.words, records.turn)
        tensors = (*texts, rows.slot, rows.tokens, *result, *limits, *written)
        arguments = [*map(pointer, tensors), *map(c_int, (history.stride(0), tokens - 1))]
        self._launch(CYCLE, "commit", (batch, 1, 1), WARP, arguments)

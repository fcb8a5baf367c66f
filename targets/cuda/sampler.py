"""Choose, lay a cycle out and commit it, as launches of `sample.cu` and `cycle.cu`: a part of
`Kernels`."""

from __future__ import annotations

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
    ) -> Rows:
        """The verify of these slots [B] (-1: padding), before anybody has drafted: each text's last
        token, then k times NO_GUESS. state: length and live [slots]."""
        batch = len(slots)
        make = lambda *shape: torch.empty(shape, dtype=torch.int32, device=self._device)  # noqa: E731
        rows = Rows(make(batch, k + 1), make(batch), make(batch))
        tensors = (history, *state, slots, rows.tokens, rows.start, rows.slot)
        arguments = [*map(pointer, tensors), *map(c_int, (history.stride(0), k))]
        self._launch(CYCLE, "lay_out", (batch, 1, 1), WARP, arguments, early=False)
        return rows

    def commit(
        self,
        history: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        rows: Rows,
        chosen: torch.Tensor,
        accepted: torch.Tensor,
        limits: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Append chosen[: accepted + 1] to the texts, end what has come to its end; `accepted`
        [B] int32 becomes SAT_OUT where a row did not run. limits: stop ids [slots, 16], longest."""
        batch, tokens = chosen.shape
        tensors = (history, *state, rows.slot, chosen, accepted, *limits)
        arguments = [*map(pointer, tensors), *map(c_int, (batch, history.stride(0), tokens))]
        self._launch(CYCLE, "commit", (-(-batch // 128), 1, 1), 128, arguments)

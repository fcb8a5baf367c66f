"""A smaller model of the same vocabulary as drafter: a second Target, with its own K/V.

The draft model chooses as the target would, by the request's own sampling parameters: at
temperature 0 its argmax, else with noise of the same key (seed, position, token), so that the two
agree as often as their distributions allow (Gumbel coupling, arXiv 2408.07978).

It has no state to roll back or to keep beside its cache. A cycle feeds the draft model every guess
but its last, so once k guesses and the free token are kept, at most two committed tokens are not in
its cache: each cycle begins by feeding the last two again, whatever was accepted. The length is the
rollback here too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from dataclasses import replace

import numpy as np

from specdec.core.protocols import Target
from specdec.core.types import NO_GUESS, Array, Proposal, Sampling, Sequence, Step

CATCH_UP = 2
"""Committed tokens that each cycle feeds first: the widest call that a draft model ever gets."""


class ModelDrafter:
    """`model` has at least the target's slots; its context may be shorter: from its end on, and
    for prompts that it can't hold, it returns NO_GUESS."""

    def __init__(self, model: Target, greedy: bool = False) -> None:
        """greedy: guess the argmax at any temperature, as other engines do (to compare)."""
        self.model, self.greedy = model, greedy
        self._ahead: dict[int, Sequence] = {}

    def reset(self, seq: Sequence) -> None:
        tokens = [max(token, 0) for token in seq.tokens]  # at pictures' places: pad, as id 0 is
        self._ahead[seq.slot] = Sequence(tokens, self._sampling(seq), slot=seq.slot)

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        """Read the prompt beside the target, a chunk for a chunk."""
        self._read_chunk(self._ahead[seq.slot])

    def prefilled(self, seq: Sequence) -> int:
        """How many tokens of its prompt the draft model has read."""
        return self._ahead[seq.slot].prefilled

    def resume(self, seq: Sequence, start: int) -> None:
        """The first `start` tokens of its prompt are in the draft model's cache already."""
        self._ahead[seq.slot].prefilled = start

    def observe(self, seqs: Seqs[Sequence], step: Step, accepted: Array) -> None:
        pass  # what was rejected lies beyond the length, and is overwritten

    def finish_prompts(self, seqs: Seqs[Sequence]) -> None:
        """Read what is left of their prompts: its chunks may be shorter than the target's."""
        for ahead in (self._ahead[seq.slot] for seq in seqs):
            while ahead.prefilled < ahead.prompt_len < self.model.max_len:
                self._read_chunk(ahead)

    def propose(self, seqs: Seqs[Sequence], k: int) -> Proposal:
        draft = np.full((len(seqs), k), NO_GUESS, np.int32)
        self.finish_prompts(seqs)
        ahead = [self._caught_up(seq) for seq in seqs]
        for j in range(k):
            # a token at position max_len could never be emitted
            going = [b for b, seq in enumerate(ahead) if len(seq.tokens) < self.model.max_len]
            if not going:
                break
            draft[going, j] = self._guess([ahead[b] for b in going], first=j == 0)
            for b in going:
                ahead[b].tokens.append(int(draft[b, j]))
        for seq, real in zip(ahead, seqs, strict=True):
            del seq.tokens[len(real.tokens) :]
        return Proposal(draft)

    def _guess(self, ahead: list[Sequence], first: bool) -> Array:
        """What the draft model chooses after each text [B]."""
        if not first:
            return self.model.verify(ahead, np.empty((len(ahead), 0), np.int32)).chosen[:, 0]
        last = np.array([[seq.tokens.pop()] for seq in ahead], np.int32)
        chosen = self.model.verify(ahead, last).chosen[:, 1]
        for seq, (token,) in zip(ahead, last, strict=True):
            seq.tokens.append(int(token))
        return chosen

    def _caught_up(self, seq: Sequence) -> Sequence:
        """The slot's sequence as the draft model sees it: all of the text, nothing guessed yet."""
        ahead = self._ahead[seq.slot]
        ahead.tokens += seq.tokens[len(ahead.tokens) :]
        return ahead

    def _read_chunk(self, ahead: Sequence) -> None:
        start, chunk = ahead.prefilled, self.model.prefill_chunk
        if start < ahead.prompt_len < self.model.max_len:
            ahead.prefilled = min(ahead.prompt_len, (start // chunk + 1) * chunk)
            self.model.prefill(ahead, start, ahead.prefilled)

    def _sampling(self, seq: Sequence) -> Sampling:
        own = replace(seq.sampling, logprobs=None)
        return replace(own, temperature=0.0) if self.greedy else own

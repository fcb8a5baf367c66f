"""A block drafter beside the CUDA target: its weights, and what it shares with the target:
embeddings, a head where it brings none, and the choice of each guess. Shape legend: as in
`body.py`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from drafters.dflash.cuda.body import SLACK
from drafters.dflash.cuda.placing import KINDS, ops_of, place
from drafters.dflash.spec import BlockHead, check_pair
from specdec.core.errors import UserError
from targets.cuda.guessing import Guess, reference_guess, vocabulary_of
from targets.cuda.kernels import Kernels
from targets.cuda.ops import Linear, Opening, Rows
from targets.cuda.out_of_memory import catching_oom
from targets.cuda.target import CudaTarget
from targets.cuda.upload import as_tensor, upload

PIECE = 1 << 13
"""Rows of two tables that are compared at once."""


class BlockModel:
    """One head beside its target: all of its drafters share it."""

    def __init__(self, head: BlockHead, target: CudaTarget) -> None:
        """Raises UserError for a head of another target."""
        check_pair(head.spec, target.arch)
        assert target.plan.features == head.spec.taps, (target.plan.features, head.spec.taps)
        self.target, self.longest = target, target.max_len
        weights = dict(head.weights)
        tables = {"embed_tokens": target.weights.embedding, "lm_head": target.weights.head}
        for name, table in tables.items():
            if name in weights and self._equals(weights[name], table):
                del weights[name]
        own = {"own_table": "embed_tokens" in weights, "own_head": "lm_head" in weights}
        self.spec = replace(head.spec, **own)
        kind = KINDS.get(target.dtype, "fp8")
        ops = ops_of(self.spec, target.ops, self.longest + SLACK, kind)
        self.placed = place(self.spec, weights, ops, kind, target.device)
        self.known = None
        ids = head.target_ids
        if ids is None and self.spec.vocab < target.arch.vocab:  # the target's is padded
            ids = np.arange(self.spec.vocab)
        if ids is not None:
            self.known = vocabulary_of(torch.from_numpy(ids), target.arch.vocab, target.device)
        self.guess: Guess = _guess_of(target)

    def _equals(self, stored: np.ndarray, table: Linear) -> bool:
        """Whether a file's table is the target's, in bfloat16: compared, not assumed."""
        if stored.shape != (table.n, table.k) or table is not self.target.weights.embedding:
            return False
        pieces = range(0, len(stored), PIECE)
        return all(self._piece_equals(stored[at : at + PIECE], at) for at in pieces)

    def _piece_equals(self, stored: np.ndarray, first: int) -> bool:
        device = self.target.device
        ids = torch.arange(first, first + len(stored), dtype=torch.int32, device=device)
        theirs = self._scaled(ids[:, None]).bfloat16()
        own = upload(as_tensor(np.ascontiguousarray(stored)), str(device)).float()
        return torch.equal((own * self._factor).bfloat16(), theirs)

    @property
    def _factor(self) -> float:
        """What the target's embedding is multiplied by, rounded as its operation rounds it."""
        width = self.target.arch.hidden
        kind = torch.float32 if self.target.dtype == "float32" else torch.bfloat16
        return torch.tensor(width**0.5, dtype=kind).item()

    def _scaled(self, tokens: Tensor) -> Tensor:
        """The target's scaled embeddings [M, H] float32 of tokens [B, T] int32."""
        idle = torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
        return self.target.ops.embed(self.target.weights.embedding, Rows(tokens, idle, idle))

    def block_tokens(self, anchor: Tensor) -> Tensor:
        """What a block is fed [B, U] int32: anchor [B], then mask tokens."""
        tokens = anchor.new_full((len(anchor), self.spec.slots), self.spec.mask_id)
        tokens[:, 0] = anchor
        return tokens

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [B, U] int32 -> [B U, H] float32."""
        spec = self.spec
        if spec.own_table:
            ids = tokens.flatten().clamp(0, spec.vocab - 1).long()
            return self.placed.weights["embed_tokens"][ids].float() * spec.embedding_scale
        return self._scaled(tokens) * (spec.embedding_scale / self._factor)

    def logits(self, x: Tensor) -> Tensor:
        """States before the final norm [B, K, H] float32 -> [B, K, D] float32."""
        spec, flat, norm = self.spec, x.flatten(0, 1).contiguous(), self.placed.weights["norm"]
        ops, head = self.placed.ops, self.placed.lm_head
        if head is None:
            ops, head = self.target.ops, self.target.weights.head
        found = ops.head(ops.norm(flat, Opening(norm, head.kind)), head, spec.softcap)
        return found[:, : spec.draft_vocab].view(*x.shape[:2], -1)


def placed(head: BlockHead, target: CudaTarget) -> BlockModel:
    """The head beside its target. Raises UserError, too where it has no room."""
    try:
        with catching_oom("the block drafter beside the model"):
            return BlockModel(head, target)
    except MemoryError as problem:
        raise UserError(str(problem)) from problem


def _guess_of(target: CudaTarget) -> Guess:
    """How the target's own operations choose a guess."""
    ops = target.ops
    return ops.sampler.guess if isinstance(ops, Kernels) else partial(reference_guess, ops)

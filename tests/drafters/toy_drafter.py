"""A drafter outside the product, with weights and features, for every loop of both targets. It
needs only this file and a name in the registry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drafters.kind import DrafterKind, DraftRequest, PlacedDrafter, own_options
from specdec.core.types import Array, CycleChoice, Proposal, Sequence, Step

LAYER = 2


@dataclass(frozen=True)
class ToyOptions:
    toy_shift: int = field(default=0, metadata={"help": "Added to each guess."})


def read(request: DraftRequest) -> ToyDraft:
    shape = request.arch.hidden, request.arch.vocab
    weights = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return ToyDraft(weights, own_options(ToyOptions, request.speculation).toy_shift)


@dataclass(frozen=True)
class ToyDraft:
    weights: np.ndarray
    shift: int
    features = (LAYER,)
    notes: tuple[str, ...] = ()

    def extra_bytes(self, shape: Any) -> int:
        return self.weights.nbytes

    def place(self, backend, target, config) -> PlacedDrafter:
        steps = {"jax": _traced, "cuda": _captured}
        return PlacedDrafter(lambda k: self.drafter(target), steps[target.backend])

    def drafter(self, target: Any) -> ToyDrafter:
        shape = target.slots + 1, len(self.weights)
        if target.backend == "cuda":
            import torch

            return ToyDrafter(self, torch.zeros(shape, device=target.device))
        return ToyDrafter(self, np.zeros(shape, np.float32))


class ToyDrafter:
    """state [slots + 1, F]: the features of each text's last token."""

    def __init__(self, draft: ToyDraft, state: Any) -> None:
        self.draft, self.state = draft, state

    def reset(self, seq: Sequence) -> None:
        self.state[seq.slot] = 0

    def prefill(self, seq: Sequence, start: int, stop: int, step: Step) -> None:
        self._keep(seq.slot, step.features[0, stop - start - 1])

    def propose(self, seqs, k: int) -> Proposal:
        state = np.stack([_numpy(self.state[seq.slot]) for seq in seqs])
        best = (state @ self.draft.weights).argmax(-1)[:, None]
        guesses = (best + np.arange(k) + self.draft.shift) % self.draft.weights.shape[1]
        return Proposal(guesses.astype(np.int32))

    def observe(self, seqs, step: Step, accepted: Array) -> None:
        for b, seq in enumerate(seqs):
            row = seq.slot if step.by_slot else b
            self._keep(seq.slot, step.features[row, int(accepted[b])])

    def _keep(self, slot: int, features: Any) -> None:
        self.state[slot] = features if hasattr(self.state, "device") else _numpy(features)


def _numpy(values: Any) -> np.ndarray:
    return values.float().cpu().numpy() if hasattr(values, "cpu") else np.asarray(values)


def _traced(drafter: ToyDrafter) -> Any:
    import jax.numpy as jnp

    @dataclass(frozen=True)
    class Program:
        shift: int

        def on(self, weights, memory):
            return Traced(self.shift, weights, memory)

    class Traced:
        def __init__(self, shift, weights, memory):
            self.shift, self.weights, self.memory = shift, weights, memory

        def propose(self, batch, k):
            best = (self.memory[:-1] @ self.weights).argmax(-1)[:, None]
            guesses = (best + jnp.arange(k) + self.shift) % self.weights.shape[1]
            return Proposal(guesses.astype(jnp.int32))

        def observe(self, batch, step, accepted):
            kept = step.features[jnp.arange(len(accepted)), accepted]
            new = jnp.where(batch.live[:, None], kept, self.memory[:-1])
            self.memory = self.memory.at[:-1].set(new)

    class Device:
        @property
        def memory(self):
            return jnp.asarray(drafter.state)

        @memory.setter
        def memory(self, state):
            drafter.state[:] = np.asarray(state)

        def ready(self, seqs):
            return CycleChoice()

        def program(self, needs_sampler):
            return Program(drafter.draft.shift)

        def weights(self):
            return drafter.draft.weights

    return Device()


def _captured(drafter: ToyDrafter) -> Any:
    import torch

    weights = torch.from_numpy(drafter.draft.weights).to(drafter.state.device)

    class Device:
        def ready(self, seqs):
            return CycleChoice()

        def take_back(self):
            pass

        def propose(self, batch, k):
            states = drafter.state.index_select(0, batch.rows.slot.clamp(min=0))
            best = (states @ weights).argmax(-1)[:, None]
            ahead = torch.arange(k, device=best.device)
            return Proposal(((best + ahead + drafter.draft.shift) % weights.shape[1]).int())

        def observe(self, batch, step, accepted):
            row = torch.arange(len(accepted), device=accepted.device)
            drafter.state[batch.rows.slot.long()] = step.features[row, accepted.long()]

    return Device()


KIND = DrafterKind(
    "toy",
    "a random projection of the model's state",
    read,
    options=ToyOptions,
    vllm_keys={"toy": "toy_shift"},
    most_k=8,
    device_loops=("jax", "cuda"),
)

"""Real acceptance while a head is trained: held-out prompts go through the engine, drafted by the
head as it is. What training simulates must come true here."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from typing import Any

import numpy as np

from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.stats import Acceptance
from specdec.core.types import Sampling, Sequence
from targets.arch import Arch
from targets.jax.load import SHORTEST, JaxOptions, make_plan
from targets.jax.params import Params
from targets.jax.target import JaxTarget
from training.heads import AnySpec, Weights, head_of

TOKENS = 64
"""Decoded per prompt and temperature. The limit cuts each last cycle: tau is some 3 % low."""
MOST_SLOTS = 32
TEMPERATURES = {"real_tau_t0": 0.0, "real_tau_t1": 1.0}


class Live:
    """Call it with a head's weights for its tau at T = 0 and at T = 1."""

    def __init__(
        self,
        params: Params,
        arch: Arch,
        spec: AnySpec,
        target_ids: np.ndarray,
        prompts: Seqs[Seqs[int]],
        k: int,
        stop_ids: Seqs[int],
        suppress: tuple[int, ...],
    ) -> None:
        """params: the teacher's, which this target shares. k: draft tokens per cycle."""
        head = head_of(spec)
        self.prompts, self.stop_ids = prompts, frozenset(stop_ids)
        options = JaxOptions(
            slots=min(MOST_SLOTS, len(prompts)),
            max_len=max(SHORTEST, max(map(len, prompts)) + TOKENS),
            k=k,
            features=head.layers or (len(arch.layers) - 1,),
        )
        plan, dtype = make_plan(arch, options), params.top["norm"].dtype
        target = JaxTarget(plan, params, dtype, suppress)
        self.drafter, self.draft_by = head.drafter(target, target_ids, k)
        cycle = host_cycle(target, self.drafter, k)
        self.engine = Engine(target, self.drafter, cycle, max_waiting=len(prompts))

    def __call__(self, weights: Weights) -> dict[str, Any]:
        self.draft_by(weights)
        return {name: tau_of(self.decode(t)) for name, t in TEMPERATURES.items()}

    def decode(self, temperature: float) -> list[Sequence]:
        """The prompts with their answers of up to TOKENS."""
        seqs = [
            Sequence(list(prompt), Sampling(temperature, seed=i), TOKENS, self.stop_ids)
            for i, prompt in enumerate(self.prompts)
        ]
        self.engine.run_to_end(seqs)
        return seqs


def tau_of(seqs: Seqs[Sequence]) -> float:
    """tau over all cycles of these sequences."""
    total = Acceptance()
    for seq in seqs:
        total.merge(seq.acceptance)
    return total.tau


def prompts_of(answers: Any, count: int, longest: int) -> list[list[int]]:
    """The prompts of `count` distilled answers, spread evenly, cut at `longest` tokens."""
    count = min(count, len(answers))
    chosen = (answers[i * len(answers) // count] for i in range(count))
    sizes_and_ids = ((sum(not made for made in a["gen_mask"]), a["input_ids"]) for a in chosen)
    return [list(ids[: min(size, longest)]) for size, ids in sizes_and_ids]

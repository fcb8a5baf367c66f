"""The points that `specdec bench` measures, one repeat after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from drafters.registry import PLAIN, find, plain
from specdec.assembly.engine import loop_of, make_engine
from specdec.assembly.model import Model, Status
from specdec.bench.aggregate import Figures
from specdec.bench.timing import (
    ROOM,
    cycle_samples,
    end_to_end,
    fill,
    first_token_samples,
    random_prompts,
    some_draft,
    step_samples,
)
from specdec.core.config import SpeculationConfig
from specdec.core.errors import UserError
from specdec.core.script import Line, Script, right_for_tau
from specdec.core.types import Sampling, Sequence
from targets.backend import meter_of

LOOKUP = 24
"""Length in tokens of the text that each prompt of the end-to-end runs repeats, for prompt
lookup."""


@dataclass(frozen=True)
class Grid:
    """Where to measure; see the command's options."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    ks: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    taus: tuple[float, ...]
    max_tokens: int

    def refuse(self, max_len: int, max_draft: int, k: int) -> None:
        """Raise UserError for a point that can't be measured on such a target."""
        longest = max(max(self.contexts) + ROOM, *(n + 1 for n in self.prompt_lengths), 0)
        if longest > max_len:
            raise UserError(
                f"--contexts (with {ROOM} tokens of room) or --prompt-lengths need {longest} "
                f"tokens: they do not fit --max-len {max_len}"
            )
        if max(self.widths) > max_draft + 1:
            raise UserError(f"--widths must be 1 to {max_draft + 1}, got {max(self.widths)}")
        if self.taus and self.contexts[0] + self.max_tokens > max_len:
            raise UserError(
                f"--synthetic-tau decodes --max-tokens {self.max_tokens} after a context of "
                f"{self.contexts[0]}: they do not fit --max-len {max_len}"
            )
        for tau in self.taus:
            right_for_tau(tau, k, count=1)


Targets = dict[int, tuple[Any, int]]
"""Width that is really fed -> (the target that feeds it, the requested width)."""


def targets_by_width(model: Model, grid: Grid) -> Targets:
    """The targets for all widths. Called once, as a backend may compile for each width."""
    meter = meter_of(model.target)
    asked = ((w, *meter.at_width(w)) for w in grid.widths)
    return {fed: (target, width) for width, target, fed in asked}


def measure(
    model: Model,
    targets: Targets,
    speculation: SpeculationConfig,
    grid: Grid,
    figures: Figures,
    status: Status,
) -> None:
    """One repeat of everything: steps, then what engines drive."""
    for context in grid.contexts:
        with status(f"timing steps at context {context}"):
            _steps(model, targets, grid, context, figures)
        with status(f"timing cycles at context {context}"):
            _cycles(model, speculation, grid, context, figures)
    with status("time to first token"):
        engine = make_engine(model, plain(speculation))
        for n in grid.prompt_lengths:
            samples = first_token_samples(engine, n, model.target.vocab)
            figures.add("first token", n, samples)
    with status("end to end"):
        _runs(model, speculation, grid, figures)
        _synthetic(model, speculation, grid, figures)


def _steps(model: Model, targets: Targets, grid: Grid, context: int, figures: Figures) -> None:
    """Time steps of each batch and width, driven by the host and, if supported, by the device's own
    clock."""
    filled: dict[int, list[Sequence]] = {}
    for fed, (target, width) in targets.items():
        if id(target) not in filled:
            filled[id(target)] = fill(target, max(grid.batches), context, model.target.vocab)
        seqs = filled[id(target)]
        for batch in grid.batches:
            place = (batch, context, fed)
            figures.add("step", place, step_samples(target, seqs[:batch], width - 1))
            draft = some_draft(seqs[:batch], width - 1)
            figures.add("forward", place, meter_of(target).forward_samples(seqs[:batch], draft))


def _cycles(
    model: Model, speculation: SpeculationConfig, grid: Grid, context: int, figures: Figures
) -> None:
    """Plain decoding and the drafter with each K, in the loop that was chosen."""
    for batch in grid.batches:
        prompts = random_prompts(batch, context, model.target.vocab)
        for config in (plain(speculation), *_drafting(speculation, grid.ks)):
            width = meter_of(model.target).fed_width(config.k)
            engine = make_engine(model, config)
            loop = loop_of(model, speculation)
            place = (batch, context, config.drafter, loop, width, config.k)
            figures.add("cycle", place, cycle_samples(engine, prompts))


def _drafting(speculation: SpeculationConfig, ks: tuple[int, ...]) -> list[SpeculationConfig]:
    """With each K; none for a drafter that never drafts."""
    return [replace(speculation, k=k) for k in ks if find(speculation.drafter).most_k]


def _runs(model: Model, speculation: SpeculationConfig, grid: Grid, figures: Figures) -> None:
    """Plain and drafted, in every loop that there is, on prompts that repeat themselves."""
    vocab, slots = model.target.vocab, max(grid.batches)
    prompts = [[2, *text * 2] for text in random_prompts(slots, LOOKUP, vocab, seed=1)]
    for drafter in dict.fromkeys((PLAIN, speculation.drafter)):
        has_step = model.target.backend in find(drafter).device_loops
        for loop in sorted(model.loops if has_step else ("host",), reverse=True):
            config = replace(speculation, drafter=drafter, loop=loop)
            engine = partial(make_engine, model, config)
            run = end_to_end(f"{drafter}, {loop} loop", engine, prompts, grid.max_tokens)
            figures.add_run("end to end", run)


def _synthetic(model: Model, speculation: SpeculationConfig, grid: Grid, figures: Figures) -> None:
    """Greedy, each batch, after the first context: speed as if tau were this."""
    target, count = model.target, grid.max_tokens
    for tau in grid.taus:
        for batch in grid.batches:
            prompts = random_prompts(batch, grid.contexts[0], target.vocab)
            answers = random_prompts(batch, count, target.vocab, seed=1)
            lines = {
                str(row): Line(answer, right_for_tau(tau, speculation.k, count, seed=row))
                for row, answer in enumerate(answers)
            }
            script = Script(lines, target.slots, target.max_len)
            engine = partial(make_engine, model, speculation, script=script)
            run = end_to_end(f"tau {tau:g}, batch {batch}", engine, prompts, count, Sampling())
            figures.add_run("synthetic", run)

"""Engines on a loaded model: drafter and loop, the proof of exactness, and warming up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence as Seqs
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from drafters import registry
from drafters.kind import Composite
from drafters.none.host import NoDrafter
from specdec.assembly.model import Model, Status, quiet
from specdec.assembly.prefix import budget_for, grant, make_prefix_cache, warm_prefix_cache
from specdec.core.config import Loop, PrefixConfig, SpeculationConfig
from specdec.core.constraint import Plain, Unrestricted
from specdec.core.cycle import cycle, host_cycle
from specdec.core.engine import DraftSetup, Engine
from specdec.core.errors import UserError
from specdec.core.pictures import PlacedPicture, place_ids
from specdec.core.script import Script, ScriptedDrafter, ScriptedTarget
from specdec.core.timing import PlainCosts
from specdec.core.types import Constraint, Round, Sampling, Sequence
from targets.vision.preprocessing import of_levels
from targets.vision.spec import VisionSpec

WARM_TOKENS = 12
"""Enough for a prefill and one dispatch of either loop."""
WARM_STEPS = 3
"""Steps of each batch: one compiles, or captures; the others show that it is done."""
PLAIN_STEPS = 12
"""Steps of plain decoding that are timed."""
PROVEN_ROWS = 8
"""Most rows with which the two loops are compared at start-up; more would only take longer."""
VARIANTS = tuple(Sampling(temperature=t, logprobs=n, seed=1) for t in (0.0, 1.0) for n in (None, 0))
"""One request for each variant of the compiled programs."""

NO_REUSE = PrefixConfig(prefix_cache=False)


def loop_of(model: Model, speculation: SpeculationConfig) -> Loop:
    """The configured loop, by default the target's faster one."""
    return speculation.loop or model.loops[0]


def make_engine(
    model: Model,
    speculation: SpeculationConfig,
    max_waiting: int = 256,
    script: Script | None = None,
    prefix: PrefixConfig = NO_REUSE,
) -> Engine:
    """An engine on this model's target with the drafter and loop of `speculation`; the drafter must
    be one of `model.drafters`. Raises UserError for a drafter that this loop can't run.

    prefix: the prefix cache's settings; off by default, as most commands never repeat a prompt.
    script: texts that replace the target's choices (speed tests only).
    """
    placed, target = model.drafters[speculation.drafter], model.target
    kind, loop = registry.find(speculation.drafter), loop_of(model, speculation)
    kind.refuse(loop, target.backend)
    recorded = script is not None and script.recorded  # then `none` has guesses too
    k = speculation.k if recorded else min(speculation.k, kind.most_k)
    drafter, composite = placed.make(k), placed.composite
    if loop == "device":
        if script is not None and composite is not None:
            script.wrap_weighted = composite.wrap_on_device
        driver = model.backend.device_loop(target, placed.on_device(drafter), k, script)
        drafter = NoDrafter() if placed.text_alone else drafter
    cache = make_prefix_cache(model, placed, drafter, prefix)
    if script is not None:
        target, drafter = _scripted(target, drafter, script, composite)
    if loop == "host":
        driver = host_cycle(target, drafter, k)
    parts = () if composite is None else composite.names(drafter)
    policy = None if composite is None else composite.policy(drafter)
    drafting = DraftSetup(speculation.drafter, parts, k, policy)
    pages = model.target.pages
    engine = Engine(target, drafter, driver, max_waiting, cache, drafting, pages)
    if composite is not None:
        composite.measure(engine, drafter)
    return engine


def _scripted(
    target: Any, drafter: Any, script: Script, composite: Composite | None
) -> tuple[Any, Any]:
    """Target and drafter wrapped to follow the script. If it has recorded acceptance, guesses of
    the drafter with weights are right as often as recorded."""

    def recorded(inner: Any) -> Any:
        return ScriptedDrafter(inner, script)

    target = ScriptedTarget(target, script)
    if not script.recorded:
        return target, drafter
    if composite is not None:
        return target, composite.wrap_weighted(drafter, recorded)
    return target, recorded(drafter)


def require_exact(model: Model, speculation: SpeculationConfig, status: Status = quiet) -> None:
    """Raise UserError if a row's result depends on its place, its neighbours or the loop. This is
    tested on the device, unless the programs are exact by construction."""
    if model.backend.exact(model.target):
        return
    with status("proving that rows do not depend on their place"):
        failed = [c.question for c in model.backend.self_check(model.target) if not c.passed]
        if loop_of(model, speculation) == "device" and not _same_in_both_loops(model, speculation):
            failed.append("the loop that drives the cycles")
    if failed:
        raise UserError(
            f"on this device results depend on: {'; '.join(failed)}. Output would not be "
            "lossless; try --slots 1, --loop host or --dtype float32, and see `specdec doctor`"
        )


def _same_in_both_loops(model: Model, speculation: SpeculationConfig) -> bool:
    """Whether both loops give the same texts; the device loop compiles its own programs."""
    texts = []
    for loop in ("host", "device"):
        engine = make_engine(model, replace(speculation, loop=loop))
        for sampling in VARIANTS:
            prompts = [[2 + i, 3, 4] * 4 for i in range(min(model.target.slots, PROVEN_ROWS))]
            seqs = [Sequence(p, sampling, max_tokens=WARM_TOKENS) for p in prompts]
            engine.run_to_end(seqs)
            texts.append([seq.tokens for seq in seqs])
    return texts[: len(VARIANTS)] == texts[len(VARIANTS) :]


def warm_up(
    engine: Engine,
    samplings: Iterable[Sampling],
    batches: Iterable[int] = (),
    prompts: Iterable[tuple[int, int]] = ((1, 1),),
) -> None:
    """Compile the programs that these requests need, so that no request waits for it.

    batches: numbers of rows that are decoded besides one. prompts: how many are prefilled together,
    and their tokens. Constrained text is warmed up for one row only: larger batches are rarer and
    would double the start-up time.
    """
    for sampling in samplings:
        for batch in batches:
            _decode_all(engine, batch, replace(sampling, seed=0), WARM_STEPS)
        _decode(engine, [[2]], replace(sampling, seed=0), WARM_TOKENS)
        _decode(engine, [[2]], replace(sampling, seed=0), WARM_TOKENS, Unrestricted())
    for count, length in prompts:
        _decode(engine, [[2] * length] * count, Sampling(), 2)
    warm_prefix_cache(engine)
    engine.count_anew()


def warm_pictures(engine: Engine, vision: VisionSpec | None, lengths: Iterable[int] = ()) -> None:
    """Compile what a prompt with a picture needs, for each budget that requests can have, and with
    text around the smallest picture for each of these lengths; nothing is kept."""
    if vision is None:
        return
    white = np.full((1, 1, 3), 255, np.uint8)
    budgets = sorted({vision.budget_for(detail) for detail in ("low", "auto", "high")})
    placed = [PlacedPicture(1, of_levels(white, budget, vision.patches)) for budget in budgets]
    alone = [(each, each.stop + 1) for each in placed]
    around = [(placed[0], length) for length in lengths if length > placed[0].stop]
    for each, length in (*alone, *around):
        tokens = [2, *place_ids(1, each.picture.tokens), *[2] * (length - each.stop)]
        if length + 1 < engine.target.max_len:
            seq = Sequence(tokens, max_tokens=1, reuse=None, pictures=(each,))
            engine.run_to_end([seq])
    engine.count_anew()


def serving_engine(
    model: Model,
    speculation: SpeculationConfig,
    max_waiting: int,
    prefix: PrefixConfig,
    status: Status = quiet,
) -> Engine:
    """An engine that is ready for a server's first request, which then compiles nothing: warm, its
    plain steps timed, and with the memory for prompts that is left over."""
    engine = make_engine(model, speculation, max_waiting, prefix=prefix)
    with status("compiling"):
        batches, prompts = model.backend.warm(model.target)
        warm_up(engine, VARIANTS, batches, prompts)
        alone = [length for count, length in prompts if count == 1]
        warm_pictures(engine, model.target.vision, alone)
    with status("timing plain decoding"):
        measure_plain(engine)
    grant(engine, budget_for(model, prefix))
    return engine


def measure_plain(engine: Engine) -> None:
    """Measure what a step of plain decoding costs, once all is compiled: what speculation is then
    compared with (`EngineTimes.plain`)."""
    slots, costs = engine.target.slots, defaultdict[int, list[float]](list)

    def plain_cycle(seqs: Seqs[Sequence], single: bool) -> list[Round]:
        began = perf_counter()
        done = cycle(engine.target, Plain(), seqs, 0)
        costs[len(seqs)].append(perf_counter() - began)
        return [done]

    driver, engine.cycle = engine.cycle, plain_cycle
    try:
        _decode(engine, [[2]], Sampling(), PLAIN_STEPS)
        _decode_all(engine, slots, Sampling(), PLAIN_STEPS)
    finally:
        engine.cycle = driver
    engine.times.plain_costs = PlainCosts(median(costs[1]), median(costs[slots]), slots)
    engine.count_anew()


def _decode_all(engine: Engine, rows: int, sampling: Sampling, steps: int) -> None:
    """That many steps of that many rows at once; they join over several turns."""
    seqs = [Sequence([2], sampling, max_tokens=engine.target.max_len) for _ in range(rows)]
    for seq in seqs:
        engine.submit(seq)
    while len(engine.scheduler.running) < rows and not engine.idle:
        engine.step()
    for _ in range(steps):
        engine.step()
    for seq in seqs:
        seq.cancelled = True
    engine.step()


def _decode(
    engine: Engine,
    prompts: list[list[int]],
    sampling: Sampling,
    count: int,
    constraint: Constraint | None = None,
) -> None:
    seqs = [Sequence(list(p), sampling, max_tokens=count, constraint=constraint) for p in prompts]
    engine.run_to_end(seqs)

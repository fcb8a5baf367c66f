"""`specdec eval-acceptance`: what a drafter is worth, and that it changes nothing."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.cli.assemble import (
    Model,
    check_folder,
    command_record,
    console,
    load_model,
    make_engine,
    print_json,
    say_model,
)
from specdec.cli.config import ModelConfig, SamplingConfig, SpeculationConfig
from specdec.cli.progress import Bar
from specdec.cycle import host_cycle
from specdec.engine import Engine
from specdec.writing import write_whole

if TYPE_CHECKING:
    from specdec.prompts import Prompt
    from specdec.report import Evaluation

NARROW = "plain, width 1"
"""The fastest plain decoding, where the exact one is wider: speed-ups are quoted against it too."""


def eval_acceptance(
    prompts: Path,
    /,
    *,
    model: ModelConfig = ModelConfig(),  # noqa: B008
    speculation: SpeculationConfig = SpeculationConfig(),  # noqa: B008
    sampling: SamplingConfig = SamplingConfig(),  # noqa: B008
    max_tokens: int = 128,
    limit: int | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Acceptance, tau with its interval, speed against plain, and proof of equal output.

    Exit code 1 if any output differs from plain decoding.

    Parameters
    ----------
    prompts
        JSONL: {"prompt": ...}, {"messages": [...]}, HumanEval or Spec-Bench lines.
    max_tokens
        Most tokens per prompt.
    limit
        Use only the first prompts.
    out
        Folder for report.json and report.png.
    json
        End stdout with one JSON document, the whole report.
    """
    from specdec.plots import print_evaluation, require_matplotlib
    from specdec.prompts import read_prompts

    questions = read_prompts(prompts, limit)
    speculation = speculation.resolved(model)
    sampling.sampling({})  # refuse bad values before a model is loaded
    if out is not None:
        check_folder(out)
        require_matplotlib()
    loaded = load_model(model, speculation)
    say_model(model, loaded)
    evaluation = _compare(loaded, questions, speculation, sampling, max_tokens)
    print_evaluation(evaluation, console)
    record = command_record(
        "eval-acceptance", model=model, speculation=speculation, sampling=sampling
    )
    document = record | {"prompts_file": str(prompts)} | evaluation.to_json()
    if out is not None:
        _save(out, document, evaluation)
    if json:
        print_json(document)
    if not evaluation.equality.equal:
        raise SystemExit(1)


def _compare(
    loaded: Model,
    questions: list[Prompt],
    speculation: SpeculationConfig,
    sampling: SamplingConfig,
    max_tokens: int,
) -> Evaluation:
    """Run the drafter, plain decoding, and the fastest plain decoding on the same prompts."""
    from specdec.evaluate import Settings, evaluate

    tokenizer = loaded.tokenizer
    settings = Settings(
        drafter=speculation.drafter,
        k=speculation.k,
        max_tokens=max_tokens,
        sampling=sampling.sampling(tokenizer.defaults),
        stop_ids=frozenset(tokenizer.stop_ids),
        speed_only=() if loaded.backend.plain(loaded.target) is None else (NARROW,),
    )
    with Bar(console, "evaluating", len(questions)) as bar:
        return evaluate(
            questions,
            lambda prompt: prompt.encode(tokenizer.encode, tokenizer.encode_chat),
            partial(_engine, loaded, speculation),
            settings,
            decode=tokenizer.decode,
            tell=lambda done, total: bar.update(done, total=total),
        )


def _engine(loaded: Model, speculation: SpeculationConfig, name: str) -> Engine:
    """The engine that `evaluate` asks for by name."""
    if name != NARROW:
        return make_engine(loaded, replace(speculation, drafter=name))
    from drafters.none import NoDrafter

    target = loaded.backend.plain(loaded.target)
    assert target is not None, "only asked for where it differs from the exact one"
    return Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))


def _save(out: Path, document: dict, evaluation: Evaluation) -> None:
    """report.json and report.png, written beside and renamed, so that neither is ever half."""
    from specdec.plots import plot_evaluation

    write_whole(out / "report.json", json_module.dumps(document, indent=1))
    plot_evaluation(evaluation, out / "partial.png")
    (out / "partial.png").rename(out / "report.png")
    console.print(f"wrote {out / 'report.json'} and {out / 'report.png'}")

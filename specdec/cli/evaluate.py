"""`specdec eval-acceptance`: a drafter's acceptance and speed, and proof of equal output."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from drafters.registry import find, plain, resolved
from specdec.assembly.engine import make_engine
from specdec.assembly.model import Model
from specdec.bench.display import print_policy
from specdec.cli import topics
from specdec.cli.console import (
    check_file,
    check_folder,
    command_record,
    console,
    print_json,
    say_model,
)
from specdec.cli.progress import Bar
from specdec.cli.start import loaded_model
from specdec.core.config import ModelConfig, SamplingConfig, SpeculationConfig
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.policy.choice import Policy
from specdec.core.policy.report import report
from specdec.core.writing import beside, write_whole
from targets.backend import meter_of

if TYPE_CHECKING:
    from specdec.evaluation.prompts import Prompt
    from specdec.evaluation.results import Evaluation
    from specdec.evaluation.run import Settings
    from targets.tokenizer import Tokenizer

NARROW = "plain, width 1"
"""The fastest plain decoding, where the exact one is wider: speed-ups are quoted against it too."""


def eval_acceptance(
    prompts: Path,
    /,
    *,
    model: topics.Model = ModelConfig(),  # noqa: B008
    speculation: topics.Speculation = topics.AnySpeculation(),  # noqa: B008
    sampling: topics.Sampling = SamplingConfig(),  # noqa: B008
    max_tokens: int = 128,
    limit: int | None = None,
    thinking: bool = False,
    out: Path | None = None,
    record: Path | None = None,
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
    thinking
        Let the model think before it answers a chat, by its chat template.
    out
        Folder for report.json and report.png.
    record
        Write, too, how far the drafter was right from each token on: a script for bench --script.
        It takes one cycle per token.
    json
        End stdout with one JSON document, the whole report.
    """
    from specdec.evaluation.display import print_evaluation
    from specdec.evaluation.prompts import read_prompts, thinking_prompts

    questions = read_prompts(prompts, limit)
    if thinking:
        questions = thinking_prompts(questions)
    speculation = resolved(speculation, model)
    sampling.sampling({})  # refuse bad values before a model is loaded
    if out is not None:
        check_folder(out)
    if record is not None:
        _refuse_recording(record, speculation)
    loaded = loaded_model(model, speculation)
    say_model(loaded)
    evaluation, policy = _compare(loaded, questions, speculation, sampling, max_tokens)
    print_evaluation(evaluation, console)
    document = command_record(
        "eval-acceptance", model=loaded.config, speculation=speculation, sampling=sampling
    )
    document |= {"prompts_file": str(prompts), "thinking": thinking} | evaluation.to_json()
    if policy is not None:
        document["policy"] = report(policy)
        print_policy(document["policy"], console)
    if out is not None:
        _save(out, document, evaluation)
    if record is not None:
        settings = _settings(loaded, speculation, sampling, max_tokens)
        _record(loaded, questions, speculation, settings, record)
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
) -> tuple[Evaluation, Policy | None]:
    """Run the drafter, plain decoding, and the fastest plain decoding on the same prompts. Returns
    the evaluation and the drafter's policy, if it has one."""
    from specdec.evaluation.run import evaluate

    tokenizer = loaded.tokenizer
    settings = _settings(loaded, speculation, sampling, max_tokens)
    engines: dict[str, Engine] = {}

    def make(name: str) -> Engine:
        engines[name] = _engine(loaded, speculation, name)
        return engines[name]

    with Bar(console, "evaluating", len(questions)) as bar:
        found = evaluate(
            questions,
            partial(_encoded, tokenizer),
            make,
            settings,
            decode=tokenizer.decode,
            tell=lambda done, total: bar.update(done, total=total),
        )
    return found, engines[speculation.drafter].drafting.policy


def _settings(
    loaded: Model, speculation: SpeculationConfig, sampling: SamplingConfig, max_tokens: int
) -> Settings:
    from specdec.evaluation.run import Settings

    return Settings(
        drafter=speculation.drafter,
        k=speculation.k,
        max_tokens=max_tokens,
        sampling=sampling.sampling(loaded.tokenizer.defaults),
        stop_ids=frozenset(loaded.tokenizer.stop_ids),
        speed_only=() if meter_of(loaded.target).plain() is None else (NARROW,),
    )


def _encoded(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    return prompt.encode(tokenizer.encode, tokenizer.encode_chat)


def _refuse_recording(file: Path, speculation: SpeculationConfig) -> None:
    """Raise UserError if the file can't be written or the drafter can't be recorded."""
    check_file(file, "--record")
    if not find(speculation.drafter).weighted:
        raise UserError(
            f"--record is of drafters with weights: what {speculation.drafter} guesses follows "
            "from the text, or from others"
        )
    if speculation.k < 1:
        raise UserError("--record needs --k 1 or more: without guesses none is right")


def _record(
    loaded: Model,
    questions: list[Prompt],
    speculation: SpeculationConfig,
    settings: Settings,
    file: Path,
) -> None:
    """Answer once more, a token a cycle, and write the script."""
    from specdec.evaluation.record import record, script_row
    from specdec.evaluation.run import questions_of

    encode, longest = partial(_encoded, loaded.tokenizer), loaded.target.max_len
    asked, _ = questions_of(questions, encode, settings, longest)
    engine = make_engine(loaded, replace(speculation, loop="host"))
    with Bar(console, "recording", len(asked)) as bar:
        found = record(engine, asked, settings, lambda done, total: bar.update(done, total=total))
    recorded = [one for one in found if len(one.answer) > 1]  # shorter ones are prefill's alone
    rows = [script_row([one], [settings.drafter], settings.k) for one in recorded]
    write_whole(file, "".join(json_module.dumps(row) + "\n" for row in rows))
    console.print(f"wrote {file}: {len(recorded)} answers, of {len(found)}")


def _engine(loaded: Model, speculation: SpeculationConfig, name: str) -> Engine:
    """The engine for one of the names that `evaluate` uses."""
    if name != NARROW:
        return make_engine(loaded, replace(speculation, drafter=name))
    target = meter_of(loaded.target).plain()
    assert target is not None, "only asked for where it differs from the exact one"
    narrow = replace(loaded, target=target)
    return make_engine(narrow, replace(plain(speculation), loop="host"))


def _save(out: Path, document: dict, evaluation: Evaluation) -> None:
    """report.json and report.png, neither of which is ever half. Without
    matplotlib there is no picture."""
    from specdec.evaluation.display import HOW, plot_evaluation

    write_whole(out / "report.json", json_module.dumps(document, indent=1))
    if find_spec("matplotlib") is None:
        console.print(f"wrote {out / 'report.json'}; report.png needs matplotlib: {HOW}")
        return
    with beside(out / "report.png") as file:
        plot_evaluation(evaluation, file)
    console.print(f"wrote {out / 'report.json'} and {out / 'report.png'}")

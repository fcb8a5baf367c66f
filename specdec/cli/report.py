"""`specdec report`: a receipt of a model on this machine, as JSON and as a page; and two of them
compared."""

from __future__ import annotations

import gc
import json as json_module
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from drafters.registry import PLAIN, config_type, resolved
from specdec.bench.display import print_table
from specdec.cli import topics
from specdec.cli.console import check_folder, console, print_json, read_text
from specdec.cli.progress import Bar
from specdec.cli.short_help import HELP_FLAGS
from specdec.cli.start import SHOWN
from specdec.core.alone import hold_alone
from specdec.core.config import ModelConfig, ReportModelConfig, SpeculationConfig
from specdec.core.errors import UserError
from specdec.core.writing import write_whole
from specdec.report.profile import K, output_length, profile_of
from targets.backend import backend_of

if TYPE_CHECKING:
    from specdec.report.parts import Section
    from specdec.report.run import Request
    from specdec.report.subject import Progress

COMBINED = "auto"
"""The drafter that is loaded: it brings the others."""
OF_WEIGHTS = "assistant"
"""The drafter whose weights --assistant names."""

app = App(name="report", help_flags=HELP_FLAGS)
Model = Annotated[ReportModelConfig, Parameter(name="*", group="Model")]


@app.default
def report(
    *,
    out: Path,
    model: Model = ReportModelConfig(),  # noqa: B008
    assistant: str | None = None,
    prompts: Path | None = None,
    text: Path | None = None,
    profile: Literal["quick", "full"] | None = None,
    random: str | None = None,
    json: topics.Json = False,
) -> None:
    """A receipt of a model on this machine, to keep or to publish: exactness, parity with
    transformers, acceptance, equal output, speed and memory. It contains no prompt, no answer and
    no path.

    Each section is written when it is measured. The same command goes on where it was cut off.
    Exit code 1 if any output differs from plain decoding.

    Parameters
    ----------
    out
        Folder for report.json, report.html and the sections.
    assistant
        The assistant's folder or name on the hub; by default the one in or beside the model's
        folder. none leaves it out.
    prompts
        JSONL of prompts: HumanEval, Spec-Bench, SPEED-Bench or chats. By default 32 of our own, in
        eight categories.
    text
        A UTF-8 text to measure perplexity on.
    profile
        How much is measured; by default quick on a CPU and full on an accelerator.
    random
        Random weights of a public model's true size (gemma-4-e4b, ...), to time without weights.
    """
    from specdec.report import page, run

    check_folder(out)
    hold_alone(out, "--out")
    request = _request(model, assistant, prompts, text, profile, random)
    restart = partial(_again, request.accelerated)
    document = run.measure(request, out, _progress(), _say, restart)
    write_whole(out / "report.json", json_module.dumps(document, indent=1))
    write_whole(out / "report.html", page.html(document))
    _say_figures(document)
    verdict = "answers equal plain decoding" if document["equal"] else "ANSWERS DIFFER"
    _say(f"{verdict}; wrote {out / 'report.json'} and {out / 'report.html'}")
    if json:
        print_json(document)
    if not document["equal"]:
        raise SystemExit(1)


@app.command
def diff(first: Path, second: Path, /, *, json: topics.Json = False) -> None:
    """Compare two receipts: what they are of, their digests, then the ratios of the second's
    figures to the first's.

    Parameters
    ----------
    first
        A report.json, or the folder that it is in.
    second
        Another one.
    """
    from specdec.report.comparison import compare, lines, read_receipt

    found = compare(read_receipt(first), read_receipt(second))
    for line in lines(found):
        console.print(line, markup=False, soft_wrap=True)
    if json:
        print_json(found)


def _request(
    model: ModelConfig,
    assistant: str | None,
    prompts: Path | None,
    text: Path | None,
    profile: str | None,
    random: str | None,
) -> Request:
    """All options checked before anything is loaded. Raises UserError."""
    from specdec.report.questions import built_in, from_file
    from specdec.report.run import Request

    backend = backend_of(model)
    content = None if text is None else read_text(text)
    if content is not None and not content.strip():
        raise UserError(f"--text: {text} is empty: there is nothing to score")
    asked = None if prompts is None else from_file(prompts)
    speculation = _speculation(model, assistant, random is not None)
    accelerated = not backend.device(model).startswith("cpu")
    chosen = profile_of(profile, accelerated)
    return Request(
        model,
        speculation,
        chosen,
        output_length(accelerated),
        asked or built_in(chosen.long_texts),
        accelerated,
        content,
        random,
    )


def _speculation(model: ModelConfig, assistant: str | None, random: bool) -> SpeculationConfig:
    """Resolved. Raises UserError."""
    options: dict[str, Any] = {"drafter": COMBINED, "k": K}
    if assistant == PLAIN:
        options |= {"auto_with": PLAIN}
    elif assistant is not None or random:
        options |= {"auto_with": OF_WEIGHTS, "draft_model": assistant}
    return resolved(config_type()(**options), model, random)


def _progress() -> Progress:
    from specdec.report.subject import Progress

    return Progress(SHOWN, partial(Bar, console))


def _say(line: str, style: str | None = None) -> None:
    console.print(line, style=style, markup=False, soft_wrap=True)


def _say_figures(document: Section) -> None:
    """Speed by drafter and users, then what to doubt and what is missing."""
    from specdec.report.subject import Condition

    columns = {
        "drafter": lambda row: row["drafter"],
        "users": lambda row: str(row["users"]),
        "tok/s": lambda row: f"{row['output_throughput']:,.1f}",
        "speed-up": lambda row: f"{row['speedup']:.2f}",
        "spread": lambda row: f"{row['spread']:.0%}",
        "TTFT ms": lambda row: f"{row['median_ttft_ms']:,.1f}",
        "TPOT ms": lambda row: f"{row['median_tpot_ms']:,.2f}",
    }
    print_table("answers as users see them", document["speed"]["rows"], columns, console)
    for row in document["equality"]["rows"]:
        tau = f"{row['run_tau']:.2f} tokens per verify"
        _say(f"{document['equality']['drafter']}, {Condition.of(row)}: {tau}")
    for note in document["warnings"]:
        _say(f"warning: {note['sentence']}", "yellow")
    for note in document["skipped"]:
        _say(f"left out: {note['sentence']}", "dim")


def _again(accelerated: bool) -> None:
    """Make room for transformers. A device's memory is free only when this process ends: it is
    replaced by one that finds every section there and loads nothing."""
    gc.collect()
    if accelerated:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

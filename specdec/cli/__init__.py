"""The command line: one module per command, listed in COMMANDS.

Only this package may import everything. It does so inside its commands, so that `--help` answers at
once and only commands that need a backend fail without it.
"""

from __future__ import annotations

import os
import select
import sys
from io import TextIOWrapper

from cyclopts import App, CycloptsError

from specdec.cli.failure import say_failure
from specdec.cli.options import check_whole, read_config, take_config
from specdec.cli.short_help import HELP_FLAGS, choose_help
from specdec.core.errors import UserError
from specdec.core.packages import check_packages
from specdec.core.version import VERSION
from specdec.core.writing import said_of

app = App(
    name="specdec",
    version=VERSION,
    help_flags=HELP_FLAGS,
    help=(
        "Lossless speculative decoding for Gemma 4.\n\n"
        'Start with:  specdec generate "def quicksort(items):"\n\n'
        "Without --model everything runs on the embedded model `mini`, on this machine. "
        "Any option can come from a TOML file: specdec COMMAND --config FILE."
    ),
)
COMMANDS = {
    "generate": (
        "generate:generate",
        "Stream one answer and report tau, acceptance and speed.",
        'specdec generate "def quicksort(items):" --k 7',
    ),
    "chat": (
        "chat:chat",
        "Chat in the terminal; /drafter and /k change who guesses, and tau stands behind each "
        "answer.",
        "specdec chat --model ./gemma-4-E4B-it --drafter assistant --k 7",
    ),
    "verify": (
        "verify:verify",
        "Prove answers by replaying their receipts: the first false id is named. Exit code 0: all "
        "are verified; 1: a claim is false; 2: one was refused, or can't be compared here.",
        "specdec verify answer.json --model ./gemma-4-E4B-it",
    ),
    "serve": (
        "serve:serve",
        "Serve an OpenAI-compatible API.",
        "specdec serve --model ./gemma-4-E4B-it --drafter assistant --k 7 --port 8000",
    ),
    "top": (
        "top:top",
        "Watch a server live: queue, slots, tau by drafter, speed, acceptance by position.",
        "specdec top http://127.0.0.1:8000",
    ),
    "compile": (
        "compile:compile",
        "Compile ahead all that `serve` with the same options will run, so that it compiles "
        "nothing: on the machine that will serve, into the folder of --cache.",
        "specdec compile --model ./gemma-4-E4B-it --drafter ngram --k 4 --slots 8",
    ),
    "eval-acceptance": (
        "evaluate:eval_acceptance",
        "Measure tau and acceptance on your prompts, and prove equal output.",
        "specdec eval-acceptance prompts.jsonl --k 4 --temperature 0.8 --out report",
    ),
    "report": (
        "report:app",
        "Prove a model on this machine, and write the receipt: exactness, acceptance, speed.",
        "specdec report --model ./gemma-4-E4B-it --out receipt",
    ),
    "distil": (
        "distil:distil",
        "Let the target answer prompts, as data to train a drafter on.",
        "specdec distil prompts.jsonl --out data --temperature 1",
    ),
    "train-eagle3": (
        "train_eagle3:train_eagle3",
        "Train an EAGLE-3 head on distilled answers.",
        "specdec train-eagle3 configs/eagle3-mini-cpu.toml --data data --run run",
    ),
    "export-eagle3": (
        "export_eagle3:export_eagle3",
        "Write a trained head in the forms that engines load.",
        "specdec export-eagle3 run --out head",
    ),
    "train-assistant": (
        "train_assistant:train_assistant",
        "Train an assistant, which reads the model's keys and values, on distilled answers.",
        "specdec train-assistant configs/assistant-mini-cpu.toml --data data --run run",
    ),
    "export-assistant": (
        "export_assistant:export_assistant",
        "Write a trained assistant as transformers reads it.",
        "specdec export-assistant run --out assistant",
    ),
    "train-dflash": (
        "train_dflash:train_dflash",
        "Train a block drafter, which drafts several tokens in one pass, on distilled answers.",
        "specdec train-dflash configs/dspark-mini-cpu.toml --data data --run run",
    ),
    "export-dflash": (
        "export_dflash:export_dflash",
        "Write a trained block drafter as speculators reads it.",
        "specdec export-dflash run --out head",
    ),
    "bench": (
        "bench:bench",
        "Time steps against the memory roofline, and speed end to end.",
        "specdec bench --random gemma-4-e4b --slots 8 --contexts 512",
    ),
    "compile-report": (
        "compile_report:compile_report",
        "Compile for a TPU that is not there, and count what a step moves.",
        "specdec compile-report gemma-4-31b --tp 4 --int8 --contexts 512,2048",
    ),
    "perplexity": (
        "perplexity:perplexity",
        "Score a text file, with an interval.",
        "specdec perplexity README.md --window 1024 --stride 512",
    ),
    "doctor": (
        "doctor:doctor",
        "Check versions, devices, exactness and wiring.",
        "specdec doctor --model ./gemma-4-E4B-it --slots 8",
    ),
}
SHORT_HELP = "generate", "chat", "serve"
"""Commands of which `--help` shows the common options; `--help-all` has the rest."""
for _name, (_where, _what, _example) in COMMANDS.items():
    app.command(f"specdec.cli.{_where}", name=_name, help=f"{_what}\n\nExample:  {_example}")


def main(argv: list[str] | None = None) -> None:
    """Run a command; bad input is one line on stderr and exit code 2."""
    try:
        try:
            _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, so that a failure is still reported
    except (UserError, CycloptsError) as problem:
        say_failure(problem)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as problem:
        unwritable = _drop_output()
        if isinstance(problem, BrokenPipeError) and unwritable:
            sys.exit(141)  # the reader closed the pipe: a shell's code for SIGPIPE
        line = said_of(problem)
        if line is None:
            raise
        say_failure(line)
        sys.exit(2)


def _any_text() -> None:
    """What a terminal's encoding lacks is written escaped, and what is no text in it is read as
    parts of characters, which are refused where they are used."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def _run(arguments: list[str]) -> None:
    check_packages()
    _any_text()
    arguments, file = take_config(arguments)
    sources = [] if file is None else [read_config(file, COMMANDS)]
    app.config = [*sources, check_whole]
    if arguments and arguments[0] in SHORT_HELP:
        choose_help(app[arguments[0]], arguments)
    app(arguments, exit_on_error=False, print_error=False, result_action="return_value")


def _drop_output() -> bool:
    """Whether stdout can't be written. If so it is redirected to /dev/null, as Python would flush
    it again at exit and print an error."""
    try:
        sys.stdout.flush()
    except OSError:
        unwritable = True
    else:
        unwritable = _reader_is_gone()  # a failed write may have left nothing to flush
    if unwritable:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return unwritable


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe or a socket that has been closed at its other end."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in output.poll(0))

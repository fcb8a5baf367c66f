"""`--help` of the doors' commands: one screen of common options; `--help-all` has every option."""

from __future__ import annotations

import re

import pytest

from specdec.cli import COMMANDS, SHORT_HELP, app
from tests.support.commands import run

LINES = 50
MODEL = "--model", "--backend", "--dtype", "--kv-dtype", "--max-len", "--slots"
SPECULATION = "--drafter", "--k", "--draft-model"
SAMPLING = "--temperature", "--top-p", "--top-k", "--seed"
OF_SERVE = "--host", "--port", "--api-key", "--api-key-file", "--served-model-name"
OF_GENERATE = "--prompt-file", "--chat", "--max-tokens", "--receipt", "--json"
COMMON = {
    "serve": {*MODEL, *SPECULATION, *OF_SERVE, "--max-waiting"},
    "generate": {*MODEL, *SPECULATION, *SAMPLING, *OF_GENERATE},
    "chat": {*MODEL, *SPECULATION, *SAMPLING, "--system", "--max-tokens"},
}


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def options_in(out: str) -> set[str]:
    """The long options that a help's panels have rows for."""
    rows = (line.strip("│ ").split() for line in out.splitlines() if line.startswith("│ -"))
    return {word for row in rows for word in row[:2] if word.startswith("--")}


def all_options(command: str) -> set[str]:
    arguments = app[command].assemble_argument_collection()
    return {name for each in arguments if each.show for name in each.names if name[:2] == "--"}


@pytest.mark.parametrize("command", SHORT_HELP)
def test_help_is_one_screen_of_common_options(capsys, command):
    out, _ = run(capsys, command, "--help")
    assert len(out.splitlines()) <= LINES
    shown = {name for name in options_in(out) if not name.startswith("--no-")}
    assert shown == COMMON[command]
    assert out.splitlines()[-1] == f"All options: specdec {command} --help-all"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_has_every_option(capsys, command):
    out, _ = run(capsys, command, "--help-all")
    assert all_options(command) <= set(re.findall(r"--[a-z0-9-]+", out))
    assert "All options:" not in out


def test_the_place_of_the_flag_does_not_matter(capsys):
    short = run(capsys, "serve", "-h", "--k", "2")
    assert short == run(capsys, "serve", "--k", "2", "--help")
    whole = run(capsys, "serve", "--k", "2", "--help-all")
    assert whole == run(capsys, "serve", "--help-all") != short


def test_short_help_has_first_sentences_and_defaults(capsys):
    out, _ = run(capsys, "serve", "--help")
    assert "An API key; may be repeated." in out and "as bearer" not in out
    assert "Port to listen on. [default: 8000]" in out and "choices:" in out


def test_other_commands_show_every_option_at_once(capsys):
    assert run(capsys, "bench", "--help") == run(capsys, "bench", "--help-all")

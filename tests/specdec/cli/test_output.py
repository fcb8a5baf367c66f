"""Unwritable results: refused before the work, or reported in one line with earlier results intact.
A closed pipe or an interrupt gives no traceback."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from specdec.cli.console import check_file
from specdec.cli.logs import FORM, OneLine
from specdec.core.errors import UserError
from specdec.core.writing import write_whole
from tests.support.commands import PROMPT, refused
from tests.support.distil_worker import run as distil_fake
from tests.support.eagle3_worker import RECIPE
from tests.support.places import ROOT
from training.distil import read_answers, shards

RECIPE_FILE = str(ROOT / "configs" / "eagle3-mini-cpu.toml")


def test_a_terminal_without_a_letter_and_a_user_without_a_home(tmp_path):
    """What stdout's encoding lacks is escaped; what can't be kept is made again."""
    code = (
        "import sys, pathlib, specdec.cli\n"
        "def none(): raise RuntimeError('no home')\n"
        "pathlib.Path.home = none\n"
        "specdec.cli._any_text()\n"
        "import specdec.audit.digests, targets.jax.compile_cache as cache\n"
        "assert cache._writable(cache.PROGRAMS)\n"
        "print('caf\\xe9', ascii(sys.stdin.read()))"
    )
    env = os.environ | {"PYTHONIOENCODING": "ascii", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], input=b"\xff", env=env, cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == "caf\\xe9 '\\udcff'"
    assert not list(tmp_path.iterdir()), "its folder goes with the process"


def test_no_client_writes_lines_of_its_own_into_the_log():
    told = "arguments stay free: a\n2026-01-01 INFO specdec: \x1b[31mforged\u2028"
    record = logging.LogRecord("specdec", logging.INFO, "", 0, told, (), None)
    (line,) = OneLine(FORM).format(record).splitlines()
    assert "a\\n2026" in line and "\\x1b[31m" in line


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "--out", "/proc/x.json"],
        ["bench", "--plot", "/proc/x.png"],
        ["bench", "--out", "/tmp"],
        ["eval-acceptance", "PROMPTS", "--out", "/proc"],
        ["distil", "PROMPTS", "--out", "/proc"],
        ["export-eagle3", "/nowhere", "--out", "/proc"],
        ["train-eagle3", RECIPE_FILE, "--data", "/nowhere", "--run", "/proc"],
        ["train-eagle3", RECIPE_FILE, "--data", "/no", "--run", "TMP", "--feature-cache", "/proc"],
    ],
    ids=lambda command: " ".join(command[:1] + command[-2:]),
)
def test_where_nothing_can_be_written_is_said_first(capsys, tmp_path, command) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"hello"')
    named = {"PROMPTS": str(prompts), "TMP": str(tmp_path / "run")}
    line = refused(capsys, *(named.get(word, word) for word in command))
    assert command[-2] in line and command[-1].partition("/x.")[0] in line


def test_of_a_link_the_file_s_own_folder_is_tried(tmp_path) -> None:
    (tmp_path / "latest.json").symlink_to("/proc/x.json")
    with pytest.raises(UserError, match="--out: cannot write to /proc"):
        check_file(tmp_path / "latest.json", "--out")
    check_file(Path("/dev/stdout"), "--out")


def fill_up(monkeypatch) -> None:
    """What is written `beside` from now on is on a full disk."""

    def full(place: Path) -> Path:
        (made := place.with_name(f"full{place.suffix}")).symlink_to("/dev/full")
        return made

    monkeypatch.setattr("specdec.core.writing._new_file", full)


def test_a_disk_that_fills_up_costs_no_whole_shard(tmp_path, monkeypatch) -> None:
    def tell(progress) -> None:
        if progress.rows == 10:
            fill_up(patch)

    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="No space left.*before it stand.*repeat the command"),
    ):
        distil_fake(tmp_path, tell)
    assert shards(tmp_path) and not (tmp_path / "full.arrow").is_symlink()
    distil_fake(tmp_path)
    rows, _ = read_answers(tmp_path)
    assert rows["row"][:] == list(range(22))


def test_what_is_written_whole_survives_a_full_disk(tmp_path, monkeypatch) -> None:
    file = tmp_path / "report.json"
    write_whole(file, "before")
    fill_up(monkeypatch)
    with pytest.raises(UserError, match=r"report.json: No space left.*make room"):
        write_whole(file, "after")
    assert file.read_text() == "before" and not (tmp_path / "full.json").is_symlink()
    with pytest.raises(UserError, match="No space left"):
        write_whole(Path("/dev/full"), "nowhere")
    assert Path("/dev/full").is_char_device()


def test_a_log_on_a_full_disk_is_one_line(tmp_path) -> None:
    from training.trainer import Trainer

    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    run = object.__new__(Trainer)
    run.run, run.recipe = tmp_path, RECIPE
    with pytest.raises(UserError, match=r"log.jsonl.*No space left.*checkpoints"):
        run._log({"step": 1}, lambda _: None)


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = f'specdec() {{ {sys.executable} -m specdec "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "command",
    ["--help", f"generate '{PROMPT}' --max-tokens 400 --drafter none"],
)
def test_who_reads_no_further_sees_no_traceback(command) -> None:
    done = shell(f"specdec {command} | head -c 5 >/dev/null; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.strip() in ("1", "141") and "Traceback" not in done.stderr, done


def test_a_full_disk_behind_stdout_is_one_line() -> None:
    done = shell("specdec --version >/dev/full")
    assert done.returncode == 2 and done.stderr.startswith("specdec: cannot write"), done
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("module", ["cyclopts", "jax"])
def test_an_interrupted_import_is_no_traceback(tmp_path, module) -> None:
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    done = shell("specdec generate hello", PYTHONPATH=str(tmp_path))
    assert done.returncode == 130 and not done.stderr, done


def test_the_console_script_starts_with_the_light_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["specdec"] == "specdec.__main__:main"

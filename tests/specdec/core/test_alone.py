"""One process works in a folder, until it ends, however it ends."""

from __future__ import annotations

import os

import pytest

from specdec.core.alone import hold_alone
from specdec.core.errors import UserError
from specdec.core.writing import UNFINISHED
from tests.support.commands import held, refused
from tests.support.places import ROOT

RECIPES = ROOT / "configs"


@pytest.mark.parametrize(
    "command",
    [
        ["train-eagle3", str(RECIPES / "eagle3-mini-cpu.toml"), "--data", "/nowhere", "--run"],
        ["train-dflash", str(RECIPES / "dspark-mini-cpu.toml"), "--data", "/nowhere", "--run"],
        ["train-assistant", str(RECIPES / "assistant-mini-cpu.toml"), "--data", "/no", "--run"],
        ["distil", "PROMPTS", "--out"],
        ["report", "--out"],
    ],
    ids=lambda command: command[0],
)
def test_the_second_process_is_refused_in_one_line(capsys, tmp_path, command) -> None:
    (tmp_path / "prompts.jsonl").write_text('"hello"')
    words = [word.replace("PROMPTS", str(tmp_path / "prompts.jsonl")) for word in command]
    folder = tmp_path / "run"
    folder.mkdir()
    with held(folder):
        line = refused(capsys, *words, str(folder))
    assert f"{command[-1]}: another process works in {folder}" in line


def test_it_goes_on_after_a_kill_and_for_the_same_process(tmp_path) -> None:
    with held(tmp_path) as other:
        with pytest.raises(UserError, match="another process"):
            hold_alone(tmp_path, "--run")
        other.kill()
        other.wait()
        hold_alone(tmp_path, "--run")
    hold_alone(tmp_path, "--run")


def test_a_folder_of_another_name_is_free(tmp_path) -> None:
    (tmp_path / "other").mkdir()
    with held(tmp_path):
        hold_alone(tmp_path / "other", "--run")
        (tmp_path / "link").symlink_to(tmp_path)
        with pytest.raises(UserError, match="another process"):
            hold_alone(tmp_path / "link", "--run")


def test_what_a_kill_left_half_written_goes(tmp_path) -> None:
    old, new, mine = (
        tmp_path / f"{name}.json" for name in (f"{UNFINISHED}0", f"{UNFINISHED}1", "x")
    )
    for file in (old, new, mine):
        file.write_text("half")
    os.utime(old, (0, 0))
    os.utime(mine, (0, 0))
    hold_alone(tmp_path, "--run")
    assert not old.exists() and new.exists() and mine.exists()


def test_whoever_may_write_in_the_folder_may_go_on(tmp_path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with held(shared) as other:
        other.kill()
    assert len(list(shared.iterdir())) == 1
    for file in shared.iterdir():
        assert file.stat().st_mode & 0o666 == 0o666

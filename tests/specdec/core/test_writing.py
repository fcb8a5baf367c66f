"""Files that are written whole: what lies beside them, links, modes, and names of the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.core.errors import UserError
from specdec.core.writing import beside, write_whole
from tests.support.places import ROOT


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_no_file_of_the_user_s_is_touched(tmp_path) -> None:
    (tmp_path / "partial.json").write_text("mine")
    write_whole(tmp_path / "a.json", "x")
    assert (tmp_path / "partial.json").read_text() == "mine"
    assert names(tmp_path) == ["a.json", "partial.json"]


def test_a_link_stays_one_and_its_file_is_the_one_that_is_written(tmp_path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "latest.json").symlink_to("deep/a.json")
    for text in ("first", "second"):  # made, and replaced
        write_whole(tmp_path / "latest.json", text)
        assert (tmp_path / "deep" / "a.json").read_text() == text
    assert (tmp_path / "latest.json").is_symlink() and names(tmp_path / "deep") == ["a.json"]


def test_two_that_write_side_by_side_do_not_swap_files(tmp_path) -> None:
    with beside(tmp_path / "a.json") as a, beside(tmp_path / "b.json") as b:
        a.write_text("a")
        b.write_text("b")
        assert not list(tmp_path.glob("*.json"))  # who reads all of them reads whole ones
    assert [(tmp_path / name).read_text() for name in names(tmp_path)] == ["a", "b"]
    assert names(tmp_path) == ["a.json", "b.json"]


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_the_file_as_it_was_and_nothing_beside(tmp_path, failure) -> None:
    write_whole(tmp_path / "a.json", "before")
    with pytest.raises(failure), beside(tmp_path / "a.json") as file:
        file.write_text("half")
        raise failure
    assert (tmp_path / "a.json").read_text() == "before" and names(tmp_path) == ["a.json"]


def test_modes_are_the_usual_ones_or_those_that_the_file_had(tmp_path) -> None:
    (tmp_path / "usual").touch()
    with beside(tmp_path / "new") as file:
        file.unlink()
        file.touch(0o600)  # as libraries that write atomically do
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    (tmp_path / "new").chmod(0o640)
    write_whole(tmp_path / "new", "x")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_stdout_s_name_is_written_through_and_not_replaced(tmp_path) -> None:
    """Redirected to a file it looks like one, in a folder where root may rename."""
    script = (
        "from pathlib import Path; from specdec.core.writing import beside, write_whole;"
        "write_whole(Path('stdout'), 'told')"
    )
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout is
    with (tmp_path / "out").open("w") as out:
        path = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", script]
        subprocess.run(command, stdout=out, env=path, cwd=tmp_path, check=True)
        kept = os.stat(out.fileno()).st_ino
    assert (tmp_path / "out").read_text() == "told" and (tmp_path / "out").stat().st_ino == kept
    assert (tmp_path / "stdout").is_symlink() and names(tmp_path) == ["out", "stdout"]


def test_a_folder_that_is_not_there_is_one_line(tmp_path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*a.json: No such file"):
        write_whole(tmp_path / "none" / "a.json", "x")

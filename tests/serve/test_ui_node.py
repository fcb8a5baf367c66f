"""What the page's scripts do, in node with as much of a browser as they need (page/browser.js)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT

NODE = shutil.which("node")
if NODE is None:
    pytest.skip("needs node (https://nodejs.org)", allow_module_level=True)

BEGIN = """import { $, answers, opened, posted, pressed, rejections, said, sent, turns, until }
  from "./browser.js";
const tell = (found) => console.log(JSON.stringify(found));
"""


@pytest.fixture
def node(tmp_path: Path) -> Any:
    """Runs a script beside the page's files; what it tells."""
    static = ROOT / "serve" / "ui" / "static"
    for file in (*static.glob("*.js"), ROOT / "tests" / "serve" / "page" / "browser.js"):
        shutil.copy(file, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def run(script: str) -> Any:
        (tmp_path / "script.js").write_text(BEGIN + script + "\nprocess.exit(0);")
        done = subprocess.run(
            [NODE, "script.js"], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


TWO_TURNS = """await opened();
await sent("One", "first");
await sent("Two", "second");
"""


def test_an_edited_message_that_is_gone_becomes_a_new_one(node) -> None:
    found = node(
        f"""{TWO_TURNS}
        pressed(turns()[1], "Edit the message");
        const editing = !$("editing").hidden;
        answers.push("anew");
        pressed(turns()[0], "Regenerate the answer");
        await until(() => turns().length === 1 && $("stop").hidden);
        const left = $("editing").hidden;
        await sent($("prompt").value, "third");
        tell([editing, left, said(), turns().length]);"""
    )
    assert found == [True, True, ["One", "anew", "Two"], 2]


def test_an_edit_stays_where_nothing_was_answered_in_its_place(node) -> None:
    found = node(
        f"""{TWO_TURNS}
        pressed(turns()[1], "Edit the message");
        answers.push(Promise.reject(new Error("no answer")));
        pressed(turns()[0], "Regenerate the answer");
        await until(() => !$("trouble").hidden && $("stop").hidden);
        const editing = !$("editing").hidden;
        await sent("Two, edited", "third");
        tell([editing, said(), turns().length]);"""
    )
    assert found == [True, ["One", "first", "Two, edited"], 2]

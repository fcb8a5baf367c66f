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
            [NODE, "script.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60
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


RACE = """await opened();
$("prompt").value = "One";
const stopped = () => [$("skip").hidden, $("race-state").textContent, $("trouble").hidden];
const later = (text) => new Promise((tell) => setTimeout(() => tell(text), 100));
"""


def test_a_race_that_is_stopped_says_so(node) -> None:
    found = node(
        f"""{RACE}
        answers.push("abc", new Promise(() => {{}}));
        $("run-race").fire("click");
        await until(() => posted.length === 2);
        const running = $("race-state").textContent;
        $("stop").fire("click");
        await until(() => $("stop").hidden);
        tell([running, ...stopped()]);"""
    )
    assert found == ["Running with speculation: 3 tokens", True, "Stopped.", True]


def test_a_replay_that_is_stopped_has_no_end_to_skip_to(node) -> None:
    found = node(
        f"""{RACE}
        answers.push(later("abc"), later("abc"));
        let shown;
        globalThis.requestAnimationFrame = (draw) => {{
          shown = !$("skip").hidden;
          $("stop").fire("click");
          setTimeout(draw, 0);
        }};
        $("run-race").fire("click");
        await until(() => shown && $("stop").hidden);
        tell([shown, ...stopped()]);"""
    )
    assert found == [True, True, "Stopped.", True]


def test_a_text_that_is_given_stays_the_browser_s(node) -> None:
    found = node(
        """await opened();
        const picture = { name: "a.png", type: "image/png" };
        const given = (kind, how, types, files) => {
          const data = { types, files };
          const event = document.fire(kind, { [how]: data }).defaultPrevented;
          return event;
        };
        const kept = [];
        for (const kind of ["dragover", "drop"]) {
          kept.push(given(kind, "dataTransfer", ["text/plain", "text/html"], []));
          kept.push(given(kind, "dataTransfer", ["Files"], [picture]));
        }
        await until(() => $("pictures").children.length === 1);
        kept.push(given("paste", "clipboardData", ["text/plain", "text/html", "Files"], [picture]));
        kept.push(given("paste", "clipboardData", ["text/plain"], []));
        kept.push(given("paste", "clipboardData", ["text/html", "Files"], [picture]));
        await until(() => $("pictures").children.length === 2);
        tell([...kept, $("pictures").children.length]);"""
    )
    assert found == [False, True, False, True, False, False, True, 2]


def test_a_picture_that_cannot_be_read_is_said_and_the_others_are_there(node) -> None:
    found = node(
        """await opened();
        const of = (name, broken) => ({ name, broken, type: "image/png" });
        const files = [of("a.png"), of("gone.png", true), of("b.png")];
        document.fire("drop", { dataTransfer: { types: ["Files"], files } });
        await until(() => $("pictures").children.length || rejections.length);
        tell([$("pictures").children.length, $("trouble").textContent, rejections]);"""
    )
    assert found == [2, "gone.png cannot be read: NotFoundError", []]


@pytest.mark.parametrize(
    "text", ["'http://a' + ')'.repeat(500_000) + 'x'", "'http://:'.repeat(60_000)"]
)
def test_the_work_of_an_address_is_linear(node, text) -> None:
    found = node(
        f"""const {{ markdown }} = await import("./markdown.js");
        const text = {text};
        tell(markdown(text).map((made) => made.words).join("") === text);"""
    )
    assert found


def test_an_address_ends_before_what_closes_its_sentence(node) -> None:
    found = node(
        """const { markdown } = await import("./markdown.js");
        const of = (text) => [...markdown(text)[0].named("a")].map((made) => made.words);
        const long = "http://" + "a".repeat(9000);
        tell(["(see http://a/b(c).)", "http://a/x~y, then", long].map(of));"""
    )
    assert found == [["http://a/b(c"], ["http://a/x~y"], []]

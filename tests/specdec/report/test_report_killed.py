"""A receipt in a process of its own, killed five times by a signal that no code handles."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from typing import Any

import pytest

from targets import mini
from tests.support.cheap import beside

pytestmark = pytest.mark.slow

TIMES = ("made", "seconds", "memory", "output_throughput", "per_user", "speedup", "spread")
TIMES += ("tokens_per_second",)
"""Fields that differ from run to run, and those that end in _ms."""
PARTS = (1, 2, 4, 5, 6)
"""So many sections are there when the process is killed."""


@pytest.fixture(scope="module")
def command(worded, tmp_path_factory):
    home = tmp_path_factory.mktemp("killed")
    model, prompts = home / "model", home / "prompts.jsonl"
    shutil.copytree(worded, model)
    shutil.copy(mini.path("mini") / "chat_template.jinja", model)
    chats = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(4)]
    prompts.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    options = ["--model", str(model), "--assistant", "none", "--prompts", str(prompts)]
    return ["-m", "specdec", "report", *options, "--slots", "2", "--max-len", "256"]


def started(command, out) -> subprocess.Popen:
    return beside(*command, "--out", str(out))


def killed(command, out, parts: int) -> None:
    process = started(command, out)
    while len(list((out / "parts").glob("*.json"))) < parts:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def whole(command, out) -> Any:
    process = started(command, out)
    _, shown = process.communicate()
    assert process.returncode == 0, shown
    return json.loads((out / "report.json").read_text())


def timeless(value: Any) -> Any:
    if isinstance(value, list):
        return [timeless(part) for part in value]
    if not isinstance(value, dict):
        return value
    kept = (name for name in value if name not in TIMES and not name.endswith("_ms"))
    return {name: timeless(value[name]) for name in kept}


def test_killed_five_times_a_receipt_ends_equal(command, tmp_path):
    for parts in PARTS:
        killed(command, tmp_path / "cut", parts)
    assert timeless(whole(command, tmp_path / "cut")) == timeless(whole(command, tmp_path / "one"))

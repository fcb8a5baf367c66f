"""As process 1 of a container, which signals without a handler leave alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.places import ROOT

UNSHARE = shutil.which("unshare")
pytestmark = pytest.mark.skipif(
    UNSHARE is None or subprocess.run([UNSHARE, "-p", "-f", "true"], check=False).returncode != 0,
    reason="needs the right to make a namespace of processes (util-linux, root)",
)

WAITS = "import time; print('waits', flush=True); time.sleep(600)"
TWICE = """from specdec.cli.signals import signals_heard
with signals_heard(most=1) as signals:
    print("heard", flush=True)
    assert signals.take(600) == 15
    print("again", flush=True)
    import time; time.sleep(600)
"""


@contextmanager
def first_process(*arguments: str, path: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A Python that is process 1 of its namespace, and its number outside."""
    command = ["unshare", "-p", "-f", "--kill-child", sys.executable, *arguments]
    paths = os.pathsep.join(filter(None, (path, str(ROOT))))
    env = os.environ | {"PYTHONPATH": paths}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        started.stdout.readline()  # it is up
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
        try:
            yield started, int(children)
        finally:
            started.kill()


def test_it_ends_at_once_before_anything_is_loaded(tmp_path) -> None:
    (tmp_path / "cyclopts.py").write_text(WAITS)
    with first_process("-m", "specdec", "serve", path=str(tmp_path)) as (started, number):
        os.kill(number, signal.SIGTERM)
        assert started.wait(30) == 128 + signal.SIGTERM


def test_a_signal_beyond_those_that_are_heard_ends_it() -> None:
    with first_process("-c", TWICE) as (started, number):
        os.kill(number, signal.SIGTERM)
        assert started.stdout is not None and started.stdout.readline() == "again\n"
        os.kill(number, signal.SIGTERM)
        assert started.wait(30) == 128 + signal.SIGTERM

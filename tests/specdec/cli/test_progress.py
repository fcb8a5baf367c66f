"""Long work reports its progress, without a terminal too, but not at each step."""

from __future__ import annotations

import io
import threading

from rich.console import Console

from specdec.cli import progress
from specdec.cli.progress import Bar, continues, working


def log() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, highlight=False, width=200), text


def test_a_line_comes_every_ten_seconds_or_tenth() -> None:
    console, text = log()
    now = [0.0]
    with Bar(console, "distilling", 1000, done=100, clock=lambda: now[0]) as bar:
        for seconds, done in ((0.5, 300), (2, 320), (5, 330), (11, 340), (22, 345), (23, 350)):
            now[0] = seconds
            bar.update(done, f"{done // 10} tokens/s")
        now[0] = 40
        bar.advance(5)
    assert text.getvalue().splitlines() == [
        "distilling: 320 of 1000, 32 tokens/s",
        "distilling: 345 of 1000, 34 tokens/s",
        "distilling: 355 of 1000",
    ]


def test_quick_work_says_nothing_in_a_log() -> None:
    console, text = log()
    with Bar(console, "scoring", 3) as bar, working(console, "loading mini"):
        bar.advance()
    continues(console, "row", 0, 320)
    assert not text.getvalue()


def test_work_that_cannot_be_counted_shows_that_it_lives(monkeypatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.001)
    told = threading.Event()

    class Listener(io.StringIO):
        def write(self, text: str) -> int:
            told.set()
            return super().write(text)

    text = Listener()
    with working(Console(file=text, width=200), "loading mini"):
        assert told.wait(60)
    assert text.getvalue().startswith("loading mini: 0 s")


def test_a_resumed_run_says_where() -> None:
    console, text = log()
    continues(console, "step", 400, 2000)
    assert text.getvalue() == "continues at step 400 of 2000\n"


def test_a_terminal_gets_a_bar() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with Bar(console, "training", 10, done=4) as bar:
        bar.update(9, "loss 1.5")
    assert "9/10" in text.getvalue() and "loss 1.5" in text.getvalue()

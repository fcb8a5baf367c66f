"""The picture of a server under load: what it reads in the log, and what it draws."""

from __future__ import annotations

import logging
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor

import pytest

from specdec.cli.logs import FORM
from tests.support.places import ROOT
from tests.support.serving import ServedTarget, serving
from tools.timeline import STATES, last_seconds, picture, requests_of

TOOL = ROOT / "tools" / "timeline.py"
LINE = "2026-11-28 14:00:0{end} INFO specdec.access: POST /v1/completions {rest}"
LOG = [
    LINE.format(
        end="9,500", rest="200 4500 ms id=a queue=500ms first=2000ms prompt=900 completion=2"
    ),
    LINE.format(end="9,000", rest="499 2000 ms id=b queue=2000ms prompt=4 completion=0"),
    LINE.format(
        end="4,000", rest="200 1000 ms id=c queue=0ms first=500ms prompt=4 completion=2 cached=0"
    ),
    LINE.format(end="3,000", rest="400 2 ms id=d"),
    "serving mini at http://127.0.0.1:8000/v1",
]


def test_requests_are_read_from_the_log():
    early, whole, gone = requests_of(LOG)
    assert (early.prompt, whole.prompt) == (4, 900)
    assert [ends - begins for begins, ends in whole.spans] == pytest.approx([0.5, 1.5, 2.5])
    assert [ends - begins for begins, ends in gone.spans] == pytest.approx([2, 0, 0])
    shown = last_seconds([early, whole, gone], 5)
    assert [request.prompt for request in shown] == [900, 4], "the early one ended before"
    assert (shown[0].arrived, shown[0].ended) == pytest.approx((0.5, 5))


def test_bars_have_the_length_of_their_time():
    drawn = ET.fromstring(picture(last_seconds(requests_of(LOG), 5), 5))
    back, *others = [e for e in drawn.iter() if e.tag.endswith("rect")]
    bars = others[len(STATES) :]
    widths = [float(bar.get("width", "nan")) for bar in bars]
    assert back.get("class") == "back"
    assert [bar.get("class") for bar in bars] == ["s0", "s1", "s2", "s0"]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 3, 5, 4], abs=0.01)
    assert "900 tokens" in [e.text for e in drawn.iter() if e.tag.endswith("text")]


def test_a_servers_own_log_becomes_a_picture(tmp_path):
    log, out = tmp_path / "log", tmp_path / "picture.svg"
    handler, logger = logging.FileHandler(log), logging.getLogger("specdec.access")
    handler.setFormatter(logging.Formatter(FORM))
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        with serving(ServedTarget(slots=1, pause=0.01)) as server, ThreadPoolExecutor(3) as pool:
            body = {"prompt": "ab", "max_tokens": 20}
            list(pool.map(lambda _: server.post("completions", **body), range(3)))
            server.wait_until_idle()
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(before)
    subprocess.run([sys.executable, str(TOOL), str(log), "--out", str(out)], check=True)
    assert "<title>3 requests in 60 seconds</title>" in out.read_text()

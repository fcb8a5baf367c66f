"""The load driver's definitions, and a closed loop and a fixed rate against a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import pytest

from tests.support.places import ROOT
from tests.support.serving import ServedTarget, serving
from tools.load import Answer, report, spread

TOOL = ROOT / "tools" / "load.py"


def test_times_are_as_defined():
    whole = Answer(10.0, 5, [10.5, 10.7, 11.5], tokens=6, status=200)
    late, failed = Answer(99.0, 5, [99.5], 1, 200), Answer(10.0, 5, status=429)
    found = report([whole, late, failed], 10.0, 20.0)
    assert (found["requests"], found["failed"]) == (1, 1)
    assert found["ttft_ms"]["p50"] == 500 and found["tpot_ms"]["p50"] == 200
    assert found["longest_gap_ms"]["p50"] == 800
    assert found["tokens_per_second"] == pytest.approx(0.6)


def test_a_percentile_is_the_value_that_so_many_do_not_exceed():
    found = spread([value / 1000 for value in range(20, 0, -1)])
    assert found == {"mean": 10.5, "p50": 10, "p90": 18, "p99": 20}, "as guidellm has them"
    assert spread([0.001, 0.002, 0.003]) == {"mean": 2, "p50": 2, "p90": 3, "p99": 3}


@pytest.mark.parametrize("load", [["--users", "5"], ["--rate", "8"]])
def test_a_server_under_load(load):
    with serving(ServedTarget(slots=4)) as server:
        sizes = "--input 20 --output 12 --seconds 2 --warm 0.5 --vocab 60".split()
        command = [sys.executable, str(TOOL), "--url", server.url, *sizes, *load]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["failed"] == 0 and found["requests"] > 3 and found["tokens_per_second"] > 10


SMALL = "--input 5 --output 4 --seconds 2 --warm 0.5 --vocab 60 --users 5".split()


def loaded(*arguments: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(TOOL), *SMALL, *arguments]
    env = os.environ | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert "secret" not in done.stdout
    return json.loads(done.stdout)


def test_a_server_that_breaks_connections_off_is_measured_too():
    class Broken(StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()

    with ThreadingTCPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        found = loaded("--url", f"http://127.0.0.1:{server.server_address[1]}", "--model", "m")
        server.shutdown()
    assert found["failed"] > 0 and found["requests"] == 0 and found["ttft_ms"] is None


def test_a_team_s_server_gets_its_key_and_no_proxy_is_asked():
    with serving(ServedTarget(slots=4), api_keys=["secret"]) as server:
        environment = {"SPECDEC_API_KEY": "secret", "http_proxy": "http://127.0.0.1:9"}
        found = loaded("--url", server.url, **environment)
        assert found["failed"] == 0 < found["requests"]
        found = loaded("--url", server.url, "--model", "fake", SPECDEC_API_KEY="other")
        assert found["failed"] > 0 == found["requests"]

"""docs/observability: each panel's query names what /metrics has, and a real Prometheus answers it
(`pytest -m prometheus`, where it is installed)."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from specdec.assembly.engine import measure_plain
from tests.support.places import ROOT
from tests.support.serving import ServedTarget, Server, serving, serving_mini

FOLDER = ROOT / "docs/observability"
PANELS: list[dict[str, Any]] = json.loads((FOLDER / "grafana.json").read_text())["panels"]
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}".replace(" ", "-"))
    for panel in PANELS
    for target in panel["targets"]
]
NAME = re.compile(r"\b(?:vllm|specdec):\w+")


@pytest.fixture(scope="module")
def exported() -> set[str]:
    with serving(ServedTarget(slots=2)) as server:
        server.runner.engine.times.plain_costs = None
        measure_plain(server.runner.engine)
        server.post("completions", prompt="ab", max_tokens=9)  # by drafter there is nothing before
        return {sample.partition("{")[0] for sample in server.metrics()}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_metrics_that_there_are(exported, query):
    names = set(NAME.findall(query))
    assert names and names <= exported


def test_panels_are_told_apart_and_do_not_overlap():
    assert (
        len({panel["id"] for panel in PANELS}) == len({p["title"] for p in PANELS}) == len(PANELS)
    )
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells


PROMETHEUS = shutil.which("prometheus")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory) -> Iterator[str]:
    """A Prometheus that has scraped a server under load, by the guide's own configuration."""
    if PROMETHEUS is None:
        pytest.skip("needs Prometheus (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    with serving_mini(reuse=True) as server:
        measure_plain(server.runner.engine)
        config = (FOLDER / "prometheus.yml").read_text()
        address = server.url.removeprefix("http://")
        assert "127.0.0.1:8000" in config and "scrape_interval: 5s" in config
        config = config.replace("127.0.0.1:8000", address).replace("5s", "1s")
        (folder / "prometheus.yml").write_text(config)
        with httpx.Client(base_url=server.url) as client:
            port = _free_port()
            command = [
                PROMETHEUS,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ]
            log = (folder / "log").open("w")
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                _load(server, client)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()
                process.wait()
                log.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _load(server: Server, client: httpx.Client, seconds: float = 8) -> None:
    """Eight clients on four slots; some prompts come again."""
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "boolean"}},
        "required": ["answer"],
    }
    extras = (
        {},
        {"prediction": {"type": "content", "content": "    return 1\n"}},
        {"structured_outputs": {"json": schema}},
    )

    def ask(number: int) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            body = {"prompt": "def add(a, b):\n" * 20, "max_tokens": 24, "temperature": 0}
            client.post("/v1/completions", json=body | extras[number % 3], timeout=60)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


@pytest.mark.prometheus
@pytest.mark.parametrize("query", QUERIES)
def test_a_panel_has_data(prometheus, query):
    asked = query.replace("$__rate_interval", "8s").replace("$model", ".*")
    reply = httpx.get(f"{prometheus}/api/v1/query", params={"query": asked}).json()
    assert reply["status"] == "success", reply
    values = [float(sample["value"][1]) for sample in reply["data"]["result"]]
    assert values and all(math.isfinite(value) and value >= 0 for value in values)

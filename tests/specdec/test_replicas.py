"""Replicas on Ray Serve: what one answers, any other would, also when one is killed meanwhile. Run
with: pytest -m ray (needs the extra `ray`; some minutes)."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

from specdec.core.errors import UserError

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # of Ray's own
URL = "http://127.0.0.1:8000"
REPLICAS = 3
CLIENTS = 12
REQUESTS = 200
PROMPTS = [f"def {name}(" for name in ("add", "read", "parse", "walk", "send", "close", "find")]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    """Starts the application; yields the folder where its replicas write Prometheus targets."""
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    from specdec.replicas import app

    folder = tmp_path_factory.mktemp("metrics")
    ray.init(num_cpus=8, log_to_driver=False)
    given = {"model": "mini", "drafter": "ngram", "slots": "4", "max_len": "512", "cpus": "0.5"}
    serve.run(app(given | {"replicas": str(REPLICAS), "metrics": str(folder)}))
    yield folder
    serve.shutdown()
    ray.shutdown()


@dataclass
class Told:
    """All clients' answers and errors."""

    texts: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """By seed."""
    failures: list[str] = field(default_factory=list)
    done: int = 0


def ask(client: openai.OpenAI, number: int, told: Told) -> None:
    """Greedy for one in three, else sampled."""
    case = number % 21
    prompt, temperature = PROMPTS[case % len(PROMPTS)], (0.0, 0.8, 1.0)[case % 3]
    try:
        made = client.completions.create(
            model="mini", prompt=prompt, max_tokens=16, seed=case, temperature=temperature
        )
        told.texts[case][made.choices[0].text] += 1
    except openai.APIError as problem:
        told.failures.append(str(problem))
    told.done += 1


def asked(retries: int, meanwhile: Callable[[Told], None]) -> Told:
    """Send `REQUESTS` requests from each of `CLIENTS` clients at once."""
    told = Told()

    def one(client: int) -> None:
        speaker = openai.OpenAI(
            base_url=f"{URL}/v1", api_key="none", max_retries=retries, timeout=60
        )
        for number in range(REQUESTS):
            ask(speaker, client + CLIENTS * number, told)

    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        work = [pool.submit(one, client) for client in range(CLIENTS)]
        pool.submit(meanwhile, told).result()
        for done in work:
            done.result()
    return told


def running(folder: Path) -> dict[str, int]:
    """Requests in flight, by the address of a replica's metrics."""
    found = {}
    for file in folder.glob("*.json"):
        address = json.loads(file.read_text())[0]["targets"][0]
        try:
            lines = httpx.get(f"http://{address}/metrics", timeout=5).text.splitlines()
        except httpx.TransportError:
            continue  # it was killed before
        values = [line.split()[-1] for line in lines if line.startswith("vllm:num_requests_r")]
        found[address] = int(float(values[0]))
    return found


def kill_one(folder: Path) -> int:
    """Kill -9 a replica that is answering; how many requests it had."""
    import psutil

    while True:
        address, busy = max(running(folder).items(), key=lambda item: item[1])
        if busy:
            break
    port = int(address.rpartition(":")[2])
    listening = (c for c in psutil.net_connections("tcp") if c.status == "LISTEN")
    owner = next(c.pid for c in listening if c.laddr.port == port)
    psutil.Process(owner).send_signal(signal.SIGKILL)
    return busy


@pytest.mark.parametrize("retries", [0, 8])
def test_a_replica_is_killed(metrics, retries):
    """Only what it had in flight fails, and nothing where clients try again; no text differs."""
    wait_for_all(metrics)
    lost = []

    def kill(told: Told) -> None:
        while told.done < CLIENTS * REQUESTS // 4:
            time.sleep(0.05)
        lost.append(kill_one(metrics))

    told = asked(retries, kill)
    print(f"retries {retries}: {told.done} sent, {len(told.failures)} failed, {lost[0]} lost")
    assert told.done == CLIENTS * REQUESTS and lost[0] > 0
    assert all(len(texts) == 1 for texts in told.texts.values()), told.texts
    assert len(told.failures) <= (0 if retries else CLIENTS), told.failures
    wait_for_all(metrics)


def wait_for_all(folder: Path) -> None:
    """One that was killed is replaced."""
    deadline = time.monotonic() + 120
    while len(running(folder)) < REPLICAS:
        assert time.monotonic() < deadline, "no replica came in the place of the killed one"
        time.sleep(1)


def test_metrics_tell_replicas_apart(metrics):
    labels = set()
    for address in running(metrics):
        text = httpx.get(f"http://{address}/metrics").text
        labels.add(text.split('engine="', 1)[1].split('"', 1)[0])
    assert len(labels) >= REPLICAS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slotz": "3"}, "unknown option slotz"),
        ({"k": "many"}, "k: .*got 'many'"),
        ({"replicas": "4", "max_replicas": "2"}, "max_replicas must be at least replicas, 4"),
        ({"drafter": "oracle"}, "oracle"),
    ],
)
def test_mistakes_are_told_before_anything_starts(given, message):
    pytest.importorskip("ray")
    from specdec.replicas import app

    with pytest.raises(UserError, match=message):
        app(given)

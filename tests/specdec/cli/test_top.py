"""`specdec top`: its figures from readings made by hand, and its screen of a real server."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from specdec.assembly.engine import measure_plain
from specdec.cli import main
from specdec.cli.scraping import Reading, figures_between, read_metrics
from specdec.core.errors import UserError
from tests.support.fakes_text import ALPHABET
from tests.support.serving import LONG, ServedTarget, Server, serving
from tests.support.stub_web import answering


@pytest.fixture(scope="module")
def server():
    with serving(ServedTarget(slots=3)) as server:
        measure_plain(server.runner.engine)
        yield server


def reading(at: float, **values: float) -> Reading:
    """Of names with their labels in words: accepted_a_0 is drafter a, position 0."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {
        "specdec:slots": [({"model_name": "m"}, 4)],
        "specdec:verify_passes_total": [({}, values.get("passes", 0))],
        "specdec:verified_tokens_total": [({}, values.get("tokens", 0))],
        "vllm:generation_tokens_total": [({}, values.get("tokens", 0))],
        "specdec:plain_seconds_total": [({}, values.get("plain", 0))],
        "specdec:engine_seconds_total": [
            ({"part": part}, values.get(part, 0)) for part in ("prefill", "verify", "host")
        ],
    }
    for kind in ("draft", "accepted"):
        samples[f"specdec:{kind}_tokens_total"] = [
            ({"drafter": "a", "position": str(i)}, values.get(f"{kind}_{i}", 0)) for i in range(3)
        ]
    for name in ("suffix", "assistant", "none"):
        for kind in ("passes", "verified_tokens"):
            samples.setdefault(f"specdec:drafter_{kind}_total", []).append(
                ({"drafter": name}, values.get(f"{name}_{kind}", 0))
            )
    samples["vllm:inter_token_latency_seconds_bucket"] = [
        ({"le": le}, values.get(f"below_{le}", 0)) for le in ("0.1", "0.2", "+Inf")
    ]
    return Reading(at, samples)


def test_figures_are_of_what_grew():
    first = reading(10, passes=100, tokens=200, plain=5, verify=3, prefill=7)
    last = reading(
        12, passes=110, tokens=230, plain=8, verify=4, host=0.5, prefill=9,
        draft_0=10, draft_1=5, accepted_0=8, accepted_1=1,
        **{"below_0.1": 50, "below_0.2": 90, "below_+Inf": 100},
    )  # fmt: skip
    figures = figures_between(first, last)
    assert (figures.model, figures.seconds, figures.slots) == ("m", 2, 4)
    assert figures.tau == 3 and figures.tokens_per_second == 15 and figures.speedup == 2
    assert figures.acceptance == {"a": [0.8, 0.2]}
    assert figures.cycle_ms == {"verify": 100, "host": 50}
    assert figures.between_tokens_ms["p50"] == pytest.approx(100)
    assert figures.between_tokens_ms["p95"] == pytest.approx(200)  # beyond the last bound


def test_tau_by_drafter_is_of_the_passes_since_the_first_reading():
    first = reading(0, suffix_passes=4, suffix_verified_tokens=4)
    last = reading(
        1, suffix_passes=10, suffix_verified_tokens=22, none_passes=18, none_verified_tokens=18
    )  # fmt: skip
    figures = figures_between(first, last)
    assert figures.tau_by_drafter == {"none": 1, "suffix": 3}  # the busiest first
    assert figures.passes_by_drafter == {"none": 0.75, "suffix": 0.25}
    assert list(figures.tau_by_drafter) == ["none", "suffix"]


def test_nothing_is_made_up_where_nothing_happened():
    figures = figures_between(reading(0), reading(1))
    assert figures.tau is figures.speedup is figures.cached is None
    assert figures.acceptance == figures.cycle_ms == figures.first_token_ms == {}
    assert figures.tau_by_drafter == figures.passes_by_drafter == {}


def test_a_screen_of_a_server_under_load(server: Server, capsys, monkeypatch):
    def asked(seconds: float) -> None:  # what happens between two readings
        server.post("completions", prompt="abc" * 8, max_tokens=40, seed=LONG)

    monkeypatch.setattr("specdec.cli.top.time", SimpleNamespace(sleep=asked))
    main(["top", server.url, "--count", "2", "--json"])
    monkeypatch.undo()
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["model"] == "fake" and told["slots"] == 3
    assert told["tau"] >= 1 and told["speedup"] > 0 and told["tokens_per_second"] > 0
    assert told["acceptance"]["drafter"] and told["cycle_ms"]["verify"] > 0
    assert told["first_token_ms"].keys() == told["queue_ms"].keys() == {"p50", "p95"}
    assert said.err.rstrip(" ").endswith("\n") and not said.err.endswith("\n\n")
    assert told["tau_by_drafter"].keys() <= {"drafter", "none"}
    assert told["tau_by_drafter"]["drafter"] > 1 and told["tau_by_drafter"].get("none", 1) == 1
    assert sum(told["passes_by_drafter"].values()) == pytest.approx(1, abs=0.001)
    words = "requests", "slots", "tau", "speed-up over plain", "passes", "position", "a cycle"
    assert all(word in said.err for word in (*words, "in the queue"))


class HeldTarget(ServedTarget):
    """Reads no further while a prompt with `q` is at its start, until it is let go."""

    def __init__(self) -> None:
        super().__init__(slots=3, pause=0.01)
        self.reached, self.let_go = threading.Event(), threading.Event()

    def prefill(self, seq, start, stop):
        if ALPHABET.index("q") in seq.tokens[start:stop]:
            self.reached.set()
            self.let_go.wait(30)
        return super().prefill(seq, start, stop)


def test_each_request_is_seen_waiting_prefilling_or_decoding(capsys, monkeypatch):
    def begin(held: HeldTarget, server: Server, pool: ThreadPoolExecutor) -> None:
        decoding = [pool.submit(ask, server, "abc") for _ in range(2)]
        while server.runner.decoding < 2:
            assert not any(request.done() for request in decoding)
            time.sleep(0.01)
        pool.submit(ask, server, "q")
        assert held.reached.wait(30)
        pool.submit(ask, server, "xyz")
        while not server.runner.waiting:
            time.sleep(0.01)

    def ask(server: Server, prompt: str) -> None:
        server.post("completions", prompt=prompt, max_tokens=300, ignore_eos=True)

    held = HeldTarget()
    with serving(held) as server, ThreadPoolExecutor() as pool:
        slept = SimpleNamespace(sleep=lambda seconds: begin(held, server, pool))
        monkeypatch.setattr("specdec.cli.top.time", slept)
        try:
            main(["top", server.url, "--count", "1", "--json"])
        finally:
            held.let_go.set()
        monkeypatch.undo()
        said = capsys.readouterr()
        told = json.loads(said.out)
        assert (told["waiting"], told["prefilling"], told["decoding"]) == (1, 1, 2)
        assert (told["running"], told["slots"]) == (3, 3)
        assert "1 waiting, 1 prefilling, 2 decoding" in said.err and "3 of 3 taken" in said.err


def test_an_idle_server_has_a_screen_too(server: Server, capsys):
    server.wait_until_idle()
    main(["top", server.url, "--count", "1", "--interval", "0.05"])
    assert "no guess was made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["http://127.0.0.1:9"], "is `specdec serve` running there?"),
        (["http://127.0.0.1:x"], "is `specdec serve` running there?"),
        (["127.0.0.1:8000"], "must begin with http"),
        (["--interval", "0"], "interval must be more than 0"),
        (["--interval", "nan"], "interval must be more than 0"),
        (["--interval", "inf"], "at most 86400"),
        (["--interval", "1e12"], "at most 86400"),
        (["--count", "-1"], "count must be 0 or more"),
    ],
)
def test_mistakes_are_one_line(arguments, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["top", *arguments])
    assert ended.value.code == 2 and expected in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("count", [1, 3])
def test_a_server_that_goes_away_before_anything_is_shown_is_a_failure(monkeypatch, capsys, count):
    readings = iter([reading(0)])

    def read(_url: str) -> Reading:
        for found in readings:
            return found
        raise UserError("cannot read it: it went away")

    monkeypatch.setattr("specdec.cli.top.read_metrics", read)
    monkeypatch.setattr("specdec.cli.top.time", SimpleNamespace(sleep=lambda _: None))
    with pytest.raises(SystemExit) as ended:
        main(["top", "--count", str(count), "--json"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    assert said.err.strip().endswith("specdec: cannot read it: it went away")


def test_no_proxy_is_asked(server: Server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert read_metrics(server.url).sum("specdec:slots") == 3


@pytest.mark.parametrize("body", [b"hello", b"vllm:num_requests_running 1\n", b"\xff\xfe"])
def test_other_servers_are_named(body):
    with (
        answering({"/metrics": (200, body)}) as port,
        pytest.raises(UserError, match="is not of a specdec server"),
    ):
        read_metrics(f"http://127.0.0.1:{port}")

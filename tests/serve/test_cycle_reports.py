"""`include_speculation`: each token with the source of its guess, grouped by read of the
weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from drafters.ngram.host import NgramDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sequence
from tests.support.fakes import FakeTarget
from tests.support.serving import SAID, Server, scripted

PROMPT = "def add_one(items):\n    return [item + 1 for item in items]\n\ndef add_two(items):\n"
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0}


@pytest.fixture
def server(mini_server: Server) -> Server:
    return mini_server


def choice(server: Server, path: str = "completions", **ask: Any) -> tuple[Any, dict[str, Any]]:
    reply = server.post(path, model="mini", include_speculation=True, **ask)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    return body["choices"][0], body


def told(cycle_reports: list[dict[str, Any]]) -> str:
    return "".join(token["text"] for read in cycle_reports for token in read["tokens"])


def test_every_token_and_every_read_is_told(server):
    said, body = choice(server, **ASK)
    cycle_reports, counts = said["speculation"], body["metrics"]["speculative_decoding"]
    assert told(cycle_reports) == said["text"]
    assert sum(len(read["tokens"]) for read in cycle_reports) == body["usage"]["completion_tokens"]
    prompt, *verifies = cycle_reports
    assert (prompt["read"], prompt["drafter"], prompt["k"]) == ("prompt", "ngram", 4)
    assert len(prompt["tokens"]) == 1 and prompt["seconds"] is None
    assert len(verifies) == counts["verify_passes"]
    guessed = [t for read in verifies for t in read["tokens"] if t["guessed_by"]]
    rejected = [t for read in verifies for t in read["rejected"]]
    assert {t["guessed_by"] for t in guessed + rejected} == {"ngram"}
    assert len(guessed) == counts["accepted_tokens"] > 0
    assert len(guessed) + len(rejected) == counts["draft_tokens"]
    for read in verifies:
        paid = [token["guessed_by"] is None for token in read["tokens"]]
        assert read["read"] == "verify" and read["seconds"] > 0
        assert paid[:-1] == [False] * (len(paid) - 1), "only the last is paid for"
        assert all(paid[-1:]) or read is verifies[-1], "and each has one, but where the text ends"


def test_a_stream_tells_what_the_whole_answer_tells(server):
    said, _ = choice(server, **ASK)
    stream = server.openai.completions.create(
        model="mini", **ASK, stream=True, extra_body={"include_speculation": True}
    )
    choices = [chunk.choices[0] for chunk in stream]
    cycle_reports = [read for c in choices for read in getattr(c, "speculation", None) or ()]
    assert "".join(c.text for c in choices) == said["text"]

    def without(all_):
        return [{**read, "seconds": None} for read in all_]

    assert without(cycle_reports) == without(said["speculation"])


def test_nothing_is_told_unasked(server):
    body = server.post("completions", model="mini", **ASK).json()
    assert "speculation" not in body["choices"][0]
    assert body["choices"][0]["text"] == choice(server, **ASK)[0]["text"]


def test_a_prediction_is_named(server):
    text = choice(server, **ASK)[0]["text"]
    messages = [{"role": "user", "content": "Say it."}]
    answer, _ = choice(server, "chat/completions", messages=messages, max_tokens=40, seed=3)
    content = answer["message"]["content"]
    predicted, body = choice(
        server,
        "chat/completions",
        messages=messages,
        max_tokens=40,
        seed=3,
        prediction={"type": "content", "content": content},
    )
    assert predicted["message"]["content"] == content != text
    by = [t["guessed_by"] for read in predicted["speculation"] for t in read["tokens"]]
    assert by.count("prediction") > 10
    assert len(by) == body["usage"]["completion_tokens"]


def test_a_grammar_is_named(server):
    schema = {
        "type": "object",
        "properties": {"temperature_in_paris": {"type": "boolean"}},
        "required": ["temperature_in_paris"],
        "additionalProperties": False,
    }
    said, _ = choice(
        server,
        "chat/completions",
        messages=[{"role": "user", "content": "Is it warm?"}],
        structured_outputs={"json": schema},
        max_tokens=60,
        temperature=0,
    )
    by = {t["guessed_by"] for read in said["speculation"] for t in read["tokens"]}
    assert "grammar" in by and by <= {"grammar", "ngram", None}


def test_thoughts_calls_and_stop_strings_are_told_as_generated(thinking: Server):
    ask: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Go on."}],
        "tools": [{"type": "function", "function": {"name": n}} for n in ("edit", "run")],
        "max_tokens": 200,
    }
    said, body = choice(thinking, "chat/completions", **ask)
    text = told(said["speculation"])
    assert text.startswith("<|channel>thought\n") and "<|tool_call>call:run{}" in text
    count = sum(len(read["tokens"]) for read in said["speculation"])
    assert count == body["usage"]["completion_tokens"]
    cut, body = choice(thinking, "chat/completions", **ask, stop=["Let"])
    assert cut["finish_reason"] == "stop" and told(cut["speculation"]).rstrip().endswith("Let")
    count = sum(len(read["tokens"]) for read in cut["speculation"])
    assert count == body["usage"]["completion_tokens"]


@pytest.fixture(scope="module")
def thinking() -> Iterator[Server]:
    with scripted(SAID) as server:
        yield server


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_request_switches_speculation_off(mini_server: Server, path):
    ask = {"max_tokens": 24, "temperature": 0, "include_speculation": True}
    said = (
        {"messages": [{"role": "user", "content": PROMPT}]}
        if "chat" in path
        else {"prompt": PROMPT}
    )
    bodies = [
        mini_server.post(path, **ask, **said, speculative={"enabled": enabled}).json()
        for enabled in (True, False)
    ]
    ids = [
        [token["id"] for read in body["choices"][0]["speculation"] for token in read["tokens"]]
        for body in bodies
    ]
    assert ids[0] == ids[1]
    on, off = (body["metrics"]["speculative_decoding"] for body in bodies)
    assert on["draft_tokens"] > 0 == off["draft_tokens"] and off["tokens_per_pass"] == 1


@pytest.mark.parametrize("value", ["yes", 1, {"on": True}])
def test_anything_but_true_or_false_is_refused(server, value):
    reply = server.post("completions", model="mini", **ASK, include_speculation=value)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "include_speculation"


def test_the_engine_reports_only_where_asked():
    target, drafter = FakeTarget(slots=2), NgramDrafter()
    engine = Engine(target, drafter, host_cycle(target, drafter, 3))
    asks, silent = (
        Sequence([1, 2, 3], max_tokens=9, reported=True),
        Sequence([1, 2, 3], max_tokens=9),
    )
    told_ = [(event.sequence, event.report is not None) for event in engine.run([asks, silent])]
    assert {asked for seq, asked in told_ if seq is silent} == {False}
    assert [asked for seq, asked in told_ if seq is asks] == [False] + [
        True
    ] * asks.acceptance.cycles

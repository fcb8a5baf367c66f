"""`include_speculation`: each token with the source of its guess, grouped by read of the
weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from drafters import registry
from drafters.ngram.host import NgramDrafter
from specdec.assembly.engine import make_engine
from specdec.assembly.model import load_model
from specdec.core.config import ModelConfig
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


@pytest.mark.parametrize("value", ["yes", 1, {"on": True}])
def test_anything_but_true_or_false_is_refused(server, value):
    reply = server.post("completions", model="mini", **ASK, include_speculation=value)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "include_speculation"


def test_both_loops_report_the_same_guesses_and_auto_whose_they_are():
    config = ModelConfig("mini", max_len=512)
    auto = registry.resolved(registry.config_type()(k=4, loop="host"), config)
    model = load_model(config, auto)
    lookup, reports = replace(auto, drafter="ngram"), {}
    ways = {"host": lookup, "device": replace(lookup, loop="device")}
    ways |= {"auto": auto, "auto, device": replace(auto, loop="device")}
    for way, speculation in ways.items():
        engine = make_engine(model, speculation)
        seq = Sequence(model.tokenizer.encode(PROMPT), max_tokens=40, reported=True)
        told_ = [event.report for event in engine.run([seq]) if event.report is not None]
        reports[way] = [(r.draft, r.guessers, r.accepted) for r in told_]
        assert len(told_) == seq.acceptance.cycles and all(r.seconds > 0 for r in told_)
        assert sum(r.accepted for r in told_) == seq.acceptance.accepted > 0
    assert reports["host"] == reports["device"]
    for way, choices in {"auto": {"suffix", "ngram"}, "auto, device": {"suffix"}}.items():
        said_by = {name for _, guessers, _ in reports[way] for name in guessers}
        assert said_by and said_by <= choices
        assert all(len(draft) == len(guessers) for draft, guessers, _ in reports[way])


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

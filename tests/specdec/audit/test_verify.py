"""From a server's replies and the Python door to `specdec verify`: honest answers are verified,
forged and hostile ones are one line each, and those beside them are judged all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specdec
from specdec.audit.receipt import read_receipt
from specdec.audit.verify import verify
from specdec.cli import main
from tests.support.audits import changed, text_of
from tests.support.commands import refused
from tests.support.constrained import AMBIGUOUS
from tests.support.serving import ServedTarget, Server, serving

CODE = "def add(first, second):\n    return"
CHAT = [{"role": "user", "content": "Write a function that adds two numbers."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"first": {"enum": [1, 2]}},  # few tokens, whatever seed is drawn
            "required": ["first"],
            "additionalProperties": False,
        },
    },
}
FORM = {
    "format": {
        "type": "json_schema",
        "name": "sum",
        "schema": {"type": "object", "properties": {"sum": {"type": "integer"}}},
    }
}
REQUESTS = {
    "greedy": ("completions", {"prompt": CODE, "temperature": 0, "logprobs": 2}),
    "drawn": ("chat/completions", {"messages": CHAT, "n": 2, "logprobs": True}),
    "stop": ("completions", {"prompt": CODE, "stop": ["\n"], "seed": 2**64 - 2, "n": 3}),
    "shaped": (
        "completions",
        {
            "prompt": CODE,
            "temperature": 0.7,
            "top_p": 0.9,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.3,
            "logit_bias": {"30": -5.5, "31": 2},
            "min_tokens": 9,
        },
    ),
    "regex": ("completions", {"prompt": CODE, "structured_outputs": {"regex": "[0-9]{3}(a|b)"}}),
    "call": (
        "chat/completions",
        {"messages": CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40},
    ),
    "thought": (
        "chat/completions",
        {"messages": CHAT, "reasoning_effort": "low", "thinking_token_budget": 5},
    ),
    "predicted": (
        "completions",
        {"prompt": CODE, "prediction": {"type": "content", "content": " first + second"}},
    ),
}


def receipts_of(server: Server, name: str, stream: bool) -> list[dict]:
    path, request = REQUESTS[name]
    ask = {"max_tokens": 17, **request, "include_receipt": True, "stream": stream}
    reply = server.post(path, model="mini", **ask)
    assert reply.status_code == 200, reply.text
    if not stream:
        return [choice["receipt"] for choice in reply.json()["choices"]]
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert all(("receipt" in c) == (c["finish_reason"] is not None) for c in choices)
    found = {c["index"]: c["receipt"] for c in choices if "receipt" in c}
    return [found[index] for index in sorted(found)]


@pytest.fixture(scope="module")
def written(mini_server: Server, tmp_path_factory) -> dict[str, Path]:
    """A file for each answer, by its name."""
    folder, files = tmp_path_factory.mktemp("receipts"), {}
    for name in REQUESTS:
        for stream in (False, True):
            for j, document in enumerate(receipts_of(mini_server, name, stream)):
                label = f"{name}-{'stream' if stream else 'whole'}-{j}"
                files[label] = folder / f"{label}.json"
                files[label].write_bytes(text_of(document))
    return files


def judged(capsys, *files: Path) -> tuple[int, list[str], dict]:
    """The exit code, the lines, and the JSON document that ends stdout."""
    code = 0
    try:
        main(["verify", *map(str, files), "--json"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    *lines, last = capsys.readouterr().out.splitlines()
    return code, lines, json.loads(last)


def test_what_a_server_gave_is_verified(written, capsys):
    code, lines, document = judged(capsys, *written.values())
    assert code == 0, lines
    assert document["counts"] == {"verified": len(written)}
    receipts = [read_receipt(file.read_bytes()) for file in written.values()]
    assert document["reads"] == sum(-(-(len(r.answer.ids) - 1) // 8) for r in receipts)
    assert {r.answer.finish for r in receipts} == {"stop", "length", "tool_calls"}
    assert any("under a grammar" in line for line in lines)
    seeds = [read_receipt(written[f"drawn-whole-{j}"].read_bytes()).seed for j in (0, 1)]
    assert int(seeds[1]) == int(seeds[0]) + 1
    wrapped = read_receipt(written["stop-whole-2"].read_bytes())
    assert wrapped.seed == "0" and wrapped.choice == 2


BOMB = json.dumps(
    {
        "grammars": [
            {
                "json_schema": {
                    "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20_000)}
                    | {"d20000": {"type": "string"}},
                    "$ref": "#/$defs/d0",
                }
            }
        ]
    }
)


def test_forged_and_hostile_receipts_are_a_line_each(written, capsys, tmp_path):
    honest = read_receipt(written["greedy-whole-0"].read_bytes())
    guided = read_receipt(written["regex-whole-0"].read_bytes())
    token = honest.answer.ids[9]
    cases = {
        "forged": (changed(honest, "answer", "ids", 9, value=token + 1), "differs at 9"),
        "free": (changed(guided, "constraint", value=None), "differs at"),
        "ended": (changed(honest, "answer", "finish", value="stop"), "ends otherwise"),
        "strange": (changed(honest, "answer", "ids", 9, value=4096), "refused: it names token"),
        "bomb": (changed(guided, "constraint", "grammar", value=BOMB), "refused"),
        "no grammar": (changed(guided, "constraint", "grammar", value="?"), "refused"),
        "other weights": (
            changed(honest, "model", "weights", value={"model.safetensors": "0" * 64}),
            "cannot be compared: model.weights (config.json); model.weights (model.safe",
        ),
        "other slots": (
            changed(honest, "arithmetic", "slots", value=8),
            "cannot be compared: arithmetic.slots (8 against 4 here)",
        ),
        "other jax": (
            changed(honest, "arithmetic", "versions", "jax", value="0.1"),
            "cannot be compared: arithmetic.versions (jax 0.1 against",
        ),
    }
    files = [written["drawn-whole-0"]]
    for name, (receipt, _) in cases.items():
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(receipt.to_text())
    many = tmp_path / "many.json"
    many.write_bytes(text_of({**honest.to_json(), "prompt": {"ids": [7] * 10_000_000}}))
    files += [many, tmp_path / "absent.json", written["regex-whole-0"]]
    code, lines, document = judged(capsys, *files)
    verdicts = document["verdicts"]
    assert code == 1 and len(verdicts) == len(files)
    shown = [line for line in lines if not line.startswith("  ")]
    assert len(shown) == len(files)
    for line, (_, words) in zip(shown[1:], cases.values(), strict=False):
        assert f": {words}" in line, line
    assert [v["kind"] for v in verdicts[-3:]] == ["refused", "refused", "verified"]
    assert verdicts[0]["kind"] == "verified"
    forged = verdicts[1]
    assert forged["right"]["id"] == token
    assert forged["right"]["logprob"] == pytest.approx(honest.chosen_logprobs()[9], abs=1e-4)
    assert forged["claimed"]["logprob"] < forged["right"]["logprob"]


def test_hostile_files_alone_end_with_2(capsys, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text('{"format": "specdec-receipt/1"}')
    code, lines, _ = judged(capsys, file)
    assert (code, len(lines)) == (2, 1)
    assert "name a receipt" in refused(capsys, "verify")


def test_a_drawn_seed_is_in_the_reply_and_gives_the_answer_again(mini_server):
    ask = {"model": "mini", "prompt": CODE, "max_tokens": 12}
    first = mini_server.post("completions", **ask).json()
    assert "receipt" not in first["choices"][0] and 0 <= first["seed"] < 2**53
    again = mini_server.post("completions", **ask, seed=first["seed"]).json()
    assert "seed" not in again and again["choices"] == first["choices"]
    assert "seed" not in mini_server.post("completions", **ask, temperature=0).json()
    print_ = first["system_fingerprint"].split("-")
    assert [len(part) for part in print_[-2:]] == [8, 8] and print_[0] == "specdec"


def test_a_server_without_files_has_no_receipts():
    with serving(ServedTarget()) as server:
        reply = server.post("completions", model="fake", prompt="a", include_receipt=True)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "include_receipt")


OTHER_APIS = {
    "messages": {"messages": CHAT, "max_tokens": 17},
    "responses": {"input": CHAT, "max_output_tokens": 17, "text": FORM},
}


def ending_of(server: Server, api: str, stream: bool, **ask) -> dict:
    """The part of a reply that has what is told once the answer has ended."""
    reply = server.post(api, model="mini", stream=stream, **OTHER_APIS[api], **ask)
    assert reply.status_code == 200, reply.text
    if not stream:
        return reply.json()
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    kinds = "message_delta", "response.completed", "response.incomplete"
    (last,) = (event for event in events if event["type"] in kinds)
    return last.get("response", last)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", OTHER_APIS)
def test_answers_of_other_apis_are_verified(mini_server, capsys, tmp_path, api, stream):
    """A seed that the server drew is told, and gives the same answer again."""
    drawn = ending_of(mini_server, api, stream, include_receipt=True, temperature=1.0)
    again = ending_of(
        mini_server, api, stream, include_receipt=True, temperature=1.0, seed=drawn["seed"]
    )
    assert again["receipt"]["answer"] == drawn["receipt"]["answer"] and "seed" not in again
    file = tmp_path / "receipt.json"
    file.write_bytes(text_of(drawn["receipt"]))
    code, lines, _ = judged(capsys, file)
    assert code == 0 and "verified" in lines[0]
    assert "receipt" not in ending_of(mini_server, api, stream, temperature=0.0)


def test_the_doors_answers_are_verified(tmp_path):
    files = []
    with specdec.load("mini", drafter="ngram", k=4, max_len=2048) as llm:
        for i, options in enumerate(({"logprobs": 3}, {"stop": "\n"}, {"max_tokens": 9999})):
            ask = {"max_tokens": 12, "temperature": 0.9, "seed": 5} | options
            room = [7] * 2040 if i == 2 else CODE
            answer = llm.generate(room, **ask)
            receipt = answer.receipt()
            files.append(tmp_path / f"{i}.json")
            files[-1].write_text(receipt.to_text())
            assert receipt.answer.text == answer.text
    assert receipt.limits.max_tokens == 8
    assert [v.kind for v in verify(files)] == ["verified"] * 3


def test_an_answer_that_its_grammars_cost_ended(mini_server, capsys, tmp_path):
    reply = mini_server.post(
        "completions",
        model="mini",
        prompt="a",
        max_tokens=100,
        temperature=0,
        logit_bias={"1": -100, "9": -100, "16": -100},
        structured_outputs={"grammar": AMBIGUOUS},
        include_receipt=True,
    ).json()["choices"][0]
    assert "grammar_limit" in reply["notice"] and reply["finish_reason"] == "length"
    honest = read_receipt(text_of(reply["receipt"]))
    ids = list(honest.answer.ids)
    assert 10 < len(ids) < 100
    cut = changed(honest, "answer", "ids", value=ids[:-1])
    files = [tmp_path / "honest.json", tmp_path / "cut.json"]
    for file, receipt in zip(files, (honest, cut), strict=True):
        file.write_text(receipt.to_text())
    code, lines, _ = judged(capsys, *files)
    assert code == 1 and "honest.json: verified" in lines[0]
    assert any("cut.json: ends otherwise" in line for line in lines)


def test_an_arithmetic_that_cant_be_had_refuses_its_receipt_alone(written, capsys, tmp_path):
    honest = read_receipt(written["greedy-whole-0"].read_bytes())
    strange = tmp_path / "strange.json"
    for name, value, words in (
        ("max_len", 2**24, "refused: --max-len must be"),
        ("features", [999], "no layer 999"),
    ):
        strange.write_text(changed(honest, "arithmetic", name, value=value).to_text())
        code, lines, _ = judged(capsys, strange, written["greedy-whole-0"])
        assert code == 2 and len(lines) == 2
        assert words in lines[0] and "verified" in lines[1]

"""A receipt that is cut off goes on where it was; what does not belong to it is refused in one
line; nothing of a user's is in it."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from specdec.core.errors import UserError
from specdec.core.writing import UNFINISHED
from specdec.report import identity, page, run
from specdec.report.comparison import compare, lines, read_receipt
from specdec.report.parts import TEACHER, Parts
from specdec.report.profile import PROFILES
from specdec.report.questions import LONG, QUESTIONS, built_in, digest, from_file
from specdec.report.subject import Progress
from tests.specdec.report.receipts import WORD, counting, fake_receipt_steps

PROGRESS = Progress(lambda doing: nullcontext(), counting)


class Killed(BaseException):
    """As a signal that no code handles."""


class FakeRequest:
    """A request whose sections cost nothing."""

    random = "gemma-4-e4b"
    text = None

    def __init__(self, key="one"):
        self.own = key
        self.loads = 0

    def key(self, files):
        return self.own

    def load(self, progress):
        self.loads += 1
        return None

    class model:
        model = "mini"


@pytest.fixture
def measured(monkeypatch):
    """Runs a request in a folder; the names of what was measured."""
    done: list[str] = []
    steps = fake_receipt_steps()

    def counted(name):
        def step(subject):
            done.append(name)
            return steps[name]

        return step

    monkeypatch.setattr(run, "_steps", lambda *_: {name: counted(name) for name in steps})
    monkeypatch.setattr(
        run.parity, "measure", lambda *_: {"compared": False, "why_not": "random weights"}
    )

    def measure(out, request=None, said=None):
        said = [] if said is None else said
        return run.measure(request or FakeRequest(), out, PROGRESS, said.append, nullcontext)

    measure.done = done
    return measure


def timeless(receipt):
    return {k: v for k, v in receipt.items() if k not in ("made", "seconds")}


def test_killed_five_times_it_ends_equal(measured, tmp_path, monkeypatch):
    whole = measured(tmp_path / "whole")
    expected, measured.done[:] = list(measured.done), []
    put, said = Parts.put, []

    def dying(self, name, section, seconds):
        put(self, name, section, seconds)
        (self.folder / f"{UNFINISHED}0").write_text('{"key": "on')  # cut off in the next write
        raise Killed

    monkeypatch.setattr(Parts, "put", dying)
    for _ in range(5):
        with pytest.raises(Killed):
            measured(tmp_path / "cut")
    monkeypatch.setattr(Parts, "put", put)
    request = FakeRequest()
    assert timeless(measured(tmp_path / "cut", request, said)) == timeless(whole)
    assert measured.done == expected  # each section once
    assert request.loads == 1 and said == ["continues: 5 of 7 sections are there"]


def test_what_is_there_is_not_measured_again_and_nothing_is_loaded(measured, tmp_path):
    first, request = measured(tmp_path), FakeRequest()
    measured.done.clear()
    assert timeless(measured(tmp_path, request)) == timeless(first)
    assert not measured.done and not request.loads
    assert not (tmp_path / "parts" / f"{TEACHER}.json").exists()


def test_a_folder_of_other_settings_is_refused(measured, tmp_path):
    measured(tmp_path)
    with pytest.raises(UserError, match="other options, weights, prompts, version or machine"):
        measured(tmp_path, FakeRequest("two"))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"key": 1}', "\x00\xff"])
def test_a_damaged_section_is_named(tmp_path, text):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "speed.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="speed.json is damaged: delete it"):
        Parts(tmp_path, "one")


def test_the_key_depends_on_all_that_is_measured(monkeypatch):
    from dataclasses import replace

    from specdec.core.config import ModelConfig, SpeculationConfig

    prompts = built_in((10, 10, 10, 10))
    files = [{"of": "model", "name": "a", "bytes": 1, "sha256": "0"}]
    config, quick, full = ModelConfig(slots=8), PROFILES["quick"], PROFILES["full"]
    one = run.Request(config, SpeculationConfig(), quick, 128, prompts, False)
    others = [
        replace(one, model=replace(config, slots=4)),
        replace(one, profile=full),
        replace(one, output_len=512),
        replace(one, prompts=prompts[1:]),
        replace(one, text="a"),
        replace(one, random="gemma-4-e4b"),
    ]
    keys = {request.key(files) for request in (one, *others)} | {one.key([])}
    monkeypatch.setattr(identity, "SCHEMA_VERSION", 99)
    assert len(keys | {one.key(files)}) == len(others) + 3
    # where the model lies does not matter, nor where programs are kept
    moved = replace(one, model=replace(config, model="elsewhere"))
    assert moved.key(files) == one.key(files)


def test_the_built_in_prompts_are_eight_categories_of_four_chats():
    prompts = built_in((100, 200, 300, 400))
    assert len(prompts) == 32 and len({p.id for p in prompts}) == 32
    assert {len([p for p in prompts if p.category == c]) for c in QUESTIONS} == {4}
    assert len(QUESTIONS) == 8 and all(p.kind == "chat" for p in prompts)
    long = [p.messages[0]["content"] for p in prompts if p.category == LONG]
    assert [len(text) > size for text, size in zip(long, (100, 200, 300, 400), strict=True)] == [
        True
    ] * 4
    assert digest(prompts) != digest(prompts[::-1])


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("quick", "ecbd4c7bf55bae463cbd9a76133e966f2da50aec98be6c3980320d98454976a5"),
        ("full", "b35a9fadca34b81522701332d56e748a80b430a4f33ba170db9d95b99618c28d"),
    ],
)
def test_the_built_in_prompts_stay_so_that_receipts_compare(name, sha256):
    assert digest(built_in(PROFILES[name].long_texts)) == sha256


SPEED_BENCH = {"question_id": "7", "category": "coding", "sub_category": "x", "multiturn": False}


@pytest.mark.parametrize(
    ("line", "category", "kind"),
    [
        (SPEED_BENCH | {"turns": [WORD]}, "coding", "chat"),
        ({"question_id": 81, "category": "math_reasoning", "turns": [WORD, "b"]}, None, "chat"),
        ({"task_id": "HumanEval/0", "prompt": WORD}, "humaneval", "plain"),
        ({"messages": [{"role": "user", "content": WORD}]}, "uncategorised", "chat"),
        (WORD, "uncategorised", "plain"),
    ],
)
def test_prompts_of_known_benchmarks(tmp_path, line, category, kind):
    file = tmp_path / "secret-customer.jsonl"
    file.write_text(json.dumps(line) + "\n")
    (prompt,) = from_file(file)
    assert prompt.category == category or line["category"]
    assert prompt.kind == kind and prompt.id == "1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no prompts"),
        ("{", "not valid JSON"),
        ("[1, 2]", "must be"),
        ("\n\n", "holds no prompts"),
        ('{"turns": []}', '"turns" must be'),
        ('{"turns": [""]}', "isn't empty"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "content"),
        ('{"prompt": "a", "category": "<script>alert(1)</script>"}', "category of prompt 1"),
        ('{"prompt": "a", "category": "/home/me/secret"}', "category of prompt 1"),
        (json.dumps({"prompt": "a", "category": "b" * 41}), "category of prompt 1"),
        ('{"prompt": "a", "category": ""}', "category of prompt 1"),
        ('"a"\n{"prompt": "a", "category": "all"}', "category of prompt 2"),
        (
            "\n".join(f'{{"prompt": "a", "category": "c{i}"}}' for i in range(33)),
            "at most 32 categories",
        ),
    ],
)
def test_hostile_prompt_files_are_refused_in_one_line(tmp_path, text, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=".*") as refusal:
        from_file(file)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_page_needs_nothing_else_and_runs_nothing(measured, tmp_path):
    receipt = measured(tmp_path)
    receipt["identity"]["device"] = "<script>alert(1)</script>"
    html = page.html(receipt)
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "http" not in html.replace('http-equiv="Content-Security-Policy"', "")
    assert html.count("<svg") == html.count("</svg>") == 4
    for heading in ("Equality", "Acceptance", "Speed", "Memory", "Doctor", "Identity", "Left out"):
        assert f"<h2>{heading}" in html
    assert "answers equal plain decoding" in html
    receipt["equal"] = False
    assert "DIFFER" in page.html(receipt)


def test_two_receipts_compared(measured, tmp_path):
    first = measured(tmp_path / "a")
    (tmp_path / "a" / "report.json").write_text(json.dumps(first))
    second = json.loads(json.dumps(first))
    second["identity"]["dtype"] = "bfloat16"
    second["equality"]["rows"][0]["drafted_sha256"] = "other"
    for row in second["speed"]["rows"]:
        row["output_throughput"] *= 2
    (tmp_path / "b.json").write_text(json.dumps(second))
    found = compare(read_receipt(tmp_path / "a"), read_receipt(tmp_path / "b.json"))
    assert found["identities"] == {"dtype": ("float32", "bfloat16")}
    assert [row["of"] for row in found["digests"] if not row["equal"]] == [
        "drafted, T = 0, thinking off"
    ]
    faster = [row for row in found["ratios"] if row["of"].startswith("output_throughput")]
    assert faster and all(row["ratio"] == pytest.approx(2) for row in faster)
    shown = "\n".join(lines(found))
    assert "dtype: float32 | bfloat16" in shown and "1 differ" in shown


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"identity": {"schema_version": 99}}'])
def test_what_is_no_receipt_is_refused(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError, match="is no receipt|version 99"):
        read_receipt(tmp_path)

"""Evaluation: figures that are known by hand, and prompt files good and bad."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.stats import Acceptance, context_bucket
from specdec.core.types import Sampling, Sequence
from specdec.evaluation.display import plot_evaluation, print_evaluation
from specdec.evaluation.prompts import Prompt, read_prompts
from specdec.evaluation.results import (
    PromptOutcome,
    by_context,
    compare,
    distinct,
    measure_positions,
    measure_tau,
)
from specdec.evaluation.run import Settings, evaluate
from tests.support.fakes import FakeTarget, Oracle

K = 4
PROMPTS = [Prompt(f"p{i}", "ab"[i % 2], "plain", text="abcdefg"[: i % 7 + 1]) for i in range(11)]
SETTINGS = Settings("oracle", K, max_tokens=31, sampling=Sampling(seed=5), resamples=300)


def encode(prompt: Prompt) -> list[int]:
    return [ord(c) % 50 for c in prompt.text]


class Tampered(FakeTarget):
    """Not the same model: the token at position 20 of slot 0 is another."""

    def _choose(self, seq, length):
        return (super()._choose(seq, length) + (seq.slot == 0 and length == 20)) % self.vocab


def plain_runs(max_tokens: int) -> dict[str, list[int]]:
    target, drafter = FakeTarget(slots=1), NoDrafter()
    engine = Engine(target, drafter, host_cycle(target, drafter, 0))
    tokens = {}
    for i, prompt in enumerate(PROMPTS):
        seq = Sequence(encode(prompt), Sampling(seed=5 + i), max_tokens=max_tokens)
        list(engine.run([seq]))
        tokens[prompt.id] = seq.tokens
    return tokens


def make_engines(target: FakeTarget, other: FakeTarget | None = None):
    drafters = {"none": NoDrafter, "ngram": lambda: NgramDrafter(1, 3), "tampered": NoDrafter}
    drafters["oracle"] = lambda: Oracle(plain_runs(60))
    drafters["none, width 1"] = NoDrafter

    def make_engine(name: str) -> Engine:
        used = (other or target) if name == "tampered" else target
        drafter = drafters[name]()
        return Engine(used, drafter, host_cycle(used, drafter, 0 if name == "none" else K))

    return make_engine


def run(settings: Settings = SETTINGS, slots: int = 2, **options):
    make_engine = make_engines(FakeTarget(slots=slots), Tampered(slots=slots))
    return evaluate(PROMPTS, encode, make_engine, settings, **options)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_perfect_drafter_has_tau_k_plus_1(slots):
    result = run(slots=slots)
    # 31 tokens: one from prefill, then six full passes of five.
    assert (result.overall.tau, result.overall.low, result.overall.high) == (5.0, 5.0, 5.0)
    assert result.overall.rate == 1.0 and result.histogram == [0, 0, 0, 0, 66]
    assert all((p.proposed, p.accepted, p.conditional) == (1, 1, 1) for p in result.positions)
    assert result.equality.equal and result.equality.first_difference is None
    assert [(c.name, c.prompts) for c in result.categories] == [("a", 6), ("b", 5)]
    assert result.overall.tokens == 11 * 31 and result.overall.cycles == 66


def test_none_against_itself_has_tau_1():
    result = run(replace(SETTINGS, drafter="none"))
    assert result.overall.tau == 1.0 and result.overall.rate == 0.0
    assert result.histogram == [330, 0, 0, 0, 0] and result.equality.equal
    assert all(p.proposed == p.accepted == p.conditional == 0 for p in result.positions)


def test_a_drafter_in_between_is_equal_and_its_interval_holds_tau():
    result = run(replace(SETTINGS, drafter="ngram", max_tokens=60))
    assert result.equality.equal
    assert 1.0 <= result.overall.low <= result.overall.tau <= result.overall.high <= K + 1
    assert sum(result.histogram) == result.overall.cycles
    accepted = [p.accepted for p in result.positions]
    assert accepted == sorted(accepted, reverse=True)
    assert accepted == pytest.approx(
        np.cumprod([p.conditional for p in result.positions]) * (result.positions[0].proposed)
    )


def test_a_tampered_output_is_found_and_placed():
    result = run(replace(SETTINGS, drafter="tampered"), slots=1)
    assert not result.equality.equal
    assert result.equality.plain_sha256 != result.equality.drafted_sha256
    where = result.equality.first_difference
    assert where["prompt"] == "p0" and where["position"] == 20 - 1
    plain = plain_runs(31)["p0"]
    assert where["plain"] == plain[20] and where["drafted"] == (plain[20] + 1) % 50


def test_speeds_count_decoding_only_and_further_engines_are_timed():
    result = run(replace(SETTINGS, speed_only=("none, width 1",)), slots=1)
    assert list(result.speeds) == ["plain", "drafted", "none, width 1"]
    for speed in result.speeds.values():
        assert speed.decode_tokens == 11 * 30  # the token that prefill chose is not among them
        assert 0 < speed.decode_seconds < speed.wall_seconds
        assert speed.tokens_per_second == speed.decode_tokens / speed.decode_seconds
    plain, drafted = result.speeds["plain"], result.speeds["drafted"]
    assert result.decode_ratio == drafted.tokens_per_second / plain.tokens_per_second
    assert result.wall_ratio == plain.wall_seconds / drafted.wall_seconds


def test_stop_ids_and_samples_and_json():
    stop = plain_runs(31)["p3"][10]
    settings = replace(SETTINGS, stop_ids=frozenset({stop}), samples=2)
    result = run(settings, decode=lambda ids: "-".join(map(str, ids)))
    assert result.equality.equal
    assert any(row["finish"] == "stop" for row in result.prompts)
    document = json.loads(json.dumps(result.to_json()))
    assert (
        document["settings"]["stop_ids"] == [stop] and document["settings"]["drafter"] == "oracle"
    )
    assert len(document["samples"]) == 2 and document["samples"][0]["output"].count("-") > 0
    assert document["speeds"]["plain"]["tokens_per_second"] > 0 and document["wall_ratio"] > 0
    assert document["equality"]["equal"] is True and len(document["prompts"]) == 11
    assert document["overall"]["tau"] == result.overall.tau


def test_prompts_that_do_not_fit_are_skipped_and_said():
    prompts = [PROMPTS[0], Prompt("long", "a", "plain", text="a" * 600), PROMPTS[1]]
    make_engine = make_engines(FakeTarget())
    settings = replace(SETTINGS, drafter="ngram")
    result = evaluate(prompts, encode, make_engine, settings)
    assert [s["prompt"] for s in result.skipped] == ["long"] and result.overall.prompts == 2
    with pytest.raises(UserError, match="no prompt is left"):
        evaluate(prompts[1:2], encode, make_engine, settings)

    def refuse(prompt: Prompt) -> list[int]:
        raise UserError("no chat template")

    with pytest.raises(UserError, match="prompt p0: no chat template"):
        evaluate(prompts, refuse, make_engine, settings)


def test_k_0_can_be_shown_too(tmp_path):
    result = run(replace(SETTINGS, drafter="none", k=0))
    assert result.positions == [] and result.histogram == [330]
    print_evaluation(result, Console(file=io.StringIO()))
    plot_evaluation(result, tmp_path / "plot.png")


def test_tables_and_plot(tmp_path, monkeypatch):
    result = run()
    console = Console(file=io.StringIO(), width=120)
    print_evaluation(result, console)
    text = console.file.getvalue()
    assert "5.000" in text and "equal to plain decoding" in text and "distinct-4" in text
    plot_evaluation(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="can't write the plot"):
        plot_evaluation(result, tmp_path / "missing" / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install '.\[plots\]'"):
        plot_evaluation(result, tmp_path / "plot.png")


# Figures by hand


def outcome(name: str, emitted: int, cycles: int, tokens=(1, 2, 3)) -> PromptOutcome:
    return PromptOutcome(name, "c", 1, tuple(tokens), "length", Acceptance(cycles, emitted))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=2, max_size=30))
def test_bootstrap_interval_is_around_tau_and_seeded(rows):
    outcomes = [outcome(str(i), cycles + more, cycles) for i, (cycles, more) in enumerate(rows)]
    tau = measure_tau("t", outcomes, resamples=400)
    assert tau == measure_tau("t", outcomes, resamples=400)
    each = [o.acceptance.tau for o in outcomes]
    slack = 1e-9
    assert min(each) - slack <= tau.low <= tau.high <= max(each) + slack
    assert tau.tau == sum(c + m for c, m in rows) / sum(c for c, _ in rows)


def test_interval_narrows_with_prompts_and_holds_the_mean():
    rng = np.random.default_rng(0)
    emitted = rng.integers(10, 50, 400)
    few, many = (
        measure_tau("t", [outcome("", int(e), 10) for e in emitted[:n]], 1000) for n in (20, 400)
    )
    for tau in (few, many):
        assert tau.low < tau.tau < tau.high
    assert few.high - few.low > 3 * (many.high - many.low)
    # Normal theory: +- 1.96 standard errors of the mean of emitted / 10.
    assert many.high - many.low == pytest.approx(2 * 1.96 * emitted.std() / 10 / 20, rel=0.15)


def test_tau_of_outputs_that_ended_at_once_is_1():
    tau = measure_tau("t", [outcome("a", 0, 0), outcome("b", 0, 0)], 10)
    assert (tau.tau, tau.low, tau.high) == (1.0, 1.0, 1.0)


def test_positions_by_hand():
    counts = Acceptance()
    counts.add([True, True], 2, 3, 10)
    counts.add([True, True], 1, 2, 511)
    counts.add([True, False], 1, 2, 512)
    counts.add([False, False], 0, 1, 5000)
    first, second = measure_positions(counts, 2)
    assert (first.proposed, first.accepted, first.conditional) == (0.75, 0.75, 1.0)
    assert (second.proposed, second.accepted, second.conditional) == (0.5, 0.25, 1 / 3)


def test_distinct_4_by_hand():
    # abcd, bcda, cdab, dabc, abcd: four of five; a second output adds one more gram.
    assert distinct([[1, 2, 3, 4, 1, 2, 3, 4]]) == 4 / 5
    assert distinct([[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4], [9, 9, 9]]) == 4 / 6
    assert distinct([[0] * 103]) == 1 / 100
    assert distinct([[1, 2, 3]]) == 0.0


def test_an_output_that_merely_ends_earlier_differs_too():
    ours, theirs = [outcome("a", 1, 1, (1, 2, 3))], [outcome("a", 1, 1, (1, 2))]
    where = compare(ours, theirs).first_difference
    assert where == {"prompt": "a", "position": 2, "plain": 3, "drafted": None}


# Prompt files


def write(tmp_path, *lines: str):
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_every_form_of_a_line(tmp_path):
    path = write(
        tmp_path,
        '"bare é"',
        "",
        '{"prompt": "one", "id": 7}',
        '{"text": "two", "category": "code"}',
        '{"messages": [{"role": "user", "content": "hi"}]}',
        '{"task_id": "HumanEval/3", "prompt": "def f():", "test": "x"}',
        '{"question_id": 81, "category": "writing", "turns": ["first", "second"]}',
    )
    prompts = read_prompts(path)
    assert [(p.id, p.category, p.kind) for p in prompts] == [
        ("1", "some", "plain"),
        ("7", "some", "plain"),
        ("4", "code", "plain"),
        ("5", "some", "chat"),
        ("HumanEval/3", "humaneval", "plain"),
        ("81", "writing", "chat"),
    ]
    assert prompts[0].text == "bare é" and prompts[4].text == "def f():"
    assert prompts[5].messages == ({"role": "user", "content": "first"},)
    assert [p.id for p in read_prompts(path, limit=2)] == ["1", "7"]
    ways = {"encode": lambda text: [len(text)], "encode_chat": lambda messages: [-len(messages)]}
    assert [p.encode(**ways) for p in prompts[2:4]] == [[3], [-1]]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ('"caf\\udce9"', "character 4 of the text is only a part"),
        ("7", "must be a string, or an object"),
        ("[]", "must be a string, or an object"),
        ('{"question": "a"}', "must be a string, or an object"),
        ('{"prompt": ""}', '"prompt" must be a string that'),
        ('{"prompt": 3}', '"prompt" must be a string that'),
        ('{"turns": []}', '"turns" must be a list'),
        ('{"turns": [3]}', r'"turns\[0\]" must be'),
        ('{"messages": []}', '"messages" must be a list'),
        ('{"messages": [{"role": "user"}]}', '"messages" must be a list'),
    ],
)
def test_bad_lines_are_named(tmp_path, line, words):
    with pytest.raises(UserError, match=rf"some\.jsonl:2.*{words}"):
        read_prompts(write(tmp_path, '"good"', line))


def test_lines_end_where_json_says(tmp_path):
    """Other line ends may stand within a string."""
    text = "a\u2028b\u2029c\u0085d"
    (prompt, last) = read_prompts(write(tmp_path, f'"{text}"', '"e"'))
    assert (prompt.text, last.id) == (text, "2")


def test_bad_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.jsonl"):
        read_prompts(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match=r"some\.jsonl holds no prompts"):
        read_prompts(write(tmp_path, "", " "))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"bytes\.jsonl"):
        read_prompts(tmp_path / "bytes.jsonl")


def test_acceptance_by_the_length_of_the_text():
    buckets = [context_bucket(n) for n in (0, 511, 512, 1023, 1024, 2047, 2048, 70_000)]
    assert buckets == [0, 0, 512, 512, 1024, 1024, 2048, 65_536]
    outcomes = []
    for name, context, emitted in (("a", 100, 4), ("b", 700, 1), ("c", 600, 2)):
        counts = Acceptance()
        for cycle in range(3):
            counts.add([True] * 3, emitted - 1, emitted, context + 100 * cycle)
        outcomes.append(PromptOutcome(name, "c", 1, (1,) * 9, "length", counts))
    rows = by_context(outcomes, 200)
    assert [(row.name, row.prompts, row.cycles, row.tau) for row in rows] == [
        ("0 – 512", 1, 3, 4.0),
        ("512 – 1,024", 2, 6, 1.5),
    ]
    total = Acceptance()
    for outcome in outcomes:
        total.merge(outcome.acceptance)
    assert {b: c.emitted for b, c in total.by_context.items()} == {0: 12, 512: 9}

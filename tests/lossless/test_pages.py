"""Texts that grow beyond the pages there are: the last to join gives way and comes back, and every
answer stays that of plain decoding alone."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.assembly.engine import make_engine
from specdec.audit.replay import Replay
from specdec.core.config import PrefixConfig, SpeculationConfig
from specdec.core.types import Sampling, Sequence
from tests.campaign import Counts, check_run
from tests.lossless.campaign_parts import Bench
from tests.support.fakes_text import CharTokenizer

K = 3
TARGET = {
    "backend": "cuda",
    "model": "31b",
    "slots": 3,
    "max_len": 64,
    "k": K,
    "chunk": 8,
    "short": 8,
    "features": [0, 1, 3],
    "device": "cpu",
    "dtype": "float32",
    "kv_dtype": "float32",
    "pages": [4, 18, K + 1, 64 + K + 1, 8],
}
"""Pages of 4 positions, of which 17 hold the longest text; three short texts begin in few."""
SHAPES: tuple[dict[str, Any], ...] = (
    {"logprobs": 1},
    {"temperature": 1.0, "top_p": 0.9, "seed": 5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 9, "logprobs": 2},
)
HEAD = {"ffw": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "draft_vocab": 160}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {},
    "suffix": {},
    "auto": {},
    "wild": {},
    "eagle3": {"head": HEAD | {"max_position": 64}},
    "dflash": {"block": "dspark"},
    "model": {
        "draft": {"model": "31b", "max_len": 64, "chunk": 8, "dtype": "float32"}
        | {"kv_dtype": "float32"}
    },
}


def requests(cancel: int | None = None) -> list[dict[str, Any]]:
    """Five at once for three slots; each may grow to 40 tokens or more."""
    return [
        {
            "prompt": {"seed": 40 + i, "length": 5 + 3 * i, "period": 3 + i},
            "sampling": SHAPES[i % len(SHAPES)],
            "max_tokens": 30,
            "stop_ids": [],
            "prediction": [None, 0.1][i % 2],
            "at": i,
            "cancel": cancel if i == 2 else None,
        }
        for i in range(5)
    ]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(TARGET)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_those_that_gave_way_go_on_without_a_token_changed(bench, drafter):
    run = {"drafter": drafter, "k": K, "loop": "host"} | DRAFTERS[drafter]
    engine, counts = bench.engine(run), Counts()
    check_run(bench, engine, requests(), counts)
    assert counts.gave_way > 1 and counts.requests == 5
    assert not any(bench.target.pages.held), "all pages are free again"


def test_one_may_leave_while_it_waits_to_come_back(bench):
    engine, counts = bench.engine({"drafter": "ngram", "k": K, "loop": "host"}), Counts()
    check_run(bench, engine, requests(cancel=14), counts)
    assert counts.gave_way and not any(bench.target.pages.held)


def test_a_replay_of_receipts_knows_of_pages(bench):
    """As an engine that serves does: claims give way, and give their pages back."""
    engine = Replay(bench.target, CharTokenizer(), K).engine(5)
    for i in range(5):
        engine.submit(Sequence(list(range(5 + i, 17 + i)), Sampling(), max_tokens=30))
    ends = [event.finish for event in engine.run([]) if event.finish or event.error]
    assert ends == ["length"] * 5
    assert not any(bench.target.pages.held), "all pages are free again"


def test_a_prompt_that_is_read_again_begins_where_it_was_kept():
    """Three answers to one prompt of a kept unit of 32 tokens and two more."""
    bench = Bench(TARGET | {"max_len": 96, "pages": [4, 26, K + 1, 96 + K + 1, 8]})
    prompt = {"seed": 3, "length": 34, "period": 34}
    asked = [request | {"prompt": prompt} for request in requests()[:3]]
    speculation = SpeculationConfig(drafter="none", k=0)
    model = bench._model(speculation)
    engine = make_engine(model, speculation, prefix=PrefixConfig(cache_ram=0.25))
    counts = Counts()
    check_run(bench, engine, asked, counts)
    assert counts.gave_way and engine.prefix_cache is not None
    assert engine.prefix_cache.hits == 32 * (2 + counts.gave_way)

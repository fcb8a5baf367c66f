"""Commitments see each sampling parameter that chose an answer, also where another value gives the
same ids; no drafter, K, batch, loop or warm prompt changes them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from drafters import registry
from specdec.assembly.engine import make_engine
from specdec.assembly.model import Model, load_model
from specdec.audit.identity import identity_of
from specdec.audit.receipt import Receipt
from specdec.audit.verify import judged_by
from specdec.core.config import ModelConfig, PrefixConfig
from specdec.core.types import Reuse, Sampling, Sequence
from tests.support.audits import answers, changed, relabelled

TEXT = "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2, 3]\n"
UNUSED = 4001
"""A token of mini that no answer here has."""
PROMPT = {"jax": 140, "cuda": 20}
"""Its tokens; with jax they are more than a prefill chunk, so that a part is kept."""
TOKENS = {"jax": 34, "cuda": 6}
"""Of an answer; more than a block of ids with jax."""
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.05, "seed": 5},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02, "top_k": 64, "seed": 2**64 - 2},
    {"temperature": 0.9, "repetition_penalty": 1.1, "seed": 7},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": ((30, -4.5),)},
)
BACKENDS: dict[str, dict[str, Any]] = {
    "jax": {},
    "cuda": {"backend": "cuda", "device": "cpu", "dtype": "bfloat16"},
}
"""cuda: the CUDA target's references, on the CPU."""
CHANGES = {
    "temperature": (("sampling", "temperature"), lambda r: r.sampling.temperature + 1e-5),
    "seed": (("seed",), lambda r: str(int(r.seed) + 1)),
    "the seed's upper half": (("seed",), lambda r: str(int(r.seed) ^ 2**40)),
    "top_k": (("sampling", "top_k"), lambda r: 65 if r.sampling.top_k else 4000),
    "top_p": (("sampling", "top_p"), lambda r: r.sampling.top_p - 1e-4),
    "min_p": (("sampling", "min_p"), lambda r: r.sampling.min_p + 1e-6),
    "repetition": (
        ("sampling", "repetition_penalty"),
        lambda r: r.sampling.repetition_penalty + 1e-6,
    ),
    "presence": (("sampling", "presence_penalty"), lambda r: r.sampling.presence_penalty + 1e-6),
    "frequency": (("sampling", "frequency_penalty"), lambda r: r.sampling.frequency_penalty - 1e-6),
    "a bias on an unused id": (("sampling", "logit_bias"), lambda r: [[UNUSED, 1e-6]]),
}
"""Of each: what is replaced, and its value."""
MAKERS = {
    "jax": (
        ("none", 4, "host", 4),
        ("ngram", 7, "host", 1),
        ("ngram", 3, "device", 4),
    ),
    "cuda": (("none", 4, "host", 1), ("ngram", 4, "host", 4)),
}
"""Drafter, K, loop, and answers that are made at a time."""


@cache
def loaded(backend: str, drafter: str, k: int, loop: str) -> tuple[Model, Any]:
    config = ModelConfig("mini", max_len=512, slots=4, **BACKENDS[backend])
    speculation = registry.resolved(registry.config_type()(drafter=drafter, k=k, loop=loop), config)
    return load_model(config, speculation), speculation


def made(backend: str, maker: tuple[str, int, str, int], times: int = 1) -> list[Receipt]:
    """The answers to each of SHAPES, made so often by one engine; its later prompts are warm where
    they are longer than a chunk."""
    *kind, batch = maker
    model, speculation = loaded(backend, *kind)
    engine = make_engine(model, speculation, prefix=PrefixConfig(cache_ram=0.25))
    prompt = (model.tokenizer.encode(TEXT) * 9)[: PROMPT[backend]]
    found = []
    for first in list(range(0, len(SHAPES), batch)) * times:
        seqs = [
            Sequence(list(prompt), Sampling(**shape, logprobs=0), TOKENS[backend], reuse=Reuse())
            for shape in SHAPES[first : first + batch]
        ]
        found += answers(engine, seqs, model.tokenizer, identity_of(model))
    kept = engine.prefix_cache
    assert kept is not None and bool(kept.hits) == (PROMPT[backend] > kept.unit)
    return found


@cache
def honest(backend: str) -> list[Receipt]:
    return made(backend, MAKERS[backend][0])


def test_a_changed_parameter_is_seen_where_no_id_changes():
    model, _ = loaded("jax", *MAKERS["jax"][0][:3])
    forged = [
        (name, receipt, path, value(receipt))
        for name, (path, value) in CHANGES.items()
        for receipt in honest("jax")
    ]
    by_ids = judged_by(model, [changed(r, *path, value=value) for _, r, path, value in forged])
    pairs = zip(forged, by_ids, strict=True)
    same = [each for each, verdict in pairs if verdict.kind == "verified"]
    assert {name for name, *_ in same} == set(CHANGES)
    whole = judged_by(model, [relabelled(r, *path, value=value) for _, r, path, value in same])
    assert [(v.kind, v.at) for v in whole] == [("commitment differs", 0)] * len(same)


def test_the_references_of_cuda_see_it_too():
    model, _ = loaded("cuda", *MAKERS["cuda"][0][:3])
    receipt = honest("cuda")[1]
    claims = [relabelled(receipt, *path, value=value(receipt)) for path, value in CHANGES.values()]
    verdicts = judged_by(model, claims)
    assert all(verdict.false for verdict in verdicts)
    assert [v.kind for v in verdicts].count("commitment differs") > len(CHANGES) // 2


@pytest.mark.parametrize(
    ("backend", "maker"), [(b, maker) for b, makers in MAKERS.items() for maker in makers]
)
def test_nothing_else_changes_a_commitment(backend, maker):
    found = made(backend, maker, times=2)
    assert [(r.answer, r.commitments) for r in found] == [
        (r.answer, r.commitments) for r in honest(backend) * 2
    ]
    model, _ = loaded(backend, *MAKERS[backend][0][:3])
    assert [v.kind for v in judged_by(model, found)] == ["verified"] * len(found)

"""The word of honour of test_lossless.py, on the CUDA target's references."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest
import torch

from drafters.model.host import ModelDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.types import Sampling, Sequence
from targets import mini
from targets.arch import parse_arch
from targets.cuda.load import CudaOptions, load_target, random_target
from targets.cuda.ops import Rows
from tests.support.lossless import check_host, decode
from tests.support.tiny import VARIANTS, config_of


@cache
def target_of(path, slots, **options):
    """Chunks of 16: those of 9 tokens and more take the library's path, shorter ones don't."""
    chunk = 128 if path.name == "mini" else 16
    given = {"chunk": chunk, "short": chunk // 2, "max_len": 256} | options
    return load_target(path, CudaOptions(slots=slots, device="cpu", **given))


def draft_of(path, slots, **options):
    """mini-e for mini; else the very same weights, so that whole drafts are accepted."""
    small = mini.path("mini-e") if path.name == "mini" else path
    return target_of(small, slots, **options)


check = partial(check_host, target_of=target_of, draft_of=draft_of)


@pytest.mark.parametrize(
    ("variant", "mode", "adversaries"),
    [
        ("31b", "everything", ("model", "ngram", "wild")),
        ("e2b", "greedy", ("model", "right", "random")),
        ("26b-a4b", "nucleus", ("ngram", "wrong", "right")),
    ],
)
def test_host_loop(tiny, variant, mode, adversaries):
    """Each adversary with some variant; test_whole_matrix has them all."""
    check(tiny[variant], mode, slots=3, ks=[0, 4], tokens=16, adversaries=adversaries)


def test_every_draft_length(tiny):
    """With all of it kept, and nothing."""
    ends = ("right", "wrong")
    check(tiny["12b"], "nucleus", slots=2, ks=[0, 1, 7], tokens=8, adversaries=ends)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("fp8", "fp8"), ("bfloat16", "bfloat16"), ("fp8-w8a8", "fp8")]
)
def test_narrow_weights_and_caches(tiny, dtype, kv_dtype):
    narrow = partial(target_of, dtype=dtype, kv_dtype=kv_dtype)
    own = partial(narrow, graphs=False)  # not the same target, with the same cache
    given = {"target_of": narrow, "draft_of": own, "adversaries": ("model", "wild")}
    check_host(tiny["31b"], "nucleus", slots=2, ks=[4], tokens=10, **given)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "nucleus", "everything"])
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("variant", ["mini", *VARIANTS])
def test_whole_matrix(tiny, variant, slots, mode):
    path = mini.path("mini") if variant == "mini" else tiny[variant]
    check(path, mode, slots, ks=[0, 1, 2, 4, 7])


def test_out_of_memory_in_prefill_fails_that_request_alone(tiny, monkeypatch):
    target = target_of(tiny["31b"], 2)
    honest = target._chunk

    def chunk(rows, *more):
        if (rows.tokens == 13).any():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return honest(rows, *more)

    monkeypatch.setattr(target, "_chunk", chunk)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    large, small = Sequence([5, 13, 6], max_tokens=4), Sequence([5, 6], max_tokens=4)
    events = list(engine.run([large, small]))
    errors = [event.error for event in events if event.error]
    assert len(errors) == 1 and "no room" in errors[0] and large.finish == "error"
    assert small.finish == "length" and small.emitted == 4


@pytest.mark.parametrize(
    "message",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA driver: CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("operation failed due to a previous error during capture"),
    ],
)
def test_out_of_memory_in_a_cycle_fails_who_joined_last(tiny, monkeypatch, message):
    target = target_of(tiny["31b"], 3)
    honest = target.logits

    def logits(rows, *choosing):
        if len(rows.slot) < 3:
            return honest(rows, *choosing)
        try:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        finally:
            raise message  # as the end of a capture does: what came first is its context

    prompts = [[5, 6], [7], [8, 9, 10]]
    alone = [Sequence(list(p), max_tokens=9) for p in prompts]
    for seq in alone:
        Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0)).run_to_end([seq])
    monkeypatch.setattr(target, "logits", logits)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    seqs = [Sequence(list(p), max_tokens=9) for p in prompts]
    errors = [event.error for event in engine.run(seqs) if event.error]
    assert len(errors) == 1 and "no room for a batch of 3" in errors[0]
    assert [seq.finish for seq in seqs] == ["length", "length", "error"]
    assert [seq.tokens for seq in seqs[:2]] == [seq.tokens for seq in alone[:2]]


def test_a_draft_context_shorter_than_the_targets(tiny):
    """Drafting ends where the draft model's context does, the text goes on."""
    target, short = target_of(tiny["31b"], 2), target_of(tiny["31b"], 2, max_len=24)
    run = partial(decode, target, mode="nucleus", tokens=16, prompts=[[5, 6, 7] * 4, [9] * 30])
    drafter = ModelDrafter(short)
    text, drafted = run(drafter, host_cycle(target, drafter, 7))
    assert text == run(NoDrafter(), host_cycle(target, NoDrafter(), 0))[0]
    assert drafted.drafted > 0


def test_rows_that_sit_out_may_start_anywhere(tiny):
    """A captured draft step pads its batch with rows that are beyond the draft's context."""
    target = target_of(tiny["31b"], 2, max_len=48)
    texts = target.cache.tokens
    before = texts[0].clone()
    far, slots = torch.tensor([[10_000, 3], [-1, 1]], dtype=torch.int32)
    rows = Rows(torch.full((2, 2), 7, dtype=torch.int32), far, slots)
    target.ops.embed(target.weights.embedding, rows, texts)
    assert texts[1, 3:5].tolist() == [7, 7] and torch.equal(texts[0], before)


def test_other_failures_stay_what_they_are(tiny, monkeypatch):
    target = target_of(tiny["31b"], 1)
    monkeypatch.setattr(target, "logits", lambda *given: torch.zeros(2) @ torch.zeros(3))
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    with pytest.raises(RuntimeError, match="inconsistent tensor size|size"):
        engine.run_to_end([Sequence([5, 6], max_tokens=4)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "--slots"),
        ({"max_len": 8}, "--max-len"),
        ({"max_len": 10**6}, "--max-len"),
        ({"k": 32}, "K must be 0 to 31"),
        ({"dtype": "int3"}, "dtype"),
        ({"kv_dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_bad_options_are_one_line(tiny, options, message):
    with pytest.raises(UserError, match=message) as refusal:
        load_target(tiny["31b"], CudaOptions(**{"device": "cpu", "max_len": 64} | options))
    assert "\n" not in str(refusal.value)


def test_ids_and_drafts_that_the_model_does_not_have(tiny):
    target = target_of(tiny["31b"], 1)
    for prompt, bias in (([5, 320], ()), ([-1], ()), ([5], ((400, 1.0),))):
        with pytest.raises(UserError, match="this model's ids are 0 to 319"):
            target.prefill(Sequence(prompt, Sampling(logit_bias=bias), slot=0), 0, len(prompt))
    with pytest.raises(UserError, match="at most 31"):
        target.verify([Sequence([5], slot=0)], np.zeros((1, 32), np.int32))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8", "fp8-w8a8"])
def test_random_weights_run(variant, dtype):
    arch = parse_arch(config_of(variant))
    target = random_target(arch, CudaOptions(slots=2, max_len=64, device="cpu", dtype=dtype))
    step = target.prefill(Sequence([1, 2, 3], Sampling(logprobs=1), slot=0), 0, 3)
    assert 0 <= step.chosen[0, 0] < arch.vocab and np.isfinite(step.logprobs.chosen).all()

"""Our word of honour on real forwards: no drafter, K, slot count or loop changes one token."""

from __future__ import annotations

from functools import partial

import pytest

from drafters.model.host import CATCH_UP
from drafters.ngram.host import NgramDrafter
from drafters.ngram.jax import TracedNgram
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from targets import mini
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.load import JaxOptions, load_target
from targets.jax.selfcheck import self_check
from tests.lossless import (
    check_device,
    check_device_model,
    check_eagle3,
    check_host,
    decode,
    prompts_for,
)
from tests.tiny import VARIANTS


@pytest.mark.parametrize(
    ("variant", "mode"),
    [("31b", "everything"), ("e2b", "greedy"), ("26b-a4b", "nucleus"), ("e4b", "nucleus")],
)
def test_host_loop(tiny, variant, mode):
    check_host(tiny[variant], mode, slots=4, ks=[0, 4, 7])


@pytest.mark.parametrize(("variant", "mode"), [("31b", "greedy"), ("e4b", "everything")])
def test_device_loop(tiny, variant, mode):
    check_device(tiny[variant], mode, slots=3, ks=[4])
    check_device_model(tiny[variant], mode, slots=3, ks=[4])


def test_mini_both_loops():
    check_host(mini.path("mini"), "nucleus", slots=2, ks=[4], tokens=40)
    check_device(mini.path("mini"), "nucleus", slots=2, ks=[4], tokens=40)
    check_eagle3(mini.path("mini"), "nucleus", slots=2, ks=[4], tokens=40)


def test_a_draft_context_shorter_than_the_targets(tiny):
    """Drafting ends where the draft's own context does, the text goes on, in both loops."""
    path = tiny["31b"]
    short = load_target(path, JaxOptions(slots=3, width=CATCH_UP, chunk=8, max_len=48))
    check_device_model(path, "nucleus", slots=3, ks=[1, 7], draft_of=lambda *_: short)
    check_eagle3(path, "nucleus", slots=3, ks=[7], max_position=48)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "nucleus"])
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("variant", ["mini", *VARIANTS])
def test_whole_matrix(tiny, variant, slots, mode):
    path = mini.path("mini") if variant == "mini" else tiny[variant]
    check_host(path, mode, slots, ks=[0, 1, 2, 4, 7])
    check_device(path, mode, slots, ks=[0, 1, 2, 4, 7])
    check_device_model(path, mode, slots, ks=[0, 1, 2, 4, 7])
    check_eagle3(path, mode, slots, ks=[1, 2, 4, 7])


def test_batched_rows_are_exact_within_their_bucket(tiny):
    """The TPU and GPU way of running rows, on a CPU: same slots, any neighbours, any K."""
    target = load_target(tiny["31b"], JaxOptions(slots=4, max_len=128, k=7, mapped=False, chunk=8))
    run = partial(decode, target, tokens=40)
    together, _ = run(NoDrafter(), host_cycle(target, NoDrafter(), 0), "nucleus")
    ngram = NgramDrafter(1, 3)
    assert run(ngram, host_cycle(target, ngram, 4), "nucleus")[0] == together
    for mode in ("greedy", "everything"):
        plain, _ = run(NoDrafter(), host_cycle(target, NoDrafter(), 0), mode)
        assert (
            run(NoDrafter(), device_loop(target, TextDrafter(TracedNgram(1, 3)), 4), mode)[0]
            == plain
        )
    lone = prompts_for(target.vocab)[0]
    alone, _ = run(NoDrafter(), host_cycle(target, NoDrafter(), 0), "nucleus", prompts=[lone])
    assert alone["0"] == together["0"]


def test_the_self_check_asks_a_context_that_is_shorter_than_a_call(tiny):
    """32 tokens a call, of which 16 can ever be fed."""
    options = JaxOptions(slots=2, max_len=17, k=31, mapped=False, chunk=8)
    checks = self_check(load_target(tiny["31b"], options))
    assert len(checks) == 5 and all(check.passed and check.total for check in checks)

"""Our word of honour on real forwards: no drafter, K, slot count or loop changes one token."""

from __future__ import annotations

from functools import partial

import pytest

from drafters.lookup.jax import TracedLookup
from drafters.model.host import CATCH_UP
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.load import JaxOptions, load_target
from targets.jax.selfcheck import self_check
from tests.support.lossless import (
    ADVERSARIES,
    check_device,
    check_device_model,
    check_eagle3,
    check_host,
    decode,
    forget_targets,
    prompts_for,
)

pytestmark = pytest.mark.usefixtures("cheap_programs", "own_targets")


@pytest.fixture(scope="module")
def own_targets():
    forget_targets()
    yield
    forget_targets()


@pytest.mark.parametrize(
    ("variant", "mode", "ks", "adversaries"),
    [
        ("31b", "everything", (0, 4), ADVERSARIES),
        ("e2b", "greedy", (0, 7), ("model", "ngram", "wrong")),
        ("26b-a4b", "nucleus", (0, 7), ("ngram", "right", "wild")),
        ("e4b", "nucleus", (0, 4, 7), ("ngram", "random")),
    ],
)
def test_host_loop(tiny, variant, mode, ks, adversaries):
    """Each adversary, and each variant with some; test_whole_matrix has them all."""
    check_host(tiny[variant], mode, 4, ks, adversaries=adversaries)


@pytest.mark.parametrize(("variant", "mode"), [("31b", "greedy"), ("e4b", "everything")])
def test_device_loop(tiny, variant, mode):
    check_device(tiny[variant], mode, slots=4, ks=[4])


@pytest.mark.parametrize(
    ("variant", "mode"),
    [("31b", "nucleus"), ("e2b", "everything")],
)
@pytest.mark.slow
def test_device_loop_with_a_draft_model(tiny, variant, mode):
    """A draft of a shorter context, below, is always run."""
    check_device_model(tiny[variant], mode, slots=4, ks=[4], tokens=24)


def test_a_draft_context_shorter_than_the_targets(tiny):
    """Drafting ends where the draft's own context does, the text goes on, in both loops."""
    path = tiny["31b"]
    short = load_target(path, JaxOptions(slots=4, width=CATCH_UP, chunk=8, max_len=48))
    check_device_model(path, "everything", slots=4, ks=[7], draft_of=lambda *_: short)
    check_eagle3(path, "nucleus", slots=4, ks=[7], max_position=48)


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
            run(NoDrafter(), device_loop(target, TextDrafter(TracedLookup(1, 3)), 4), mode)[0]
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

"""Our word of honour on programs as users have them, fully optimised: the embedded model in both
loops and, slowly, the whole matrix of models, slots, drafters and K."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from targets import mini
from targets.jax.load import JaxOptions, load_target
from targets.jax.programs import Feed
from tests.lossless import (
    check_assistant,
    check_device,
    check_device_model,
    check_eagle3,
    check_host,
    forget_targets,
)
from tests.tiny import VARIANTS


@pytest.fixture(autouse=True, scope="module")
def own_targets():
    """None whose programs were compiled cheaply."""
    forget_targets()


def test_mini_both_loops():
    """With guesses of each kind, of whole and of no drafts; in the device loop by the drafters that
    users have there. test_whole_matrix and, on tiny models, test_lossless tell it what to guess."""
    check = {"path": mini.path("mini"), "mode": "nucleus", "slots": 4, "ks": [4], "tokens": 16}
    check_host(**check, adversaries=("model", "ngram", "right", "wild"))
    check_device(**check, adversaries=())
    check_eagle3(**check)


def test_feature_layers_change_no_logit(tiny):
    """A target that was compiled for a head says what one without says, on this machine."""
    options = JaxOptions(slots=2, max_len=96, k=7, chunk=8)
    bare, featured = (
        load_target(tiny["31b"], replace(options, features=layers)) for layers in ((), (0, 2, 4))
    )
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    feed = Feed(tokens, np.zeros(2, np.int32), np.full(2, 8, np.int32))
    assert (bare.logits(feed) == featured.logits(feed)).all()


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
    check_assistant(path, mode, slots, ks=[1, 2, 4, 7])

"""Our word of honour on programs as users have them, fully optimised: the embedded model in both
loops and, slowly, the whole matrix of models, slots, drafters and K."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from drafters.eagle3.jax.drafter import EagleDraftHead
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sampling, Sequence
from targets import mini
from targets.jax.host_drafter import HostHead
from targets.jax.load import load_target
from targets.jax.programs import Feed
from targets.tokenizer import load_tokenizer
from tests.support.lossless import (
    check_assistant,
    check_block,
    check_device,
    check_device_model,
    check_eagle3,
    check_host,
    forget_targets,
    head_for,
    options_of,
    target_of,
)
from tests.support.tiny import VARIANTS


@pytest.fixture(autouse=True, scope="module")
def own_targets():
    """Drop targets from other modules, which may have been compiled cheaply."""
    forget_targets()


def test_mini_both_loops():
    """Host loop with adversaries, whole drafts and no drafts; device loop with real drafters only.
    Device adversaries are tested in test_whole_matrix and, on tiny models, in test_lossless."""
    check = {"path": mini.path("mini"), "mode": "nucleus", "slots": 4, "ks": [4], "tokens": 16}
    check_host(**check, adversaries=("model", "ngram", "right", "wild"))
    check_device(**check, adversaries=())
    check_eagle3(**check)


def test_feature_layers_change_no_logit():
    """A target compiled with feature layers has the same logits as one without, on this machine.
    Both are the programs that test_mini_both_loops compiles."""
    path = mini.path("mini")
    layers = head_for(path).spec.layers
    bare, featured = target_of(path, 4), load_target(path, options_of(path, 4, layers))
    tokens = np.arange(32, dtype=np.int32).reshape(4, 8)
    feed = Feed(tokens, np.zeros(4, np.int32), np.full(4, 8, np.int32))
    assert (bare.logits(feed) == featured.logits(feed)).all()


def test_the_head_is_right_in_texts_longer_than_its_training_rows():
    """Of 512 tokens, at temperature 1: some 0.33 of its guesses; with all tokens in sight, 0.09.
    The program is the one that test_mini_both_loops compiles."""
    path = mini.path("mini")
    head = head_for(path)
    target = load_target(path, options_of(path, 4, head.spec.layers))
    text = load_tokenizer(path).encode(Path(argparse.__file__).read_text())[:700]
    drafter = HostHead(EagleDraftHead(head, target, 4))
    engine = Engine(target, drafter, host_cycle(target, drafter, 4))
    engine.run_to_end([Sequence(list(text), Sampling(1.0, seed=seed), 48) for seed in range(2)])
    assert engine.acceptance.rate > 0.3


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
    check_block(path, mode, slots, ks=[1, 4, 7])

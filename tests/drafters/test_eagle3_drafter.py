"""The EAGLE-3 drafter of the JAX target: lossless in both loops, its guesses those of the formulas
on the committed text, its wrong inputs one line."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from drafters import registry
from drafters.eagle3.files import save_flat
from drafters.eagle3.jax.drafter import EagleDraftHead
from drafters.eagle3.kind import KIND
from drafters.eagle3.spec import Head
from drafters.kind import DraftRequest
from specdec.core.config import ModelConfig
from targets import mini
from targets.jax.host_drafter import HostHead
from targets.jax.noise import gumbel
from targets.model_folder import read_arch
from targets.sampling_params import split_seed
from tests.support.commands import refused, run
from tests.support.eagle3_heads import BASE, EAGLE3, MINI, SPEC, jax_target_of, random_head
from tests.support.eagle3_oracle import Judging, Oracle
from tests.support.lossless import (
    check_both_loops,
    check_guesses_end,
    check_nothing_is_drafted,
    decode_three,
)
from tests.support.worded import WORDS

pytestmark = pytest.mark.usefixtures("cheap_programs")

K = 4


@cache
def drafter_of(path, **change):
    """Drafters may be used again and again: each prompt overwrites what was there."""
    return HostHead(EagleDraftHead(random_head(replace(SPEC, **change)), jax_target_of(path), K))


class Judged(Judging, HostHead):
    head_of: Head

    def by_the_formulas(self, seq, guesses):
        fresh, tokens, sampling = jax_target_of(self.path, slots=1), seq.tokens, seq.sampling
        steps = self.read_again(fresh, tokens)
        padded = np.concatenate([np.asarray(s.features[0]) for s in steps])
        features = torch.tensor(padded[: len(tokens) - 1])
        table = np.array(self.target.params.top["embed_tokens"])
        embedded = torch.tensor(table[[*tokens[1:], *guesses[:-1]]])
        rows = Oracle(self.head_of).chain(embedded, features, len(tokens) - 2, len(guesses))
        ids, scores = self.head_of.target_ids, rows.numpy()
        if sampling.temperature:
            places = np.arange(len(tokens), len(tokens) + len(guesses))
            seeds = np.tile(np.array(split_seed(sampling.seed), np.uint32), (len(guesses), 1))
            noise = np.asarray(gumbel(seeds, places, SPEC.vocab))[:, ids]
            scores = scores / sampling.temperature + noise
        return ids[scores.argmax(-1)].tolist()


@pytest.mark.parametrize(("window", "tokens"), [(None, 14), (9, 40)])
def test_guesses_are_those_of_a_fresh_prefill(tiny, window, tokens):
    """So the draft cache is that of the committed text, whatever was drafted and rejected; that of
    a head with a window is a ring, which wraps here."""
    target, head = jax_target_of(tiny["31b"]), random_head(replace(SPEC, window=window))
    drafter = Judged(EagleDraftHead(head, target, K))
    drafter.path, drafter.head_of = tiny["31b"], head
    entries = drafter.head.memory.cache.k.shape[1]
    assert entries == 96 if window is None else entries < 17 + tokens
    decode_three(target, drafter, K, tokens)
    assert drafter.judged >= 6


def test_lossless_in_both_loops(tiny):
    target, drafter = jax_target_of(tiny["31b"]), drafter_of(tiny["31b"])
    assert sum(check_both_loops(target, drafter, K)) > 0  # a random head's luck


@pytest.mark.parametrize(("change", "end"), [({}, 96), ({"max_position": 48}, 48)])
def test_nothing_is_guessed_beyond_a_context(tiny, change, end):
    """Of the target's 96 tokens, or of a shorter head's: K reaches beyond both."""
    target, drafter = jax_target_of(tiny["31b"]), drafter_of(tiny["31b"], **change)
    check_guesses_end(target, drafter, K, end, (40, 90, 95), context=96)


def test_says_nothing_where_nothing_that_it_knows_may_be_said(tiny, monkeypatch):
    target, drafter = jax_target_of(tiny["31b"]), drafter_of(tiny["31b"])
    ids = random_head().target_ids
    monkeypatch.setattr(target, "bias", target.bias.at[:, ids].set(-np.inf))
    check_nothing_is_drafted(target, drafter, K)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 96}, "width 96, not 256"),
        ({"vocab": 3000}, "vocabulary of 3000, not 4096"),
        ({"layers": (0, 2, 40)}, "layers"),
    ],
)
def test_a_head_for_another_target_is_one_line(tmp_path, capsys, change, message):
    save_flat(random_head(replace(MINI, **change)), tmp_path, stop_ids=(1,))
    assert message in refused(capsys, *EAGLE3, str(tmp_path))


@pytest.mark.parametrize(("asked", "seen"), [(None, 384), (0, None), (50, 50)])
def test_a_window_is_the_heads_own_or_what_was_asked_for(asked, seen):
    """mini's head was trained on rows of 512 tokens; its config.json says what it may see."""
    speculation = registry.config_type()(drafter="eagle3", draft_window=asked)
    resolved = registry.resolved(speculation, ModelConfig())
    draft = KIND.read(DraftRequest(read_arch(mini.path("mini")), None, resolved))
    assert draft.head.spec.window == seen


def test_eagle3_from_the_command_line(tmp_path, capsys, worded):
    head = random_head(replace(SPEC, vocab=WORDS, draft_vocab=500, layers=(0, 1, 2)))
    save_flat(head, tmp_path, stop_ids=(1,))
    alias = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}
    given = ["--model", str(worded), "--json", "--speculative-config", json.dumps(alias)]
    out, _ = run(capsys, *BASE, *given)
    document = json.loads(out.splitlines()[-1])
    assert document["tokens"] == 8 and document["drafted"] > 0
    assert document["config"]["speculation"]["drafter"] == "eagle3"
    assert "must be 0 (all tokens) or more" in refused(
        capsys, *EAGLE3, str(tmp_path), "--draft-window", "-1"
    )
    other = [*BASE, "--drafter", "eagle3", "--model", "mini-e"]
    assert "needs --draft-model" in refused(capsys, *other)
    assert "no folder" in refused(capsys, *EAGLE3, "/nowhere")

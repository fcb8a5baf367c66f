"""Block drafters of the JAX target: lossless in both loops, their guesses those of the formulas on
the committed text, whatever was drafted and rejected; their wrong inputs one line."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from drafters import registry
from drafters.dflash.jax.drafter import BlockDraftHead, PlacedBlock
from drafters.dflash.jax.snapshots import BlockSnapshots
from drafters.kind import DraftRequest
from specdec.core.config import ModelConfig
from specdec.core.types import NO_GUESS, Sequence
from targets import mini
from targets.jax.host_drafter import HostHead
from targets.jax.noise import gumbel
from targets.model_folder import read_arch
from targets.sampling_params import split_seed
from tests.support.block_heads import (
    CONFIGS,
    FORMS,
    SPECS,
    grown,
    grown_config,
    random_block,
    save,
)
from tests.support.block_oracle import BlockOracle
from tests.support.commands import refused, run
from tests.support.eagle3_heads import BASE, jax_target_of
from tests.support.eagle3_oracle import Judging
from tests.support.lossless import (
    check_both_loops,
    check_guesses_end,
    check_nothing_is_drafted,
    decode_three,
)

pytestmark = pytest.mark.usefixtures("cheap_programs")

K = 4
MINI = (256, 4096, (1, 5, 8))
"""Width and words of the embedded model, and layers of it to read."""


@cache
def placed_of(path: Path, form: str) -> PlacedBlock:
    return PlacedBlock(random_block(SPECS[form]), jax_target_of(path))


@cache
def drafter_of(path: Path, form: str) -> HostHead[BlockDraftHead]:
    """Drafters may be used again and again: each prompt overwrites what was there."""
    return HostHead(BlockDraftHead(placed_of(path, form)))


class Judged(Judging, HostHead):
    """`Judging` drafts one token in every third cycle: a block is drafted whole whatever K is."""

    path: Path
    form: str

    def by_the_formulas(self, seq, guesses):
        fresh, tokens, sampling = jax_target_of(self.path, slots=1), seq.tokens, seq.sampling
        steps = self.read_again(fresh, tokens)
        padded = np.concatenate([np.asarray(s.features[0]) for s in steps])
        features = torch.tensor(padded[: len(tokens) - 1])
        table = np.array(self.target.params.top["embed_tokens"])
        oracle = BlockOracle(random_block(SPECS[self.form]), table, table)
        words = np.array(split_seed(sampling.seed), np.uint32)[None]

        def noise(place, ids):
            made = np.asarray(gumbel(words, np.array([place]), len(table)))[0]
            return torch.tensor(made[ids])

        warm = sampling.temperature
        return oracle.drafts(features, tokens[-1], len(guesses), warm, noise if warm else None)


SLOW = [pytest.param(form, marks=pytest.mark.slow) for form in ("zlab", "deepspec")]


@pytest.mark.parametrize("form", ["dspark", "dflash2", *SLOW])
def test_guesses_are_those_of_a_fresh_prefill(tiny, form):
    """So each cache is that of the committed text: no rejected row is in it (trap 5)."""
    drafter = Judged(BlockDraftHead(placed_of(tiny["31b"], form)))
    drafter.path, drafter.form = tiny["31b"], form
    decode_three(jax_target_of(tiny["31b"]), drafter, K)
    assert drafter.judged >= 6


@pytest.mark.parametrize("form", ["dflash2", pytest.param("dspark", marks=pytest.mark.slow)])
def test_lossless_in_both_loops(tiny, form):
    target, drafter = jax_target_of(tiny["31b"]), drafter_of(tiny["31b"], form)
    assert sum(check_both_loops(target, drafter, K)) > 0  # a random head's luck


ALONE = "dflash", "dflash2"
"""Forms whose shorter draft is compiled in the fast suite; both ways, and with a selector."""


@pytest.mark.parametrize(
    "form", [f if f in ALONE else pytest.param(f, marks=pytest.mark.slow) for f in FORMS]
)
def test_a_shorter_draft_begins_as_the_whole_block(tiny, form):
    """Trap 6; and behind what a block drafts there is no guess."""
    target, drafter = jax_target_of(tiny["31b"]), drafter_of(tiny["31b"], form)
    seq = Sequence([5, 9, 3, 200, 7], slot=0)
    step = target.prefill(seq, 0, 5)
    drafter.prefill(seq, 0, 5, step)
    seq.tokens.append(int(step.chosen[0, 0]))
    most = SPECS[form].drafts
    whole = drafter.propose([seq], 7).tokens[0]
    assert (whole[:most] != NO_GUESS).all() and (whole[most:] == NO_GUESS).all()
    assert drafter.propose([seq], 2).tokens[0].tolist() == whole[:2].tolist()


def test_nothing_is_guessed_beyond_a_context(tiny):
    target, drafter = jax_target_of(tiny["31b"]), drafter_of(tiny["31b"], "zlab")
    check_guesses_end(target, drafter, K, 96, (40, 90, 95), context=96)


@pytest.mark.parametrize("form", ["dspark", "dflash2"])
def test_says_nothing_where_nothing_that_it_knows_may_be_said(tiny, monkeypatch, form):
    target, drafter = jax_target_of(tiny["31b"]), drafter_of(tiny["31b"], form)
    ids = random_block(SPECS[form]).target_ids
    barred = slice(None) if ids is None else ids
    monkeypatch.setattr(target, "bias", target.bias.at[:, barred].set(-np.inf))
    check_nothing_is_drafted(target, drafter, K)


def test_a_restored_prompt_is_drafted_from_as_a_read_one(tiny):
    """Chunks of the layer that sees everything, and rings: into another slot."""
    target, drafter = jax_target_of(tiny["31b"]), drafter_of(tiny["31b"], "zlab")
    snapshots = BlockSnapshots(drafter.head, 8)
    text = np.random.default_rng(2).integers(3, 320, 33).tolist()
    seq, chunks = Sequence(text, slot=0), []
    for start in range(0, 32, 8):
        drafter.prefill(seq, start, start + 8, target.prefill(seq, start, start + 8))
        chunks.append(snapshots.take_chunk(seq, start, start + 8).to_host())
    boundary = snapshots.take_boundary(seq, 32)
    caches = [np.asarray(part) for part in jax.tree.leaves(drafter.head.memory)]
    snapshots.restore(Sequence(text, slot=1), 32, chunks, boundary)
    for before, after in zip(caches, jax.tree.leaves(drafter.head.memory), strict=True):
        assert np.array_equal(before[0][:32], np.asarray(after[1])[:32])


def test_tables_that_are_the_targets_are_not_loaded_twice(tiny):
    """Compared, not assumed: a table that differs in one value is the head's own."""
    target, head = jax_target_of(tiny["31b"]), random_block(SPECS["dspark"])
    table = np.array(target.params.top["embed_tokens"])
    shared = PlacedBlock(head._replace(weights=head.weights | {"embed_tokens": table}), target)
    assert not shared.spec.own_table
    assert shared.inputs().table is target.params.top["embed_tokens"]
    table = table.copy()
    table[7, 3] += 1
    other = PlacedBlock(head._replace(weights=head.weights | {"embed_tokens": table}), target)
    assert other.spec.own_table and np.array_equal(other.inputs().table, table)


def block_folder(tmp_path: Path, form: str) -> str:
    head = random_block(grown(SPECS[form], *MINI))
    save(head, grown_config(form, *MINI), tmp_path)
    return str(tmp_path)


@pytest.mark.slow
def test_a_block_drafter_from_the_command_line(tmp_path, capsys):
    """By the name that its file has, too."""
    folder = block_folder(tmp_path, "dspark")
    alias = {"method": "dspark", "model": folder, "num_speculative_tokens": 3}
    out, err = run(capsys, *BASE, "--json", "--speculative-config", json.dumps(alias))
    document = json.loads(out.splitlines()[-1])
    assert document["tokens"] == 8 and document["drafted"] > 0
    assert document["config"]["speculation"]["drafter"] == "dflash"
    assert "predicts its own acceptance, which is not used" in err


def test_auto_takes_a_block_drafter_by_any_of_its_names(tmp_path):
    folder = block_folder(tmp_path, "dspark")
    speculation = registry.config_type()(auto_with="dflash2", draft_model=folder, k=7)
    resolved = registry.resolved(speculation, ModelConfig())
    request = DraftRequest(read_arch(mini.path("mini")), None, resolved)
    draft = registry.find("auto").read(request)
    assert draft.features == MINI[2]
    assert "auto chooses from suffix, ngram, dflash" in draft.notes[0]
    assert any("drafts 5 tokens a cycle" in note for note in draft.notes)


def test_wrong_heads_are_one_line(tmp_path, capsys):
    dflash = [*BASE, "--drafter", "dflash", "--draft-model"]
    assert "needs --draft-model" in refused(capsys, *dflash[:-1])
    assert "no folder" in refused(capsys, *dflash, "/nowhere")
    save(random_block(SPECS["zlab"]), CONFIGS["zlab"], tmp_path)
    assert "width 48, not 256" in refused(capsys, *dflash, str(tmp_path))

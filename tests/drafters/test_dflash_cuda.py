"""Block drafters of the CUDA target, on its references: the formulas' guesses on the committed
text, in any batch; lossless; what they need is known before they are there."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters.dflash.cuda.drafter import BlockDraftHead
from drafters.dflash.cuda.footprint import need_bytes
from drafters.dflash.cuda.model import BlockModel
from drafters.dflash.cuda.snapshots import BlockSnapshots
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.types import NO_GUESS, Sequence
from targets.cuda import cache as kv
from targets.cuda.footprint import TargetShape
from targets.cuda.host_drafter import HostHead
from targets.cuda.noise import gumbel
from targets.cuda.ops import Linear
from targets.sampling_params import split_seed
from tests.support.block_heads import FORMS, SPECS, grown, grown_config, random_block, save
from tests.support.block_oracle import BlockOracle
from tests.support.commands import CUDA, run
from tests.support.eagle3_heads import BASE, cuda_target_of
from tests.support.eagle3_oracle import Judging
from tests.support.lossless import (
    check_guesses_end,
    check_nothing_is_drafted,
    decode,
    decode_three,
)

pytestmark = pytest.mark.usefixtures("cheap_programs")

K = 4
MINI = (256, 4096, (1, 5, 8))
TOKENS = 12
"""Of each answer where whole texts are compared."""


def target_of(path: Path, slots: int = 2):
    return cuda_target_of(path, slots)


@cache
def model_of(path: Path, form: str, slots: int = 2) -> BlockModel:
    return BlockModel(random_block(SPECS[form]), target_of(path, slots))


def drafter_of(path: Path, form: str, slots: int = 2) -> HostHead[BlockDraftHead]:
    return HostHead(BlockDraftHead(model_of(path, form, slots)))


class Judged(Judging, HostHead):
    path: Path
    form: str

    def by_the_formulas(self, seq, guesses):
        fresh, tokens, sampling = cuda_target_of(self.path, slots=1), seq.tokens, seq.sampling
        steps = self.read_again(fresh, tokens)
        features = torch.cat([step.features[0] for step in steps])
        table = fresh.weights.embedding.data.float()
        oracle = BlockOracle(random_block(SPECS[self.form]), table, table)
        seed, warm = torch.tensor(split_seed(sampling.seed)), sampling.temperature

        def noise(place, ids):
            return gumbel(seed, torch.tensor(place), len(table))[ids]

        return oracle.drafts(features, tokens[-1], len(guesses), warm, noise if warm else None)


def test_features_that_graphs_of_prompts_keep_are_counted():
    """Of one prompt 3,192 rows, of two and four at once 3,808; and a chunk's."""
    spec, shape = SPECS["zlab"], TargetShape(4, 2048, K + 1, 2048, "fp8", "fp8")
    more = need_bytes(spec, shape) - need_bytes(spec, replace(shape, chunk=0))
    assert more == 4 * spec.features * (2048 + 3192 + 3808)


@pytest.mark.parametrize("form", ["dspark", "dflash2", "zlab", "deepspec"])
def test_guesses_are_those_of_a_fresh_prefill(tiny, form):
    """So each cache is that of the committed text: no rejected row is in it."""
    drafter = Judged(BlockDraftHead(model_of(tiny["31b"], form)))
    drafter.path, drafter.form = tiny["31b"], form
    decode_three(target_of(tiny["31b"]), drafter, K)
    assert drafter.judged >= 6


@pytest.mark.parametrize(("form", "mode", "slots"), [("dspark", "everything", 3)])
def test_lossless(tiny, form, mode, slots):
    plain = cuda_target_of(tiny["31b"], 1, features=())
    expected, _ = decode(plain, NoDrafter(), host_cycle(plain, NoDrafter(), 0), mode, TOKENS)
    target, drafter = target_of(tiny["31b"], slots), drafter_of(tiny["31b"], form, slots)
    text, acceptance = decode(target, drafter, host_cycle(target, drafter, K), mode, TOKENS)
    assert text == expected and acceptance.drafted > 0


@pytest.mark.parametrize("form", FORMS)
def test_a_shorter_draft_begins_as_the_whole_block(tiny, form):
    target, drafter = target_of(tiny["31b"]), drafter_of(tiny["31b"], form)
    seq = Sequence([5, 9, 3, 200, 7], slot=0)
    step = target.prefill(seq, 0, 5)
    drafter.prefill(seq, 0, 5, step)
    seq.tokens.append(int(step.chosen[0, 0]))
    most = SPECS[form].drafts
    whole = drafter.propose([seq], 7).tokens[0]
    assert (whole[:most] != NO_GUESS).all() and (whole[most:] == NO_GUESS).all()
    assert drafter.propose([seq], 2).tokens[0].tolist() == whole[:2].tolist()


def test_nothing_is_guessed_beyond_a_context(tiny):
    target, drafter = target_of(tiny["31b"]), drafter_of(tiny["31b"], "zlab")
    check_guesses_end(target, drafter, K, 96, (44, 90, 95), context=96)


def test_says_nothing_where_nothing_that_it_knows_may_be_said(tiny, monkeypatch):
    target, drafter = target_of(tiny["31b"]), drafter_of(tiny["31b"], "dspark")
    bias = target.bias.clone()
    bias[:, random_block(SPECS["dspark"]).target_ids] = -torch.inf
    monkeypatch.setattr(target, "bias", bias)
    check_nothing_is_drafted(target, drafter, K)


def test_a_restored_prompt_is_drafted_from_as_a_read_one(tiny):
    target, drafter = target_of(tiny["31b"]), drafter_of(tiny["31b"], "zlab")
    snapshots = BlockSnapshots(drafter.head)
    text = np.random.default_rng(2).integers(3, 320, 33).tolist()
    seq, chunks = Sequence(text, slot=0), []
    for start in range(0, 32, 16):
        drafter.prefill(seq, start, start + 16, target.prefill(seq, start, start + 16))
        chunks.append(snapshots.take_chunk(seq, start, start + 16))
    boundary = snapshots.take_boundary(seq, 32)
    snapshots.restore(Sequence(text, slot=1), 32, chunks, boundary)
    for layer in drafter.head.inputs.caches:
        read, restored = (kv.read(layer, slot, 0, 32) for slot in (0, 1))
        assert all(map(torch.equal, read, restored))


def test_tables_that_are_the_targets_are_not_loaded_twice(tiny):
    target, head = target_of(tiny["31b"]), random_block(SPECS["dspark"])
    table = target.weights.embedding.data.float().numpy().copy()
    shared = BlockModel(head._replace(weights=head.weights | {"embed_tokens": table}), target)
    own = BlockModel(head, target)
    assert not shared.spec.own_table and own.spec.own_table
    tokens = shared.block_tokens(torch.tensor([7, 300], dtype=torch.int32))
    exact = torch.from_numpy(table)[tokens.flatten().long()]
    assert (shared.embed(tokens) - exact).abs().max() < 1e-6


def test_what_a_head_needs_is_known_before_it_is_there(tiny):
    path = tiny["31b"]
    target = cuda_target_of(path, dtype="fp8", max_len=64)
    head = BlockDraftHead(BlockModel(random_block(SPECS["dflash"]), target))
    placed = head.inputs.model.placed
    assert placed.kind == "fp8"
    linears = [part for layer in placed.layers for part in vars(layer).values()]
    parts = [part.data for part in (*linears, placed.lm_head) if isinstance(part, Linear)]
    parts += [*placed.weights.values()]
    parts += [part for cache in head.inputs.caches for part in (cache.k, cache.v)]
    held = sum(part.numel() * part.element_size() for part in parts)
    shape = TargetShape(2, 64, K + 1, 0, "fp8", "fp8")
    assert held < need_bytes(SPECS["dflash"], shape) < 2 * held


def test_a_block_drafter_from_the_command_line(tmp_path, capsys):
    """By the name that its file has, in vLLM's form."""
    save(random_block(grown(SPECS["dspark"], *MINI)), grown_config("dspark", *MINI), tmp_path)
    alias = {"method": "dspark", "model": str(tmp_path), "num_speculative_tokens": 3}
    texts = set()
    for drafter in (["--speculative-config", json.dumps(alias)], ["--drafter", "none"]):
        out, err = run(capsys, *BASE, *CUDA, "--json", *drafter)
        document = json.loads(out.splitlines()[-1])
        texts.add(document["text"])
        drafts = drafter[0] != "--drafter"
        assert (document["drafted"] > 0) == drafts
        assert document["config"]["speculation"]["drafter"] == ("dflash" if drafts else "none")
        assert ("predicts its own acceptance, which is not used" in err) == drafts
    assert len(texts) == 1

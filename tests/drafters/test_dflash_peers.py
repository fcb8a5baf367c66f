"""Our exported block drafters in speculators' own class: the same logits of each draft.

speculators pins older libraries, so it is no dependency; see CONTRIBUTING.md for how to run this.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from drafters.dflash.files import save_dspark
from tests.support.block_oracle import BlockOracle
from tests.support.eagle3_worker import STOPS
from tests.support.tiny import VOCAB
from tests.support.tiny_blocks import SHAPE, random_block, spec_of
from tests.support.verifier import write_verifier

LENGTH = 31
ANCHORS = 1, 5, 15, 22
"""Places in the text."""
TOLERANCE = 1e-4
pytestmark = pytest.mark.filterwarnings("ignore")


def in_speculators(head, table, folder):
    """The exported head as speculators' own class."""
    speculators = pytest.importorskip("speculators")
    write_verifier(folder / "target", table)
    out = folder / "head"
    save_dspark(head, out, STOPS, str(folder / "target"), "float32")
    config = json.loads((out / "config.json").read_text())
    config["transformer_layer_config"]["_attn_implementation"] = "eager"  # flex needs a GPU
    (out / "config.json").write_text(json.dumps(config))
    return speculators.SpeculatorModel.from_pretrained(str(out)).float().eval()


@pytest.mark.parametrize("anchor_predicts", [False, True])
@pytest.mark.parametrize("words", [200, 0], ids=["pruned", "whole"])
def test_speculators_computes_the_same_logits(tmp_path, monkeypatch, words, anchor_predicts):
    # all in one window: speculators trains a whole block with the anchor's, engines slide it
    shape = replace(SHAPE, draft_vocab=words, anchor_predicts=anchor_predicts, window=LENGTH)
    spec = spec_of(shape)
    head, random = random_block(spec), np.random.default_rng(4)
    tokens = random.integers(3, VOCAB, LENGTH)
    features = random.standard_normal((LENGTH, 3 * spec.body.hidden)).astype(np.float32)
    table = random.standard_normal((VOCAB, spec.body.hidden)).astype(np.float32)
    model = in_speculators(head, table, tmp_path)
    from speculators.models.dflash import core as blocks
    from speculators.models.dspark import core

    chosen = torch.tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool)
    monkeypatch.setattr(blocks, "select_anchors", lambda *_: chosen)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(core, "compute_metrics", lambda logits, *_, **__: (seen.append(logits), {}))
    with torch.no_grad():
        model(
            hidden_states=torch.tensor(features)[None],
            input_ids=torch.tensor(tokens)[None],
            loss_mask=torch.ones(1, LENGTH),
            verifier_last_hidden_states=torch.zeros(1, LENGTH, spec.body.hidden),
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=len(ANCHORS),
        )
    theirs = seen[0].view(len(ANCHORS), spec.slots, -1)[:, spec.first :]
    oracle = BlockOracle(head, table, table)
    for anchor, logits in zip(ANCHORS, theirs, strict=True):
        hidden = oracle.hidden(torch.tensor(features[:anchor]), int(tokens[anchor]))
        own = oracle.logits(hidden)
        for n, found in enumerate(logits):
            exact, _ = oracle.scores(hidden, own, n, int(tokens[anchor + n]))
            assert (found - exact).abs().max() < TOLERANCE

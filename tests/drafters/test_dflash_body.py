"""A block drafter's forward in JAX and in torch: the formulas' states, logits and scores, with
windows shorter than the text and rings that wrapped; and each detail that only costs acceptance is
seen here when it is wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from drafters.dflash.cuda import body as torch_body, choosing as torch_choosing
from drafters.dflash.cuda.placing import arch_of, place
from drafters.dflash.jax import body, choosing
from drafters.dflash.spec import BlockHead, BlockLayer, BlockSpec
from targets.arch import Rope
from targets.cuda.ops import Rows
from targets.cuda.reference import Reference
from tests.support.block_heads import CAUSAL, FORMS, FULL, SPECS, random_block
from tests.support.block_oracle import BlockOracle

pytestmark = pytest.mark.usefixtures("cheap_programs")

LENGTHS = (31, 5)
"""Tokens before the anchors of two texts: one beyond its windows, one within."""
PARTS = (0, 9, 26, 31)
"""Where the first text's features are cut: rings wrap between."""
LONGEST = 40
TOLERANCE = 1e-4


@cache
def inputs():
    random = np.random.default_rng(5)
    features = random.standard_normal((2, LONGEST, 3 * 48)).astype(np.float32)
    table = random.standard_normal((320, 48)).astype(np.float32) * np.float32(0.2)
    matrix = random.standard_normal((320, 48)).astype(np.float32)
    return features, table, matrix, (17, 300)


@cache
def expected(form: str):
    """Of each text: (states [U, H], logits [K, D], drafts [K], scores of each [K, n], ids)."""
    features, table, matrix, anchors = inputs()
    oracle, found = BlockOracle(random_block(SPECS[form]), table, matrix), []
    for row, (length, anchor) in enumerate(zip(LENGTHS, anchors, strict=True)):
        hidden = oracle.hidden(torch.tensor(features[row, :length]), anchor)
        logits, previous, scores = oracle.logits(hidden), [anchor], []
        for j in range(SPECS[form].drafts):
            made, ids = oracle.scores(hidden, logits, j, previous[-1])
            scores.append((made, ids))
            previous.append(int(ids[made.argmax()]))
        found.append((hidden, logits, previous, scores))
    return oracle, found


def written(spec: BlockSpec, inject, make):
    """Caches with both texts, written in parts over stale entries."""
    features = inputs()[0]
    caches = make()
    for start, stop in zip(PARTS, PARTS[1:], strict=False):
        places = np.arange(start, stop)[None].repeat(2, 0)
        places = np.where(places < np.array(LENGTHS)[:, None], places, -1)
        caches = inject(caches, features[:, start:stop], places)
    return caches


def by_jax(head: BlockHead):
    spec, (_, table, matrix, anchors) = head.spec, inputs()
    weights = body.place(head.weights, spec.body, jnp.float32, None)
    table, matrix = weights.pop("embed_tokens", table), weights.pop("lm_head", matrix)
    ids = None if head.target_ids is None else jnp.asarray(head.target_ids, jnp.int32)

    @jax.jit
    def inject(caches, features, places):
        return body.inject(weights, spec, caches, features, jnp.arange(2), places)

    @jax.jit
    def run(caches):
        start = jnp.asarray(LENGTHS)
        embedded = body.embed(spec, jnp.asarray(table), jnp.asarray(anchors))
        hidden = body.block(weights, spec, caches, embedded, start)
        return hidden, body.logits(spec, jnp.asarray(matrix), hidden[:, spec.first :])

    def make():
        blank = body.make_caches(spec, 2, LONGEST, jnp.float32)
        return jax.tree.map(lambda part: part + 7, blank)

    hidden, logits = run(written(spec, inject, make))
    among = choosing.scored(spec, logits, ids, hidden[:, spec.first :], jnp.zeros((2, 320)))

    @jax.jit
    def score(j, previous):
        return choosing.scores(weights, spec, among, j, previous)

    return weights, hidden, logits, score


def called(tokens: int, starts, slots) -> Rows:
    ints = (torch.tensor(tuple(each), dtype=torch.int32) for each in (starts, slots))
    return Rows(torch.zeros((len(slots), tokens), dtype=torch.int32), *ints)


def by_torch(head: BlockHead):
    spec, (_, table, matrix, anchors) = head.spec, inputs()
    device, ops = torch.device("cpu"), Reference(arch_of(spec))
    placed = place(spec, head.weights, ops, "float32", device)
    table = placed.weights.get("embed_tokens", torch.tensor(table))
    matrix = torch.tensor(head.weights.get("lm_head", matrix))

    def inject(caches, features, places):
        """Where a text ends within a part, the rest is written as what a verify rejected is."""
        slots = [row if (own >= 0).any() else -1 for row, own in enumerate(places)]
        start = places.max(initial=-1, axis=0)[0]
        rows = called(features.shape[1], [start] * 2, slots)
        torch_body.inject(placed, caches, torch.tensor(features), rows)
        return caches

    def make():
        blank = torch_body.make_caches(placed, 2, LONGEST)
        for part in (part for layer in blank for part in (layer.k, layer.v)):
            part += 7
        return blank

    fed = torch.full((2, spec.slots), spec.mask_id)
    fed[:, 0] = torch.tensor(anchors)
    embedded = table[fed].flatten(0, 1) * spec.embedding_scale
    rows = called(spec.slots, LENGTHS, (0, 1))
    x = torch_body.block(placed, written(spec, inject, make), embedded, rows)
    x = x.view(2, spec.slots, -1)
    hidden = torch_body.normed(placed, x)
    logits = hidden[:, spec.first :] @ matrix.T
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    biases = torch.zeros(2, 320), torch.arange(2)
    among = torch_choosing.scored(placed, logits, x[:, spec.first :], *biases)

    def score(j, previous):
        found = torch_choosing.scores(placed, among, j, torch.tensor(previous))
        ids = None if among.ids is None else among.ids[:, j]
        return found, torch.tensor(head.target_ids) if head.target_ids is not None else ids

    return placed, hidden, logits, score


def as_torch(found) -> torch.Tensor:
    return found if isinstance(found, torch.Tensor) else torch.tensor(np.array(found))


def difference(found, exact: torch.Tensor) -> float:
    return float((as_torch(found) - exact).abs().max())


IN_JAX = "dspark", "dflash2", "zlab", "deepspec"
"""Forms that are compiled in the fast suite: the others differ from these in their spec alone."""
CASES = [
    pytest.param(form, backend, marks=[pytest.mark.slow] * (backend is by_jax))
    if form not in IN_JAX
    else (form, backend)
    for form in FORMS
    for backend in (by_jax, by_torch)
]


@pytest.mark.parametrize(("form", "backend"), CASES)
def test_states_logits_and_scores_are_those_of_the_formulas(form, backend) -> None:
    head = random_block(SPECS[form])
    weights, hidden, logits, score = backend(head)
    oracle, texts = expected(form)
    for row, (states, own_logits, _, _) in enumerate(texts):
        assert difference(hidden[row], states) < TOLERANCE
        assert difference(logits[row], own_logits) < TOLERANCE
    for j in range(head.spec.drafts):
        found, ids = score(j, np.array([previous[j] for *_, previous, _ in texts]))
        for row, (*_, scores) in enumerate(texts):
            exact, words = scores[j]
            own = words if ids is None else as_torch(ids).reshape(-1, len(words))
            own = words if ids is None else own[row if len(own) > 1 else 0]
            made = as_torch(found)[row][own.argsort()]
            assert torch.equal(own.sort().values, words.sort().values)
            assert float((made - exact[words.argsort()]).abs().max()) < TOLERANCE
    chooser = head.spec.chooser
    if form in ("dspark", "deepspec"):
        assert chooser.confidence
        before = [torch.tensor(previous[:-1]) for *_, previous, _ in texts]
        module = choosing if backend is by_jax else torch_choosing
        own = (weights, head.spec) if backend is by_jax else (weights,)
        states = hidden[:, head.spec.first :]
        tokens = torch.stack(before)
        found = module.confidence(*own, states, tokens.numpy() if backend is by_jax else tokens)
        for row, (whole, *_) in enumerate(texts):
            assert difference(found[row], oracle.confidence(whole, before[row])) < TOLERANCE


def turned(form: str, **changes) -> BlockSpec:
    return replace(SPECS[form], body=replace(SPECS[form].body, **changes))


BOTH_WAYS = BlockLayer(causal=False, window=CAUSAL.window)
WIDER = BlockLayer(causal=True, window=CAUSAL.window + 1)
WRONG = {
    "embeddings that are scaled": replace(SPECS["dspark"], embedding_scale=48**0.5),
    "embeddings that are not": replace(SPECS["zlab"], embedding_scale=1.0),
    "another mask token": replace(SPECS["dspark"], mask_id=5),
    "sliding layers both ways": turned("dspark", layers=(BOTH_WAYS, CAUSAL)),
    "a full layer that is causal": turned("dflash", layers=(CAUSAL, CAUSAL, WIDER)),
    "JetSpec's layers both ways": turned("jetspec", layers=(CAUSAL, FULL)),
    "a window of one more": turned("dspark", layers=(CAUSAL, WIDER)),
    "pairs that all rotate": turned("deepspec", rope=Rope(1e6, 8)),
    "another base of positions": turned("dspark", rope=Rope(1e6, 6)),
    "no soft-cap": replace(SPECS["deepspec"], softcap=None),
    "a shorter block": replace(SPECS["dflash"], slots=5),
}
FORM_OF = {
    "embeddings that are not": "zlab",
    "a full layer that is causal": "dflash",
    "JetSpec's layers both ways": "jetspec",
    "pairs that all rotate": "deepspec",
    "no soft-cap": "deepspec",
    "a shorter block": "dflash",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_detail_is_seen(wrong) -> None:
    """What the test above would miss, it would miss for good: the output is exact in any case."""
    form = FORM_OF.get(wrong, "dspark")
    head = random_block(SPECS[form])
    _, _, logits, _ = by_torch(head._replace(spec=WRONG[wrong]))
    _, texts = expected(form)
    shared = logits.shape[1]
    assert max(difference(logits[row], texts[row][1][:shared]) for row in range(2)) > 1e-2

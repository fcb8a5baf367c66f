"""What the head is fed when it learns is what it is fed when it drafts: requests go through the
engine and are distilled, then the trainer makes its inputs of the very same answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drafters.eagle3.jax.head as jax_head
from drafters.eagle3.cuda import drafter as drafter_cuda
from drafters.eagle3.cuda.head import HeadModel
from drafters.eagle3.jax import drafter as drafter_jax
from drafters.eagle3.jax.head import place
from drafters.eagle3.spec import Head
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sampling
from targets.cuda import host_drafter
from targets.jax.host_drafter import HostHead
from tests.support.distil_worker import source
from tests.support.eagle3_heads import SPEC, cuda_target_of, jax_target_of, random_head
from tests.support.eagle3_worker import answers
from training.distil import distil, read_answers
from training.packing import PackedRows, pack
from training.teacher import load_teacher, teach
from training.unroll import judge, masks

pytestmark = pytest.mark.usefixtures("cheap_programs")

K = 3
LENGTH = 64
TOLERANCE = 2e-5
"""States reach 10; the largest difference seen is 3e-6."""
PROMPTS = [[5, 9, 3], [7, 8] * 9, [11]]
HEADS = {
    "eagle3": random_head(),
    "eagle3.1": random_head(replace(SPEC, fc_norm=True, norm_output=True)),
}


def samplings(head: Head) -> dict[str, Sampling]:
    """Only a few tokens are likely, so that a random head is sometimes right."""
    bias = tuple((i, 30.0) for i in head.target_ids[40:44].tolist())
    return {"greedy": Sampling(logit_bias=bias), "sampled": Sampling(1.0, seed=7, logit_bias=bias)}


@dataclass
class Call:
    """One call of the decoder layer, as it was fed: tokens and positions [T], hidden [T, H], and
    the features [T, F] that hidden was made of; None where it is the head's own output."""

    tokens: np.ndarray
    positions: np.ndarray
    hidden: np.ndarray
    features: np.ndarray | None


@dataclass
class Turn:
    """A piece of a prompt that the head read, or one draft of it. anchor: the position of the
    features that the draft began from; -1 for a piece of a prompt."""

    anchor: int
    calls: list[Call] = field(default_factory=list)


class Log:
    """What one head was fed, by request and turn."""

    def __init__(self) -> None:
        self.requests: list[list[Turn]] = [[Turn(-1)]]
        self._tokens = self._features = np.empty(0)
        self._fused = False

    def embedded(self, tokens) -> None:
        self._tokens = np.array(tokens).reshape(-1)

    def fused(self, features) -> None:
        self._features, self._fused = np.array(features).reshape(-1, SPEC.features), True

    def fed(self, hidden, positions) -> None:
        hidden, positions = np.array(hidden).reshape(-1, SPEC.hidden), np.array(positions)
        features, self._fused = self._features if self._fused else None, False
        call = Call(self._tokens, positions.reshape(-1), hidden, features)
        self.requests[-1][-1].calls.append(call)

    def watch(self, drafter) -> None:
        """Note where a request and where a draft begin."""
        propose = drafter.propose

        def begin(_) -> None:
            jax.effects_barrier()
            self.requests.append([Turn(-1)])

        def turn(seqs, k):
            jax.effects_barrier()
            self.requests[-1].append(Turn(len(seqs[0].tokens) - 2))
            return propose(seqs, k)

        drafter.reset, drafter.propose = begin, turn


def listen_in_jax(monkeypatch, log: Log) -> None:
    """Log all calls of heads that are traced from now on. Each test has its own head, and
    cheap_programs clears the traces."""

    def heard(original, note, first: int, last: int):
        def call(*given):
            jax.debug.callback(note, *given[first:last], ordered=True)
            return original(*given)

        return call

    monkeypatch.setattr(jax_head, "fuse", heard(jax_head.fuse, log.fused, 2, 3))
    monkeypatch.setattr(jax_head, "embed", heard(jax_head.embed, log.embedded, 1, 2))
    monkeypatch.setattr(jax_head, "layer", heard(jax_head.layer, log.fed, 3, 5))


def drafting_in_jax(path, monkeypatch, log: Log, head: Head):
    listen_in_jax(monkeypatch, log)
    target = jax_target_of(path, slots=1)
    return target, HostHead(drafter_jax.EagleDraftHead(head, target, K))


def drafting_in_cuda(path, monkeypatch, log: Log, head: Head):
    """On its references."""
    target = cuda_target_of(path, 1)
    model = HeadModel(head, target)
    fuse, mix, store = model.fuse, model.mix, model.store

    def fused(features, slot):
        log.fused(features[slot.long()].numpy())
        return fuse(features, slot)

    def fed(rows, h) -> None:
        log.embedded(rows.tokens.numpy())
        log.fed(h.numpy(), rows.start.numpy()[:, None] + np.arange(rows.tokens.shape[1]))

    monkeypatch.setattr(model, "fuse", fused)
    monkeypatch.setattr(model, "mix", lambda rows, h, own: (fed(rows, h), mix(rows, h, own))[1])
    monkeypatch.setattr(
        model, "store", lambda rows, h, table: (fed(rows, h), store(rows, h, table))[1]
    )
    return target, host_drafter.HostHead(drafter_cuda.EagleDraftHead(model, K))


def answered(target, drafter, log: Log, head: Head, folder) -> tuple[list[dict], list[list[Turn]]]:
    """Distilled answers, greedy and sampled, and what the head was fed meanwhile."""
    log.watch(drafter)
    made, log.requests = [], []
    for name, sampling in samplings(head).items():
        engine = Engine(target, drafter, host_cycle(target, drafter, K))
        told = source(max_tokens=24, rows=len(PROMPTS))
        distil(engine, PROMPTS, sampling, told, folder / name)
        assert 0 < engine.acceptance.accepted < engine.acceptance.drafted, name
        made += list(read_answers(folder / name)[0])
    jax.effects_barrier()
    return made, log.requests


@pytest.fixture(scope="module", params=HEADS)
def learn(request, tiny):
    """A head; and packed rows -> what the trainer feeds it, by row: a call for each step."""
    log, head = Log(), HEADS[request.param]
    params, arch = load_teacher(tiny["31b"])
    weights, ids = place(head, jnp.float32)

    @jax.jit
    def step(rows):
        lesson = teach(params, arch, SPEC.layers, ids, (), rows)
        return judge(weights, head.spec, params.top["embed_tokens"], ids, rows, lesson, K)

    def fed(rows: PackedRows) -> list[list[Call]]:
        for r in range(len(rows.tokens)):
            log.requests.append([Turn(-1)])
            step(jax.tree.map(lambda part, r=r: part[r : r + 1], rows))
            jax.effects_barrier()
        return [turn.calls for (turn,) in log.requests[-len(rows.tokens) :]]

    with pytest.MonkeyPatch.context() as patch:
        listen_in_jax(patch, log)
        fed(pack(answers(1), LENGTH))  # compile with the callbacks in place
    return head, fed


def same_entries(turns: list[Turn], first: Call, start: int, text: list[int]) -> None:
    """The draft cache after all cycles, up to where the last draft began: the trainer's step 0."""
    entries, end = {}, turns[-1].anchor + 1
    for turn in turns:
        for call in turn.calls:
            features = [None] * len(call.tokens) if call.features is None else call.features
            for given in zip(call.positions.tolist(), call.tokens, features, strict=True):
                entries[given[0]] = given
    for p in range(end):
        position, token, features = entries[p]
        assert position == first.positions[start + p] - start
        assert token == first.tokens[start + p] == text[p + 1]
        np.testing.assert_allclose(features, first.features[start + p], atol=TOLERANCE, rtol=0)
    assert end >= len(text) - 1 - (K + 1)  # but for what the last cycle brought


def same_steps(turns: list[Turn], steps: list[Call], mask, start: int, text: list[int]) -> int:
    """Each draft's steps, as far as its guesses came true: the unroll's, where mask [K, L] counts
    them. Returns how many there were after the first."""
    compared = 0
    for turn in turns[1:]:
        for n, (ours, theirs) in enumerate(zip(turn.calls, steps, strict=True)):
            i, last = start + turn.anchor, -1 if n else ours.positions.tolist().index(turn.anchor)
            if text[turn.anchor + 1 + n : turn.anchor + 2 + n] != [ours.tokens[last]]:
                break
            assert ours.positions[last] == theirs.positions[i] - start
            assert ours.tokens[last] == theirs.tokens[i] and mask[n, i]
            np.testing.assert_allclose(ours.hidden[last], theirs.hidden[i], atol=TOLERANCE, rtol=0)
            compared += n > 0
    return compared


@pytest.mark.parametrize("drafting", [drafting_in_jax, drafting_in_cuda])
def test_training_feeds_the_head_what_drafting_does(
    tiny, learn, tmp_path, monkeypatch, drafting
) -> None:
    log, (head, fed) = Log(), learn
    if head.spec.norm_output and drafting is drafting_in_cuda:
        pytest.skip("its feedback is normed where it is read: test_eagle3_cuda.py compares results")
    engaged = drafting(tiny["31b"], monkeypatch, log, head)
    made, requests = answered(*engaged, log, head, tmp_path)
    rows = pack(made, LENGTH)
    steps = fed(rows)
    mask, compared, number = np.stack(masks(rows, K)), 0, 0
    for r, documents in enumerate(rows.documents):
        for document in range(documents.max() + 1):
            text, turns = made[number]["input_ids"], requests[number]
            start, prompt = int(np.argmax(documents == document)), PROMPTS[number % len(PROMPTS)]
            same_entries(turns, steps[r][0], start, text)
            compared += same_steps(turns, steps[r], mask[:, r], start, text)
            counted = np.flatnonzero(mask[0, r] & (documents == document)) - start
            anchors = [turn.anchor for turn in turns[1:]]
            assert counted[0] == anchors[0] == len(prompt) - 1
            assert set(anchors) <= set(counted.tolist())
            number += 1
    assert number == len(requests) == len(made) and rows.documents.max() > 0
    assert compared >= 10

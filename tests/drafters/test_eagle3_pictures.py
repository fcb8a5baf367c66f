"""What an EAGLE-3 head reads of a prompt with pictures: at a picture's places its rows, as the
target does; the same entries warm, cold and in a batch, in both targets."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters.eagle3.cuda import drafter as on_cuda, snapshots as cuda_snapshots
from drafters.eagle3.cuda.head import HeadModel
from drafters.eagle3.jax import drafter as on_jax, snapshots as jax_snapshots
from drafters.eagle3.spec import HeadSpec, random_head
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.types import Reuse, Sequence
from targets.backend import snapshots_of
from targets.cuda import cache as kv
from targets.cuda.host_drafter import HostHead as CudaHead
from targets.cuda.load import CudaOptions, load_target as load_cuda
from targets.jax.host_drafter import HostHead as JaxHead
from targets.jax.load import JaxOptions, load_target as load_jax
from targets.vision.spec import read_vision
from tests.support.eagle3_oracle import Oracle
from tests.support.pictures import levels, prompt_of, words, write_seeing

pytestmark = pytest.mark.usefixtures("cheap_programs")

K = 4
CHUNK = 32
UNIT = 128
"""Where a prompt can be resumed, in all of them; JAX keeps pieces of so many tokens."""
FEATURES = (0, 1, 4)
ONE = levels(61, 97)
OTHER = levels(40, 24, seed=1)
DIM = 16
TOLERANCE = 1e-4
BACKENDS = ["jax", "cuda", "cuda's calls"]
CALLS = {"cuda": {"chunk": CHUNK, "short": 8}}
CALLS["cuda's calls"] = {"chunk": UNIT, "first": UNIT, "short": 64}
"""Chunks with a picture are read by the library, or by decoding's kernels."""
PARTS = {
    "inside a chunk": (words(3, 1), OTHER, words(50, 2)),
    "begins a chunk": (words(UNIT - 1, 3), ONE, words(9, 4), OTHER, words(40, 5)),
    "ends the same chunks": (words(UNIT - 1, 3), OTHER, words(1, 6)),
    "across a chunk's end": (words(20, 6), ONE, words(70, 7)),
    "side by side": (ONE, OTHER, words(1, 8)),
}
"""Prompts, by where their pictures lie."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    yield write_seeing(tmp_path_factory.mktemp("seeing") / "31b", "31b")
    target_of.cache_clear()


@cache
def target_of(path: Path, backend: str):
    spec = read_vision(path)
    if backend == "jax":
        return load_jax(path, JaxOptions(3, 512, 7, chunk=CHUNK, features=FEATURES, vision=spec))
    options = CudaOptions(3, 512, 7, **CALLS[backend], device="cpu", features=FEATURES, vision=spec)
    return load_cuda(path, options)


def head_of(target):
    sizes = {"ffw": 32, "heads": 4, "kv_heads": 2, "head_dim": DIM, "max_position": 512}
    vocab = {"vocab": target.vocab, "draft_vocab": target.vocab // 2}
    return random_head(HeadSpec(hidden=target.arch.hidden, layers=FEATURES, **sizes, **vocab))


class Reading:
    """Mixed into a drafter: what the target said of each prompt, and what the head keeps of it."""

    def __init__(self, head):
        super().__init__(head)
        self.features, self.kept = {}, {}

    def prefill(self, seq, start, stop, step):
        super().prefill(seq, start, stop, step)
        before = self.features[seq.request_id] if start else []
        said = np.asarray(step.features)[0, : stop - start].copy()
        self.features[seq.request_id] = [*before, said]
        if stop == seq.prompt_len:
            self.kept[seq.request_id] = self.entries(seq.slot, stop)


class OnJax(Reading, JaxHead):
    def entries(self, slot, stop):
        """Keys and values [stop, 2, K, D]."""
        both = np.stack([np.asarray(part)[slot, :stop] for part in self.head.memory.cache], 1)
        return both.reshape(stop, 2, 2, DIM)


class OnCuda(Reading, CudaHead):
    def entries(self, slot, stop):
        parts = kv.read(self.head.inputs.head.layer.cache, slot, 0, stop)
        return np.stack([part.transpose(0, 1)[..., :DIM].numpy() for part in parts], 1)


def drafter_of(target):
    """With its snapshots."""
    head = head_of(target)
    if target.backend == "jax":
        drafter = OnJax(on_jax.EagleDraftHead(head, target, K))
        return drafter, jax_snapshots.EagleSnapshots(drafter.head, snapshots_of(target).unit)
    drafter = OnCuda(on_cuda.EagleDraftHead(HeadModel(head, target), K))
    return drafter, cuda_snapshots.EagleSnapshots(drafter.head)


def read(target, drafter, *names, kept=None):
    """The prompts together, each with a few tokens behind it."""
    engine, seqs = Engine(target, drafter, host_cycle(target, drafter, K), prefix_cache=kept), []
    for name in names:
        ids, pictures = prompt_of(target.vision, *PARTS[name])
        reuse = None if kept is None else Reuse(partings=tuple(range(len(ids))))
        own = {"request_id": name, "pictures": pictures, "reuse": reuse}
        seqs.append(Sequence(list(ids), max_tokens=4, **own))
    engine.run_to_end(seqs)
    return seqs


def by_the_formulas(target, seq, features):
    """Entries [prompt's length, 2, K, D]: each of the target's state, and of the row that the
    target was fed behind it."""
    top = target.weights.embedding.data if target.backend == "cuda" else None
    table = np.array(target.params.top["embed_tokens"]) if top is None else top.float().numpy()
    fed = np.array(table[[max(token, 0) for token in seq.tokens[: seq.prompt_len + 1]]])
    for placed in seq.pictures:
        soft = target.soft_tokens._encoder.encode(placed.picture)
        fed[placed.start : placed.stop] = np.asarray(soft)
    oracle, made = Oracle(head_of(target)), []
    hidden = oracle.fuse(torch.from_numpy(np.concatenate(features)))
    for position in range(seq.prompt_len):
        oracle.step(made, torch.from_numpy(fed[position + 1]), hidden[position], position)
    return np.stack([np.stack([k.numpy(), v.numpy()]) for _, k, v in made])


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_is_fed_the_rows_of_pictures(folder, backend, name):
    target = target_of(folder, backend)
    drafter, _ = drafter_of(target)
    (seq,) = read(target, drafter, name)
    expected = by_the_formulas(target, seq, drafter.features[name])
    assert np.abs(drafter.kept[name] - expected).max() < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_its_entries_are_the_same_warm_cold_and_in_a_batch(folder, backend):
    """A prompt is resumed where a picture begins, too."""
    target = target_of(folder, backend)
    drafter, snapshots = drafter_of(target)
    alone = [read(target, drafter, name)[0].tokens for name in PARTS]
    cold = dict(drafter.kept)
    assert [seq.tokens for seq in read(target, drafter, *PARTS)] == alone
    batched = dict(drafter.kept)
    owners = snapshots_of(target), snapshots
    kept = PrefixCache(owners[0].unit, owners, SnapshotPool(Budget(1 << 40, 0)), "seed")
    for _ in range(2):
        seqs = [read(target, drafter, name, kept=kept)[0] for name in PARTS]
        assert [seq.tokens for seq in seqs] == alone
    assert any(seq.cached > seq.pictures[0].stop for seq in seqs)
    assert any(seq.cached == seq.pictures[0].start for seq in seqs)
    for name in PARTS:
        assert np.array_equal(batched[name], cold[name]), name
        assert np.array_equal(drafter.kept[name], cold[name]), name

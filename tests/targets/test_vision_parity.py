"""Pictures against transformers: soft tokens of each kind of tower, and what the decoder chooses
from them, on both targets. Every mistake that others made would be seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import Sampling, Sequence
from targets.model_folder import read_arch
from targets.vision.files import VisionFiles
from targets.vision.spec import read_vision
from tests.support.pictures import MISTAKES, VISION, levels, prompt_of, seeing, words

pytestmark = pytest.mark.usefixtures("cheap_programs")

SOFT = 1e-4
RELATIVE = 1e-3
TOKENS = 6
PICTURES = (levels(61, 97), levels(40, 24, seed=1))
BACKENDS = ("jax", "cuda")
WAYS = (*BACKENDS, "cuda's one call")
"""With chunks of 32, CUDA's library reads all pictures; of a long one decoding's kernels."""
EPS = 1e-6
TWICE = ("31b", "12b")
"""Of the same layers as the others: JAX compiles them in the slow suite."""
EACH = [
    pytest.param(v, b, marks=pytest.mark.slow if b == "jax" and v in TWICE else ())
    for b in WAYS
    for v in VISION
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    yield tmp_path_factory.mktemp("seeing")
    seeing.cache_clear()


def target_of(backend, path, chunk):
    spec = read_vision(path)
    if backend == "jax":
        from targets.jax.load import JaxOptions, load_target

        return load_target(path, JaxOptions(slots=1, max_len=256, chunk=chunk, vision=spec))
    from targets.cuda.load import CudaOptions, load_target

    chunk = chunk if backend == "cuda" else 256
    options = CudaOptions(1, 256, chunk=chunk, first=chunk, device="cpu", vision=spec)
    return load_target(path, options)


def prompt(spec):
    """Two pictures in one turn, text around them; chunks of 32 end inside both."""
    return prompt_of(spec, words(5, 1), PICTURES[0], words(3, 2), PICTURES[1], words(9, 3))


def encoder_of(backend, path, spec):
    files = VisionFiles(path, spec, read_arch(path).hidden)
    if backend == "jax":
        from targets.jax import tower

        return tower.PictureEncoder(spec, tower.load_vision(files, spec, np.float32), EPS)
    from targets.cuda import tower as torch_tower

    weights = torch_tower.load_vision(files, spec, torch.float32, "cpu")
    return torch_tower.PictureEncoder(spec, weights, EPS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VISION)
def test_soft_tokens_are_those_of_transformers(folder, variant, backend):
    path, oracle = seeing(folder, variant)
    spec = read_vision(path)
    assert spec is not None
    encoder = encoder_of(backend, path, spec)
    for placed in prompt(spec)[1]:
        ours, theirs = np.asarray(encoder.encode(placed.picture)), oracle.soft_tokens(placed)
        assert np.abs(ours - theirs.numpy()).max() <= SOFT


@pytest.mark.parametrize(("variant", "backend"), EACH)
def test_choices_are_those_of_transformers(folder, variant, backend):
    path, oracle = seeing(folder, variant)
    target = target_of(backend, path, chunk=32)
    ids, pictures = prompt(target.vision)
    seq = Sequence(list(ids), Sampling(logprobs=20), TOKENS, pictures=pictures)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    found = [each for event in engine.run([seq]) for each in event.logprobs or ()]
    expected = oracle.log_probs(seq.tokens[:-1], pictures)[len(ids) - 1 :]
    assert seq.tokens[len(ids) :] == expected.argmax(-1).tolist()
    for each, row in zip(found, expected, strict=True):
        ours, theirs = np.array([p for _, p in each.top]), row[[i for i, _ in each.top]]
        assert np.abs(ours - theirs).max() <= RELATIVE * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("mistake", "variant"), [(m, v) for m, variants in MISTAKES.items() for v in variants]
)
def test_a_mistake_would_be_seen(folder, mistake, variant):
    path, oracle = seeing(folder, variant)
    spec = read_vision(path)
    assert spec is not None
    ids, pictures = prompt(spec)
    right = oracle.log_probs(ids, pictures)[-1]
    wrong = oracle.log_probs(ids, pictures, mistake)[-1]
    best = right.argsort()[-20:]
    assert np.abs((wrong - right)[best]).max() > 3 * RELATIVE * np.abs(right[best]).max()

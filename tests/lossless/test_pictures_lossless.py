"""Prompts with pictures: plain decoding's tokens with any drafter, K, batch and loop, warm or cold,
and after other pictures. What a prompt reuses is its own picture's."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from drafters.assistant.cuda import drafter as assistants
from drafters.assistant.cuda.model import AssistantModel
from drafters.eagle3.cuda import drafter as eagles
from drafters.eagle3.cuda.head import HeadModel
from drafters.eagle3.jax.drafter import EagleDraftHead
from drafters.eagle3.jax.snapshots import EagleSnapshots
from drafters.eagle3.spec import HeadSpec, random_head
from drafters.lookup.host import LookupTwin
from drafters.lookup.jax import TracedLookup
from drafters.model.host import ModelDrafter
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from drafters.suffix.host import SuffixDrafter
from specdec.assembly.engine import warm_pictures
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.errors import UserError
from specdec.core.pictures import chunk_end, place_ids
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.types import NO_GUESS, Reuse, Sequence
from targets.backend import snapshots_of
from targets.cuda import target as cuda_target
from targets.cuda.host_drafter import HostHead as CudaHead
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.host_drafter import HostHead
from targets.jax.load import JaxOptions, load_target
from targets.model_folder import read_arch
from targets.vision.rows import SoftTokens
from targets.vision.spec import read_vision
from tests.support.assistants import assistant_for
from tests.support.fakes import Noise, Oracle
from tests.support.modes import MODES
from tests.support.pictures import levels, prompt_of, words, write_seeing

pytestmark = pytest.mark.usefixtures("cheap_programs")

SLOTS = 3
CHUNK = 32
SHORT = {"chunk": CHUNK, "short": 8}
"""CUDA's library reads all chunks with a picture."""
LONG = {"chunk": 96, "first": 96, "short": 64}
"""Each is one call of decoding's kernels, padded; some begin behind others."""
FEATURES = (0, 1, 4)
TOKENS = 10
ONE = levels(61, 97)
OTHER = levels(40, 24, seed=1)
TURNED = np.ascontiguousarray(ONE.reshape(97, 61, 3))
"""The same bytes, of another shape."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    yield write_seeing(tmp_path_factory.mktemp("seeing") / "31b", "31b")
    target_of.cache_clear()


@cache
def target_of(path: Path, backend: str = "jax"):
    spec = read_vision(path)
    if backend == "jax":
        options = JaxOptions(SLOTS, 512, 7, chunk=CHUNK, features=FEATURES, vision=spec)
        return load_target(path, options)
    from targets.cuda.load import CudaOptions, load_target as load_cuda

    sizes = LONG if backend == "cuda's calls" else SHORT
    options = CudaOptions(SLOTS, 512, 7, **sizes, device="cpu", vision=spec)
    return load_cuda(path, options)


def prompts(spec):
    """One picture; two in a turn with a repeated text; a text alone; the first picture again."""
    copied = words(6, 1)
    return [
        prompt_of(spec, words(20, 2), ONE, words(4, 3)),
        prompt_of(spec, copied, OTHER, copied, ONE, copied),
        prompt_of(spec, words(40, 4)),
        prompt_of(spec, words(3, 5), ONE, words(5, 6), ONE, words(2, 7)),
    ]


def decode(target, drafter, cycle, mode="greedy", picked=None, cache=None):
    """Tokens by the prompt's number."""
    engine = Engine(target, drafter, cycle, prefix_cache=cache)
    seqs = []
    for i, (ids, pictures) in enumerate(prompts(target.vision)):
        if picked is None or i in picked:
            own = MODES[mode](i)
            seqs.append(Sequence(list(ids), own, TOKENS, request_id=str(i), pictures=pictures))
    engine.run_to_end(seqs)
    return {seq.request_id: seq.tokens for seq in seqs}, engine


@cache
def plain_of(path, backend, mode):
    """Each prompt alone, without guesses and after nothing."""
    target, found = target_of(path, backend), {}
    for i in range(4):
        found |= decode(target, NoDrafter(), host_cycle(target, NoDrafter(), 0), mode, {i})[0]
    return found


def spec_of(arch):
    sizes = {"ffw": 32, "heads": 4, "kv_heads": 2, "head_dim": 16}
    vocab = {"vocab": arch.vocab, "draft_vocab": arch.vocab // 2}
    return HeadSpec(hidden=arch.hidden, layers=FEATURES, max_position=512, **sizes, **vocab)


def eagle_of(target):
    return EagleDraftHead(random_head(spec_of(target.arch)), target, 4)


def check(target, plain, mode, drafters):
    for name, (drafter, k) in drafters.items():
        found, engine = decode(target, drafter, host_cycle(target, drafter, k), mode)
        assert found == plain, name
        assert name != "right" or engine.acceptance.rate == 1.0


def test_no_drafter_changes_a_token(folder):
    target, plain = target_of(folder), plain_of(folder, "jax", "greedy")
    drafters = {
        "none": (NoDrafter(), 0),
        "ngram": (NgramDrafter(1, 3), 7),
        "suffix": (SuffixDrafter(1), 5),
        "right": (Oracle(plain, 0, target.vocab), 7),
        "wrong": (Oracle(plain, 1, target.vocab), 1),
        "wild": (Noise(target.vocab, wild=True), 3),
        "eagle3": (HostHead(eagle_of(target)), 4),
    }
    check(target, plain, "greedy", drafters)


def test_the_traced_loop_changes_no_token(folder):
    target, plain = target_of(folder), plain_of(folder, "jax", "greedy")
    traced, twin = TextDrafter(TracedLookup(1, 3)), LookupTwin(1, 3)
    found, device = decode(target, NoDrafter(), device_loop(target, traced, 4))
    again, host = decode(target, twin, host_cycle(target, twin, 4))
    assert found == again == plain
    assert device.acceptance == host.acceptance and host.acceptance.drafted > 0


@pytest.mark.parametrize(
    ("mode", "backend"), [("greedy", "cuda"), ("everything", "cuda"), ("greedy", "cuda's calls")]
)
def test_the_cuda_target_keeps_its_tokens_too(folder, mode, backend):
    target, plain = target_of(folder, backend), plain_of(folder, backend, mode)
    drafters = {
        "suffix": (SuffixDrafter(1), 6),
        "right": (Oracle(plain, 0, target.vocab), 8),
    }
    if (mode, backend) == ("greedy", "cuda"):
        drafters["ngram"] = NgramDrafter(1, 3), 5
        drafters["model"] = ModelDrafter(cuda_with(folder, (), sees=False)), 2
    check(target, plain, mode, drafters)


def test_calls_choose_what_the_library_does(folder, monkeypatch):
    """In float32 they differ by sums' order alone. Of rows that see no others it chooses other
    tokens behind pictures."""
    calls, library = (plain_of(folder, way, "greedy") for way in ("cuda's calls", "cuda"))
    assert calls == library
    target = target_of(folder, "cuda's calls")
    monkeypatch.setattr(cuda_target, "sees_up_to", lambda start, stop, _: [*range(start, stop)])
    causal, _ = decode(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    assert [i for i in causal if causal[i] == calls[i]] == ["2"]


def cuda_with(path, features, sees=True):
    from targets.cuda.load import CudaOptions, load_target as load_cuda

    sizes = {"slots": SLOTS, "max_len": 512, "chunk": CHUNK, "short": 8, "device": "cpu"}
    vision = read_vision(path) if sees else None
    return load_cuda(path, CudaOptions(**sizes, features=features, vision=vision))


def test_heads_beside_the_cuda_target_change_no_token(folder):
    """Assistants read the target's keys and values, of pictures too; EAGLE-3 its states."""
    last = len(read_arch(folder).layers) - 1
    for features in ((last,), FEATURES):
        target = cuda_with(folder, features)
        if features == (last,):
            assistant = assistant_for(folder, "31b")
            head = assistants.AssistantDraftHead(AssistantModel(assistant, target, 1))
        else:
            head = eagles.EagleDraftHead(HeadModel(random_head(spec_of(target.arch)), target), 4)
        drafter = CudaHead(head)
        plain = decode(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))[0]
        found, engine = decode(target, drafter, host_cycle(target, drafter, 4))
        assert found == plain and engine.acceptance.drafted > 0


def cache_of(target, head=None):
    owners = [snapshots_of(target)]
    if head is not None:
        owners.append(EagleSnapshots(head, owners[0].unit))
    return PrefixCache(owners[0].unit, owners, SnapshotPool(Budget(1 << 40, 0)), "seed")


@pytest.mark.parametrize("backend", ["jax", "cuda"])
def test_a_warm_prompt_says_what_a_cold_one_says(folder, backend):
    target, plain = target_of(folder, backend), plain_of(folder, backend, "greedy")
    head = eagle_of(target) if backend == "jax" else None
    drafter = NoDrafter() if head is None else HostHead(head)
    cache = cache_of(target, head)
    for _ in range(2):
        found, _ = decode(target, drafter, host_cycle(target, drafter, 4), cache=cache)
        assert found == plain
    assert cache.hits > 0


def said(target, cache, *parts):
    """A prompt with a few tokens more, of which as much as can be comes from the cache."""
    ids, pictures = prompt_of(target.vision, *parts)
    everywhere = Reuse(partings=tuple(range(len(ids))))
    seq = Sequence(list(ids), max_tokens=4, pictures=pictures, reuse=everywhere)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0), prefix_cache=cache)
    engine.run_to_end([seq])
    return seq


def resumed(target, cache, *parts):
    """Tokens of a prompt that came from the cache."""
    seq = said(target, cache, *parts)
    return seq.cached, seq.pictures


def test_what_follows_a_call_with_a_picture_is_the_same_warm(folder):
    target, before = target_of(folder, "cuda's calls"), (words(20, 2), ONE, words(60, 3))
    cache = cache_of(target)
    for parts in (before, (*before, OTHER, words(3, 4)), (words(20, 2), OTHER, words(60, 3))):
        cold = said(target, None, *parts)
        assert said(target, cache, *parts).tokens == cold.tokens
        warm = said(target, cache, *parts)
        assert warm.cached == LONG["chunk"] and warm.tokens == cold.tokens


def test_what_is_reused_is_of_the_same_picture(folder):
    target = target_of(folder)
    cache, before, after = cache_of(target), words(35, 1), words(40, 2)
    assert resumed(target, cache, before, ONE, after)[0] == 0
    again, pictures = resumed(target, cache, before, ONE, after)
    assert pictures[0].stop < again  # behind the picture
    assert resumed(target, cache, before, OTHER, after)[0] == CHUNK  # the text alone
    assert resumed(target, cache, before, TURNED, after)[0] == CHUNK
    assert resumed(target, cache, words(3, 9), before, ONE, after)[0] == 0
    assert resumed(target, cache, before, ONE, words(40, 3))[0] <= pictures[0].stop + CHUNK


def test_a_hit_after_the_first_of_two_pictures(folder):
    target = target_of(folder)
    cache, gap = cache_of(target), words(70, 1)
    resumed(target, cache, ONE, gap, OTHER, words(9, 2))
    found, (first, second) = resumed(target, cache, ONE, gap, TURNED, words(9, 2))
    assert first.stop < found <= second.start


def test_no_hit_ends_inside_a_picture(folder):
    target, cache = target_of(folder), cache_of(target_of(folder))
    for cut in range(28, 36):
        resumed(target, cache, words(cut, 8), ONE, words(40, 1))
        found, (placed,) = resumed(target, cache, words(cut, 8), ONE, words(50, 1))
        assert not placed.start < found < placed.stop


def test_a_prompt_that_is_begun_anew_says_the_same(folder, monkeypatch):
    """Memory runs out within a prompt: it is read again from a boundary or its start."""
    target, plain = target_of(folder), plain_of(folder, "jax", "greedy")
    cache, left = cache_of(target), [3]
    real = target.prefill_parts

    def short_of_memory(seq, start, stop):
        if start > 0 and left[0] and len(cache.pool):
            left[0] -= 1
            raise MemoryError("no room")
        yield from real(seq, start, stop)

    monkeypatch.setattr(target, "prefill_parts", short_of_memory)
    found, _ = decode(target, NoDrafter(), host_cycle(target, NoDrafter(), 0), cache=cache)
    assert found == plain and left == [0]


def test_soft_tokens_do_not_depend_on_what_was_encoded_before(folder):
    for backend in ("jax", "cuda"):
        encode = target_of(folder, backend).soft_tokens._encoder.encode
        (_, (one, *_)), (_, (other, *_)), *_ = prompts(read_vision(folder))
        first = np.asarray(encode(one.picture))
        encode(other.picture)
        assert (np.asarray(encode(one.picture)) == first).all()


def test_soft_tokens_are_kept_within_a_bound(folder):
    encoder = target_of(folder).soft_tokens._encoder
    (_, (one,)), (_, (other, _)), *_ = prompts(encoder.spec)
    size = encoder.encode(one.picture).nbytes
    kept = SoftTokens(encoder, most=size)

    def encodes(placed, scope):
        reuse = None if scope is None else Reuse(scope)
        return any(part is None for part in kept.parts(placed.picture, reuse))

    assert encodes(one, "a") and not encodes(one, "a")
    assert encodes(one, None) and encodes(one, "b")  # and a's has gone
    assert encodes(other, "b") and encodes(one, "a") and kept.used <= size


def test_calls_never_end_inside_a_picture():
    spec = read_vision_of_budget()
    for before in range(0, 70, 3):
        ids, pictures = prompt_of(spec, words(before + 1, 1), ONE, words(2, 2), OTHER, words(9, 3))
        start, ends = 0, []
        while start < len(ids):
            stop = chunk_end(start, CHUNK, len(ids), pictures)
            assert start < stop <= start + max(CHUNK, spec.budget)
            assert not any(placed.start < stop < placed.stop for placed in pictures)
            ends.append(stop)
            start = stop
        multiples = range(CHUNK, len(ids), CHUNK)
        cut = {n for n in multiples if not any(p.start < n < p.stop for p in pictures)}
        assert cut <= set(ends)  # what is kept of a prompt ends where a call does


@cache
def read_vision_of_budget():
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        spec = read_vision(write_seeing(Path(made) / "12b", "12b"))
    assert spec is not None
    return spec


def test_a_start_reads_a_picture_in_prompts_of_each_length(folder, monkeypatch):
    """As short as can be, and of all lengths that have graphs of their own."""
    target, seen = target_of(folder, "cuda"), []
    monkeypatch.setattr(Engine, "run_to_end", lambda _, seqs: seen.extend(seqs))
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    warm_pictures(engine, target.vision, [16, 64, 128, 256, 512])
    (low,) = {placed.picture.tokens for seq in seen for placed in seq.pictures}
    assert [seq.prompt_len for seq in seen] == [low + 2, 128, 256]
    assert all(len(seq.pictures) == 1 for seq in seen)


def test_places_are_checked(folder):
    spec = read_vision(folder)
    ids, pictures = prompt_of(spec, words(3, 1), ONE)
    with pytest.raises(UserError, match="its own places"):
        Sequence([5] * len(ids), pictures=pictures)
    seq = Sequence(list(ids), pictures=pictures)
    seq.check_ids(read_arch(folder).vocab)
    strange = Sequence([*ids, -5], pictures=pictures)
    with pytest.raises(UserError, match="names token -5"):
        strange.check_ids(read_arch(folder).vocab)
    assert max(place_ids(0, 5)) < NO_GUESS


def test_a_model_without_its_image_side_refuses(folder):
    target = load_target(folder, JaxOptions(1, 256, chunk=CHUNK))
    ids, pictures = prompt_of(read_vision(folder), words(3, 1), ONE)
    engine = Engine(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    with pytest.raises(UserError, match="takes no pictures"):
        engine.run_to_end([Sequence(list(ids), pictures=pictures)])

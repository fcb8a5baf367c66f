"""What the lossless tests share: decoding with each drafter, K and loop, and the adversaries.

Chunks of 8 and windows of 12 make every ring wrap several times, with rejected drafts in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from drafters.assistant.jax.drafter import AssistantDraftHead, PlacedAssistant
from drafters.assistant.spec import Clusters, random_assistant, released_size
from drafters.dflash.jax.drafter import BlockDraftHead, PlacedBlock
from drafters.eagle3 import embedded
from drafters.eagle3.files import load_head
from drafters.eagle3.jax.drafter import EagleDraftHead
from drafters.eagle3.spec import HeadSpec, random_head
from drafters.lookup.jax import TracedLookup
from drafters.model.host import CATCH_UP, ModelDrafter
from drafters.model.jax import DeviceModel
from drafters.ngram.host import N_MAX, N_MIN, NgramDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import NO_GUESS, CycleChoice, Proposal, Sampling, Sequence
from targets import mini
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.host_drafter import HostHead
from targets.jax.load import JaxOptions, load_target
from targets.model_folder import read_arch
from targets.tokenizer import load_tokenizer
from tests.support.block_heads import block_for
from tests.support.fakes import Noise, Oracle
from tests.support.modes import MODES

TOKENS = 24
MAX_LEN = 256
WIDE = 7  # every K up to 7 shares one compiled width


class Told:
    """Adversarial `DeviceDrafter`: guesses a table's tokens at the next positions, whatever the
    text. The table may be replaced, so that one program serves all adversaries."""

    memory: Any = ()

    def __init__(self, slots: int) -> None:
        self.table = np.full((slots, MAX_LEN), NO_GUESS, np.int32)

    def ready(self, seqs) -> CycleChoice:
        return CycleChoice()

    def program(self, needs_sampler: bool) -> _Told:
        return _Told()

    def weights(self) -> np.ndarray:
        return self.table


@dataclass(frozen=True)
class _Told:
    def on(self, table, memory) -> _ToldRows:
        return _ToldRows(table)


class _ToldRows:
    memory: Any = ()

    def __init__(self, table) -> None:
        self.table = table

    def propose(self, seqs, k):
        coming = jnp.minimum(seqs.length[:, None] + jnp.arange(k), MAX_LEN - 1)
        return Proposal(jnp.take_along_axis(self.table, coming, 1))

    def observe(self, seqs, step, accepted) -> None:
        pass


def tables(plain: dict[str, list[int]], slots: int, vocab: int) -> dict[str, np.ndarray]:
    """Each device adversary's table [slots, MAX_LEN]; NO_GUESS after the end of the plain text.
    Slots are given out in order of arrival."""
    text = np.full((slots, MAX_LEN), NO_GUESS, np.int32)
    for i, tokens in plain.items():
        text[int(i), : len(tokens)] = tokens
    mixed = (np.arange(slots)[:, None] * 7919 + np.arange(MAX_LEN) * 104729) % vocab
    return {
        "none": np.full_like(text, NO_GUESS),
        "right": text,
        "wrong": np.where(text == NO_GUESS, NO_GUESS, (text + 1) % vocab),
        "random": mixed.astype(np.int32),
        "wild": np.where(mixed % 2 == 0, -mixed - 5, mixed + 2**30).astype(np.int32),
    }


def options_of(path, slots, features=()) -> JaxOptions:
    """Options; mini's are the commands' defaults, so that fully compiled programs are shared."""
    if path.name == "mini":
        return JaxOptions(slots=slots, k=WIDE, features=features)
    return JaxOptions(slots=slots, max_len=MAX_LEN, k=WIDE, chunk=8, features=features)


@cache
def target_of(path, slots):
    return load_target(path, options_of(path, slots))


@cache
def draft_of(path, slots):
    """mini-e for mini; else the very same weights, so that whole drafts are accepted."""
    small = mini.path("mini-e") if path.name == "mini" else path
    return load_target(small, replace(options_of(path, slots), width=CATCH_UP))


def forget_targets() -> None:
    """Another module compiles in another way."""
    target_of.cache_clear()
    draft_of.cache_clear()


@cache
def prompts_for(vocab, count=5):
    random = np.random.default_rng(3)
    lengths = [3, 40, 17, 1, 26][:count]
    texts = [random.integers(3, vocab, n).tolist() for n in lengths]
    texts[1] = (texts[1][:9] * 5)[:40]  # something for prompt lookup to find
    return texts


TEXTS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\n\nfor name in os.listdir(",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1, 2, 3]\n",
    "def",
    'def fibonacci(n):\n    """The first n numbers of Fibonacci."""\n    numbers = [0, 1]\n',
)
"""Prompts for mini, which is trained on Python: on random ids its draft model is hardly ever
right."""


@cache
def prompts_of(path):
    if path.name != "mini":
        return prompts_for(read_arch(path).vocab)
    encode = load_tokenizer(path).encode
    return [encode(text) for text in TEXTS]


def decode(target, drafter, cycle, mode, tokens=TOKENS, prompts=None):
    engine = Engine(target, drafter, cycle)
    seqs = [
        Sequence(list(p), MODES[mode](i), max_tokens=tokens, request_id=str(i))
        for i, p in enumerate(prompts or prompts_for(target.vocab))
    ]
    for _ in engine.run(seqs):
        pass
    return {s.request_id: s.tokens for s in seqs}, engine.acceptance


TOLD = "right", "wrong", "random", "wild"
ADVERSARIES = "model", "ngram", *TOLD


def host_drafter(name, plain, vocab, draft):
    """draft: makes the draft model's target."""
    made = {
        "model": lambda: ModelDrafter(draft()),
        "none": NoDrafter,
        "ngram": lambda: NgramDrafter(1, 3),
        "right": lambda: Oracle(plain, 0, vocab),
        "wrong": lambda: Oracle(plain, 1, vocab),
        "random": lambda: Noise(vocab),
        "wild": lambda: Noise(vocab, wild=True),
    }
    return made[name]()


def check_host(
    path,
    mode,
    slots,
    ks,
    tokens=TOKENS,
    target_of=target_of,
    draft_of=draft_of,
    adversaries=ADVERSARIES,
):
    """Host loop: no adversary changes a token, with any K. At the first K without a drafter too."""
    reference, run = target_of(path, 1), partial(decode, prompts=prompts_of(path))
    plain, _ = run(reference, NoDrafter(), host_cycle(reference, NoDrafter(), 0), mode, tokens)
    target = target_of(path, slots)
    draft = partial(draft_of, path, slots)
    for name, k in [("none", ks[0]), *((name, k) for name in adversaries for k in ks if k)]:
        drafter = host_drafter(name, plain, target.vocab, draft)
        cycle = host_cycle(target, drafter, k)
        output, acceptance = run(target, drafter, cycle, mode, tokens)
        assert output == plain, (path.name, mode, slots, name, k)
        assert name != "right" or acceptance.rate == 1.0
        assert name != "model" or _rate(acceptance, path, mode) > 0.2
        assert name not in ("wrong", "wild") or acceptance.accepted == 0
    return plain


def _rate(acceptance, path, mode):
    """The acceptance rate of a draft model; in the mode "everything" that of first guesses only, as
    mini and mini-e seldom agree on several tokens at temperature 1 with penalties."""
    if path.name == "mini" and mode == "everything":
        return acceptance.accepted_at[0] / acceptance.drafted_at[0]
    return acceptance.rate


def check_device(path, mode, slots, ks, tokens=TOKENS, adversaries=("none", *TOLD)):
    target = target_of(path, slots)
    first = prompts_of(path)[:slots]
    lengths = (N_MIN, N_MAX) if path.name == "mini" else (1, 3)
    run = partial(decode, mode=mode, tokens=tokens, prompts=first)
    plain, _ = run(target, NoDrafter(), host_cycle(target, NoDrafter(), 0))
    for k in ks:
        scripted = Told(slots)
        cycle = device_loop(target, scripted, k)
        made = tables(plain, slots, target.vocab)
        for name in adversaries:
            scripted.table = made[name]
            output, acceptance = run(target, NoDrafter(), cycle)
            assert output == plain, (path.name, mode, slots, name, k)
            assert name != "right" or acceptance.rate == 1.0 or k == 0
            assert name not in ("wrong", "wild") or acceptance.accepted == 0
        traced, host = TextDrafter(TracedLookup(*lengths)), NgramDrafter(*lengths)
        output, acceptance = run(target, NoDrafter(), device_loop(target, traced, k))
        again, host_acceptance = run(target, host, host_cycle(target, host, k))
        assert output == again == plain, (path.name, mode, slots, "ngram", k)
        assert acceptance == host_acceptance


def check_device_model(path, mode, slots, ks, tokens=TOKENS, draft_of=draft_of):
    """Device loop and host loop with a draft model: equal texts and equal acceptance."""
    target, first = target_of(path, slots), prompts_of(path)[:slots]
    run = partial(decode, target, mode=mode, tokens=tokens, prompts=first)
    plain, _ = run(NoDrafter(), host_cycle(target, NoDrafter(), 0))
    for k in ks:
        drafter = ModelDrafter(draft_of(path, slots))
        output, acceptance = run(drafter, device_loop(target, DeviceModel(drafter), k))
        again, host_acceptance = run(drafter, host_cycle(target, drafter, k))
        assert output == again == plain, (path.name, mode, slots, k)
        assert acceptance == host_acceptance


def check_guesses_end(target, drafter, k, end, lengths, context):
    """It guesses at each place before `end` and at none from there on; texts of these prompts'
    lengths go on to the target's `context`."""
    propose, seen = drafter.propose, []

    def watched(seqs, k):
        draft = propose(seqs, k)
        for seq, row in zip(seqs, draft.tokens.tolist(), strict=True):
            seen.extend((len(seq.tokens) + j, guess) for j, guess in enumerate(row))
        return draft

    seqs = [Sequence([5] * n, max_tokens=99) for n in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", watched)
        Engine(target, drafter, host_cycle(target, drafter, k)).run_to_end(seqs)
    assert all(len(seq.tokens) == context for seq in seqs)
    assert {guess == NO_GUESS for place, guess in seen if place < end} == {False}
    assert {guess == NO_GUESS for place, guess in seen if place >= end} == {True}


def check_both_loops(target, drafter, k):
    """JAX: both loops give plain decoding's text, with the same guesses, as the drafter's state is
    the same. Returns the accepted tokens by mode."""
    found = []
    host, device = host_cycle(target, drafter, k), device_loop(target, drafter.head, k, 4)
    for mode in ("greedy", "everything"):
        plain, _ = decode(target, NoDrafter(), host_cycle(target, NoDrafter(), 0), mode)
        text, acceptance = decode(target, drafter, host, mode)
        again, device_acceptance = decode(target, drafter, device, mode)
        assert text == again == plain, mode
        assert acceptance == device_acceptance and acceptance.drafted > 0
        found.append(acceptance.accepted)
    return found


def check_nothing_is_drafted(target, drafter, k):
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        engine = Engine(target, drafter, host_cycle(target, drafter, k))
        engine.run_to_end([Sequence([5, 6], sampling, max_tokens=6)])
        assert engine.acceptance.drafted == 0


def decode_three(target, drafter, k, tokens=14):
    """Three prompts, of which one is longer and one sampled."""
    samplings = Sampling(), Sampling(0.8, seed=5), Sampling()
    prompts = [5, 9, 3], [7] * 17, [11, 12]
    seqs = [Sequence(list(p), s, tokens) for p, s in zip(prompts, samplings, strict=True)]
    Engine(target, drafter, host_cycle(target, drafter, k)).run_to_end(seqs)


def head_for(path, max_position=MAX_LEN):
    """mini's own; a random one for any other target."""
    arch = read_arch(path)
    if path.name == "mini":
        return load_head(embedded.path("mini-eagle3"), arch)
    spec = HeadSpec(
        hidden=arch.hidden,
        ffw=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=arch.vocab,
        draft_vocab=arch.vocab // 2,
        layers=(0, 1, len(arch.layers) - 2),
        max_position=max_position,
    )
    return random_head(spec)


def check_assistant(path, mode, slots, ks, tokens=TOKENS):
    """Random assistants with each kind of head: both loops give the same text and the same
    guesses."""
    first, arch = prompts_of(path)[:slots], read_arch(path)
    options = options_of(path, slots, (len(arch.layers) - 1,))
    target, spec = load_target(path, options), released_size(arch)
    layers = tuple(replace(layer, ffw=64) for layer in spec.arch.layers)
    small = replace(spec.arch, hidden=32, layers=layers)
    run = partial(decode, target, mode=mode, tokens=tokens, prompts=first)
    plain, _ = run(NoDrafter(), host_cycle(target, NoDrafter(), 0))
    for clusters in (None, Clusters(16, 4)):
        made = random_assistant(replace(spec, arch=small, clusters=clusters))
        placed = PlacedAssistant(made, target, 1, False, False)
        for k in ks:
            drafter = HostHead(AssistantDraftHead(placed))
            output, acceptance = run(drafter, host_cycle(target, drafter, k))
            again, device_acceptance = run(drafter, device_loop(target, drafter.head, k))
            assert output == again == plain, (path.name, mode, slots, k)
            assert acceptance == device_acceptance


def check_block(path, mode, slots, ks, tokens=TOKENS):
    """Block drafters of three kinds: both loops give the same text and the same guesses."""
    arch, first = read_arch(path), prompts_of(path)[:slots]
    taps = 0, 1, len(arch.layers) - 2
    target = load_target(path, options_of(path, slots, taps))
    run = partial(decode, target, mode=mode, tokens=tokens, prompts=first)
    plain, _ = run(NoDrafter(), host_cycle(target, NoDrafter(), 0))
    for form in ("dspark", "dflash2", "zlab"):
        placed = PlacedBlock(block_for(arch, taps, form), target)
        for k in ks:
            drafter = HostHead(BlockDraftHead(placed))
            output, acceptance = run(drafter, host_cycle(target, drafter, k))
            again, device_acceptance = run(drafter, device_loop(target, drafter.head, k))
            assert output == again == plain, (path.name, mode, slots, form, k)
            assert acceptance == device_acceptance


def check_eagle3(path, mode, slots, ks, tokens=TOKENS, max_position=MAX_LEN):
    """A target compiled with feature layers gives the same text in both loops, drafted or not."""
    head, first = head_for(path, max_position), prompts_of(path)[:slots]
    target = load_target(path, options_of(path, slots, head.spec.layers))
    run = partial(decode, target, mode=mode, tokens=tokens, prompts=first)
    plain, _ = run(NoDrafter(), host_cycle(target, NoDrafter(), 0))
    for k in ks:
        drafter = HostHead(EagleDraftHead(head, target, k))
        output, acceptance = run(drafter, host_cycle(target, drafter, k))
        again, device_acceptance = run(drafter, device_loop(target, drafter.head, k))
        assert output == again == plain, (path.name, mode, slots, k)
        assert acceptance == device_acceptance
        assert path.name != "mini" or acceptance.rate > 0.2

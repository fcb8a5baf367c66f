"""What the lossless tests share: decoding with each drafter, K and loop, and the adversaries.

Chunks of 8 and windows of 12 make every ring wrap several times, with rejected drafts in it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax.numpy as jnp
import numpy as np

from drafters.eagle3 import embedded
from drafters.eagle3.files import load_head
from drafters.eagle3.jax.drafter import EagleDrafter
from drafters.eagle3.spec import HeadSpec, random_head
from drafters.model.host import CATCH_UP, ModelDrafter
from drafters.model.jax import DeviceModel
from drafters.ngram.host import NgramDrafter
from drafters.ngram.jax import TracedNgram
from drafters.none.host import NoDrafter
from drafters.none.jax import TracedNone
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.types import NO_GUESS, Sequence
from targets import mini
from targets.arch import read_arch
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.load import JaxOptions, load_target
from tests.fakes import Noise, Oracle
from tests.modes import MODES

TOKENS = 60
WIDE = 7  # every K up to 7 shares one compiled width


class TracedNoise:
    """Adversary on the device: a hash of the position, in the vocabulary or far outside it."""

    def __init__(self, vocab: int, wild: bool) -> None:
        self.vocab, self.wild = vocab, wild

    def propose(self, history, length, k):
        mixed = (length[:, None] * 7919 + jnp.arange(k) * 104729) % self.vocab
        return jnp.where(mixed % 2 == 0, -mixed - 5, mixed + 2**30) if self.wild else mixed


class TracedOracle:
    """Adversary on the device: the plain run's own tokens, right or all shifted by one."""

    def __init__(self, plain: np.ndarray, shift: int, vocab: int) -> None:
        self.plain, self.shift, self.vocab = jnp.asarray(plain), shift, vocab

    def propose(self, history, length, k):
        coming = length[:, None] + jnp.arange(k)
        row = jnp.arange(history.shape[0])[:, None]
        inside = coming < self.plain.shape[1]
        token = self.plain[row, jnp.minimum(coming, self.plain.shape[1] - 1)]
        return jnp.where(inside, (token + self.shift) % self.vocab, NO_GUESS)


@cache
def target_of(path, slots):
    chunk = 128 if path.name == "mini" else 8
    return load_target(path, JaxOptions(slots=slots, max_len=256, k=WIDE, chunk=chunk))


@cache
def draft_of(path, slots):
    """mini-e for mini; else the very same weights, so that whole drafts are accepted."""
    small = mini.path("mini-e") if path.name == "mini" else path
    return load_target(small, JaxOptions(slots=slots, max_len=256, width=CATCH_UP, chunk=8))


@cache
def prompts_for(vocab, count=5):
    random = np.random.default_rng(3)
    lengths = [3, 40, 17, 1, 26][:count]
    texts = [random.integers(3, vocab, n).tolist() for n in lengths]
    texts[1] = (texts[1][:9] * 5)[:40]  # something for prompt lookup to find
    return texts


def decode(target, drafter, cycle, mode, tokens=TOKENS, prompts=None):
    engine = Engine(target, drafter, cycle)
    seqs = [
        Sequence(list(p), MODES[mode](i), max_tokens=tokens, request_id=str(i))
        for i, p in enumerate(prompts or prompts_for(target.vocab))
    ]
    for _ in engine.run(seqs):
        pass
    return {s.request_id: s.tokens for s in seqs}, engine.acceptance


def host_drafters(plain, vocab, draft):
    return {
        "model": ModelDrafter(draft),
        "none": NoDrafter(),
        "ngram": NgramDrafter(1, 3),
        "right": Oracle(plain, 0, vocab),
        "wrong": Oracle(plain, 1, vocab),
        "random": Noise(vocab),
        "wild": Noise(vocab, wild=True),
    }


def check_host(path, mode, slots, ks, tokens=TOKENS, target_of=target_of, draft_of=draft_of):
    reference = target_of(path, 1)
    plain, _ = decode(reference, NoDrafter(), host_cycle(reference, NoDrafter(), 0), mode, tokens)
    target = target_of(path, slots)
    draft = draft_of(path, slots)
    for name, drafter in host_drafters(plain, target.vocab, draft).items():
        for k in ks:
            output, acceptance = decode(
                target, drafter, host_cycle(target, drafter, k), mode, tokens
            )
            assert output == plain, (path.name, mode, slots, name, k)
            assert name != "right" or acceptance.rate == 1.0 or k == 0
            assert name != "model" or acceptance.rate > 0.2 or k == 0
            assert name not in ("wrong", "wild") or acceptance.accepted == 0
    return plain


def check_device(path, mode, slots, ks, tokens=TOKENS):
    reference, target = target_of(path, 1), target_of(path, slots)
    first = prompts_for(target.vocab)[:slots]
    run = partial(decode, mode=mode, tokens=tokens, prompts=first)
    plain, _ = run(reference, NoDrafter(), host_cycle(reference, NoDrafter(), 0))
    table = np.zeros((slots, 256), np.int32)
    for i, text in plain.items():
        table[int(i), : len(text)] = text  # slots are handed out in order of arrival
    drafters = {
        "none": TracedNone(),
        "ngram": TracedNgram(1, 3),
        "right": TracedOracle(table, 0, target.vocab),
        "wrong": TracedOracle(table, 1, target.vocab),
        "random": TracedNoise(target.vocab, False),
        "wild": TracedNoise(target.vocab, True),
    }
    for name, drafter in drafters.items():
        for k in ks:
            output, acceptance = run(
                target, NoDrafter(), device_loop(target, TextDrafter(drafter), k, 4)
            )
            assert output == plain, (path.name, mode, slots, name, k)
            assert name not in ("wrong", "wild") or acceptance.accepted == 0
            if name == "ngram":
                host = NgramDrafter(1, 3)
                again, host_acceptance = run(target, host, host_cycle(target, host, k))
                assert again == plain and acceptance == host_acceptance


def check_device_model(path, mode, slots, ks, tokens=TOKENS, draft_of=draft_of):
    """The traced draft model says what the host's says."""
    target, first = target_of(path, slots), prompts_for(target_of(path, slots).vocab)[:slots]
    run = partial(decode, target, mode=mode, tokens=tokens, prompts=first)
    plain, _ = run(NoDrafter(), host_cycle(target, NoDrafter(), 0))
    for k in ks:
        drafter = ModelDrafter(draft_of(path, slots))
        output, acceptance = run(drafter, device_loop(target, DeviceModel(drafter), k, 4))
        again, host_acceptance = run(drafter, host_cycle(target, drafter, k))
        assert output == again == plain, (path.name, mode, slots, k)
        assert acceptance == host_acceptance


def head_for(path, max_position=256):
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


def check_eagle3(path, mode, slots, ks, tokens=TOKENS, max_position=256):
    """A target compiled for a head says the same in both loops, drafted or not."""
    head, first = head_for(path, max_position), prompts_for(read_arch(path).vocab)[:slots]
    options = JaxOptions(
        slots=slots, max_len=256, k=WIDE, chunk=target_of(path, slots).prefill_chunk
    )
    target = load_target(path, replace(options, features=head.spec.layers))
    run = partial(decode, target, mode=mode, tokens=tokens, prompts=first)
    plain, _ = run(NoDrafter(), host_cycle(target, NoDrafter(), 0))
    for k in ks:
        drafter = EagleDrafter(head, target, k)
        output, acceptance = run(drafter, host_cycle(target, drafter, k))
        again, device_acceptance = run(drafter, device_loop(target, drafter, k, 4))
        assert output == again == plain, (path.name, mode, slots, k)
        assert acceptance == device_acceptance
        assert path.name != "mini" or acceptance.rate > 0.2

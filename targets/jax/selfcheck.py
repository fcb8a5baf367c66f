"""The one-width self-check: is a row's result bitwise the same in every slot, beside any rows?

XLA owns the kernels, so exactness is proved for each compiled program on the device at hand.
"""

from __future__ import annotations

import numpy as np

from specdec.core.types import NO_GUESS, Check, Sampling, Sequence
from targets.jax.programs import Feed
from targets.jax.target import JaxTarget


def self_check(target: JaxTarget, seed: int = 0) -> list[Check]:
    """Run the bucket's verify program on random tokens. Overwrites the cache: call it while no
    sequence runs."""
    plan = target.plan
    random = np.random.default_rng(seed)
    texts = random.integers(0, target.vocab, (plan.slots, 3 * plan.width)).astype(np.int32)
    rounds = max(1, min(3, (plan.max_len - 1) // plan.width))
    slots = range(plan.slots)
    alone = _whole(target, texts, [0], rounds)[0]
    singly = _singly(target, texts[0], min(rounds * plan.width, plan.max_len - 1))
    checks = [_compare("a token fed alone or behind others", singly, alone[: len(singly)])]
    if plan.slots > 1:
        together = _whole(target, texts, slots, rounds)
        checks.append(_compare("a row alone or beside full slots", together[0], alone))
        moved = np.roll(texts, 1, 0)
        shifted = _whole(target, moved, slots, rounds)
        checks.append(_compare("a row in another slot", shifted[1], together[0]))
        last = _whole(target, np.roll(texts, -1, 0), [plan.slots - 1], rounds)
        checks.append(_compare("a row alone in the last slot", last[plan.slots - 1], alone))
        checks.append(_sampled(target, together[:, : plan.width]))
    return checks


def _sampled(target: JaxTarget, logits: np.ndarray) -> Check:
    """The full sampler on slot 0's logits, beside other rows and beside none."""
    for slot in range(target.slots):
        shape = Sampling(temperature=1.0, top_p=0.9, min_p=0.01, top_k=50, seed=slot)
        target.seat(Sequence([1], shape, slot=slot))
    counts = np.full(target.slots, target.plan.width, np.int32)
    feed = Feed(np.zeros(logits.shape[:2], np.int32), np.zeros_like(counts), counts)
    beside = target.choices(logits, feed)[0]
    only = np.zeros_like(logits)
    only[0] = logits[0]
    alone = target.choices(only, feed._replace(count=counts * (np.arange(len(counts)) == 0)))[0]
    return _compare("a sampled choice alone or beside others", beside, alone)


def _compare(question: str, ours: np.ndarray, theirs: np.ndarray) -> Check:
    return Check(question, int((ours != theirs).sum()), ours.size)


def _whole(target: JaxTarget, texts: np.ndarray, live, rounds: int) -> np.ndarray:
    """Logits [slots, rounds * T, V] of the live slots' texts, a full width per call."""
    plan, pieces = target.plan, []
    for r in range(rounds):
        part = texts[:, r * plan.width : (r + 1) * plan.width]
        pieces.append(_logits(target, part, r * plan.width, live))
    return np.concatenate(pieces, 1)


def _singly(target: JaxTarget, text: np.ndarray, count: int) -> np.ndarray:
    """Logits [count, V] of slot 0's text, one token per call as in plain decoding."""
    plan, pieces = target.plan, []
    for position in range(count):
        part = np.full((plan.slots, plan.width), NO_GUESS, np.int32)
        part[0, 0] = text[position]
        pieces.append(_logits(target, part, position, [0])[0, :1])
    return np.concatenate(pieces)


def _logits(target: JaxTarget, tokens: np.ndarray, start: int, live) -> np.ndarray:
    count = np.zeros(target.slots, np.int32)
    count[list(live)] = target.plan.width
    return target.logits(Feed(tokens, np.full(target.slots, start, np.int32), count))

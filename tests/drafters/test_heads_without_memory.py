"""A GPU without memory for what a draft head does: the request that needed it fails, or keeping its
prompt is skipped, and all others go on. On the CUDA target's references."""

from __future__ import annotations

import pytest
import torch

from drafters.dflash.cuda.drafter import BlockDraftHead
from drafters.dflash.cuda.model import BlockModel
from drafters.dflash.cuda.snapshots import BlockSnapshots
from drafters.eagle3.cuda.drafter import EagleDraftHead
from drafters.eagle3.cuda.head import HeadModel
from drafters.eagle3.cuda.snapshots import EagleSnapshots
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.prefix_cache.cache import PrefixCache
from specdec.core.prefix_cache.pool import Budget, SnapshotPool
from specdec.core.types import Reuse, Sampling, Sequence
from targets.cuda import cache as kv
from targets.cuda.host_drafter import HostHead
from targets.cuda.snapshots import SlotSnapshots
from tests.support.block_heads import SPECS, random_block
from tests.support.eagle3_heads import cuda_target_of, random_head

pytestmark = pytest.mark.usefixtures("cheap_programs")

K = 3
LONG = [7 + i % 40 for i in range(40)]
"""Two chunks that are kept, and a rest."""


def no_memory(*given, **named):
    raise torch.cuda.OutOfMemoryError("CUDA out of memory")


def eagle_of(target):
    return EagleDraftHead(HeadModel(random_head(), target), K)


def block_of(target):
    return BlockDraftHead(BlockModel(random_block(SPECS["dflash"]), target))


HEADS = {"eagle3": (eagle_of, EagleSnapshots), "dflash": (block_of, BlockSnapshots)}


@pytest.fixture(params=HEADS)
def head(request, tiny):
    return HEADS[request.param][0](cuda_target_of(tiny["31b"]))


@pytest.fixture
def kept(head):
    """What a head's snapshots keep, with a prefix cache that has the target's too."""
    own = HEADS["eagle3" if isinstance(head, EagleDraftHead) else "dflash"][1](head)
    slots = SlotSnapshots(head.target)
    return own, PrefixCache(slots.unit, [slots, own], SnapshotPool(Budget(1 << 30, 0)))


def engine_of(head, prefix_cache=None):
    drafter = HostHead(head)
    return Engine(head.target, drafter, host_cycle(head.target, drafter, K), 8, prefix_cache)


def test_a_prompt_that_the_head_has_no_memory_for_fails_alone(head, monkeypatch):
    honest = head.prefill

    def prefill(seq, *given):
        no_memory() if 13 in seq.tokens else honest(seq, *given)

    monkeypatch.setattr(head, "prefill", prefill)
    large, small = Sequence([5, 13, 6], max_tokens=4), Sequence([5, 6], max_tokens=4)
    errors = [event.error for event in engine_of(head).run([large, small]) if event.error]
    assert len(errors) == 1 and "no room for the draft head" in errors[0]
    assert (large.finish, small.finish, small.emitted) == ("error", "length", 4)


@pytest.mark.parametrize("part", ["propose", "keep"])
def test_a_cycle_that_the_head_has_no_memory_for_fails_who_joined_last(head, monkeypatch, part):
    honest = {"propose": head.propose, "keep": head.keep}[part]

    def for_one(rows, *given):
        no_memory() if len(rows.slot) > 1 else honest(rows, *given)

    monkeypatch.setattr(head, part, for_one)
    first, last = Sequence([5, 6], max_tokens=6), Sequence([7], max_tokens=6)
    errors = [event.error for event in engine_of(head).run([first, last]) if event.error]
    assert len(errors) == 1 and "no room for the draft head" in errors[0]
    assert (first.finish, last.finish) == ("length", "error")


def test_guesses_that_can_not_be_read_fail_who_joined_last(head, monkeypatch):
    engine = engine_of(head)
    monkeypatch.setattr("targets.cuda.host_drafter.Proposal", no_memory)
    seq = Sequence([5, 6], max_tokens=6)
    assert [event.error for event in engine.run([seq]) if event.error]


def test_a_prompt_is_not_kept_where_the_head_has_no_memory_to_copy_it(head, kept, monkeypatch):
    own, cache = kept
    monkeypatch.setattr(kv, "read", no_memory)
    seq = Sequence(list(LONG), max_tokens=2, reuse=Reuse())
    engine_of(head, cache).run_to_end([seq])
    assert seq.finish == "length"


def test_a_kept_prompt_that_the_head_has_no_memory_for_is_read_again(head, kept, monkeypatch):
    """The cache gives way until nothing is kept of it."""
    own, cache = kept
    engine, honest, failed = engine_of(head, cache), own.restore, []
    texts = [Sequence(list(LONG), max_tokens=4, reuse=Reuse()) for _ in range(2)]
    engine.run_to_end(texts[:1])

    def restore(*given):
        failed.append(given)
        with monkeypatch.context() as short:
            short.setattr(kv, "write", no_memory)
            honest(*given)

    monkeypatch.setattr(own, "restore", restore)
    engine.run_to_end(texts[1:])
    assert failed and texts[0].tokens == texts[1].tokens


def test_the_targets_part_of_a_request(head, kept, monkeypatch):
    """The bias of a request, and the choice of its first token: with memory for the chunk alone."""
    biased = Sequence([5, 6], Sampling(logit_bias=((7, 1.0),)), max_tokens=4)
    plain = Sequence([5, 6], max_tokens=4)
    honest = head.target.seat

    def seat(seq):
        no_memory() if seq is biased else honest(seq)

    monkeypatch.setattr(head.target, "seat", seat)
    errors = [event.error for event in engine_of(head).run([biased, plain]) if event.error]
    assert len(errors) == 1 and plain.finish == "length"


def test_a_first_token_that_there_is_no_memory_to_choose(head, monkeypatch):
    honest, target = head.target._first_choices, head.target

    def choices(seqs, *given):
        return no_memory() if 13 in seqs[0].tokens else honest(seqs, *given)

    monkeypatch.setattr(target, "_first_choices", choices)
    large, small = Sequence([5, 13, 6], max_tokens=4), Sequence([5, 6], max_tokens=4)
    errors = [event.error for event in engine_of(head).run([large, small]) if event.error]
    assert len(errors) == 1 and small.finish == "length"

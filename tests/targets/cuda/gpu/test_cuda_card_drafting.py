"""On the card: draft models and EAGLE-3 heads change no token in either loop, and their caches hold
the committed text bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drafters.auto.cuda import DeviceAuto
from drafters.auto.host import AutoDrafter, Weighted
from drafters.auto.late import LateChooser
from drafters.eagle3.cuda.drafter import EagleDraftHead
from drafters.eagle3.cuda.head import HeadModel
from drafters.eagle3.spec import random_head
from drafters.lookup.cuda import DeviceLookup
from drafters.lookup.host import LookupTwin
from drafters.model.cuda import DeviceModel
from drafters.model.host import ModelDrafter
from drafters.none.host import NoDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.policy.choice import Menu
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.types import NO_GUESS, Sampling, Sequence
from targets.cuda.device_drafter import CapturedBatch
from targets.cuda.device_loop import device_loop
from targets.cuda.host_drafter import DeviceHead, HostHead
from targets.cuda.ops import Rows
from targets.cuda.plan import FINE
from tests.support.modes import MODES
from tests.support.policies import RandomCosts, Whim
from tests.targets.cuda.gpu.card_targets import SPEC, target_of

pytestmark = pytest.mark.gpu

FLAGS = (
    {},
    {"norm_before_residual": True, "norm_output": True},
    {"fc_norm": True},
    {"norm_before_fc": True, "window": 70},
)
TOKENS = 24
LENGTHS = (3, 40, 170, 1, 26, 64, 129, 400, 9, 17)
KINDS = [("fp8", "fp8"), ("bfloat16", "bfloat16")]


def drafter_of(name, target, k, greedy=False, draft_len=None, **flags):
    """The host's drafter, and the device's. draft_len: the draft's own context; the target's."""
    flags |= {"max_position": draft_len} if draft_len else {}
    if name == "eagle3":
        head = random_head(replace(SPEC, **flags))
        host = HostHead(EagleDraftHead(HeadModel(head, target), k, greedy))
        return host, DeviceHead(host)
    kind = target.dtype, target.kv_dtype
    model = target_of(kind, target.slots, True, (), draft_len or target.max_len, "mini-e")
    host = ModelDrafter(model, greedy)
    return host, DeviceModel(host, target)


@cache
def prompts_for(lengths):
    random = np.random.default_rng(3)
    return [random.integers(3, SPEC.vocab, n).tolist() for n in lengths]


def decode(target, drafter, cycle, mode, tokens=TOKENS, lengths=LENGTHS, predicted=None):
    """predicted: texts, of which every other request is given its own or another's."""
    engine = Engine(target, drafter, cycle)
    seqs = [
        Sequence(list(p), MODES[mode](i), max_tokens=tokens)
        for i, p in enumerate(prompts_for(lengths))
    ]
    for i in range(0, len(seqs) if predicted else 0, 2):
        text = PredictedText(predicted[i - i % 4][lengths[i] :])
        seqs[i].prediction = Prediction(text, seqs[i].prompt_len)
    engine.run_to_end(seqs)
    assert all(seq.finish == "length" for seq in seqs)
    return [seq.tokens for seq in seqs], engine.acceptance


@cache
def plain(kind, mode):
    """One slot, no features, launched kernel by kernel."""
    lone = target_of(kind, 1, False, ())
    return decode(lone, NoDrafter(), host_cycle(lone, NoDrafter(), 0), mode)[0]


@pytest.mark.parametrize("name", ["model", "eagle3"])
@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_every_token_is_plain_decodings(kind, slots, name):
    target = target_of(kind, slots)
    modes = MODES if kind == KINDS[0] else ("nucleus",)
    for k in (1, 4, 7):
        host, resident = drafter_of(name, target, k)
        device = device_loop(target, resident, k)
        for mode in modes:
            text, drafted = decode(target, host, device, mode)
            assert text == plain(kind, mode), (k, mode, "captured")
            assert drafted.drafted > 0
            if k != 4:
                continue
            text, again = decode(target, host, host_cycle(target, host, k), mode)
            assert text == plain(kind, mode), (k, mode, "host loop")
            assert drafted == again, (k, mode)  # the same guesses: the caches agree
            assert name == "eagle3" or drafted.accepted > 0


@pytest.mark.parametrize("k", [1, 7, 19])
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", ["model", "eagle3"])
def test_a_draft_context_shorter_than_the_targets(name, slots, k):
    """Drafting ends where the draft's own context does, the text goes on to its limit."""
    kind, lengths, tokens = KINDS[0], (3, 180, 199, 200, 201, 300, 20), 90
    target = target_of(kind, slots, max_len=400)
    run = partial(decode, target, mode="nucleus", tokens=tokens, lengths=lengths)
    expected, _ = run(NoDrafter(), host_cycle(target, NoDrafter(), 0))
    host, resident = drafter_of(name, target, k, draft_len=200)
    captured, drafted = run(host, device_loop(target, resident, k))
    text, again = run(host, host_cycle(target, host, k))
    assert captured == text == expected
    assert drafted == again and drafted.drafted > 0


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_every_kind_of_head_guesses_the_same_in_both_loops(flags):
    target = target_of(KINDS[0], 3)
    host, resident = drafter_of("eagle3", target, 4, **flags)
    runs = [
        decode(target, host, cycle, "everything")
        for cycle in (device_loop(target, resident, 4), host_cycle(target, host, 4))
    ]
    assert runs[0] == runs[1] and runs[0][0] == plain(KINDS[0], "everything")


@pytest.mark.parametrize("loop", ["host", "device"])
@pytest.mark.parametrize("name", ["model", "eagle3"])
def test_draft_kv_is_that_of_a_fresh_prefill(name, loop):
    """Of the committed text, bit for bit: up to FINE tokens are read as they are decoded."""
    target = target_of(KINDS[0], 3)
    host, resident = drafter_of(name, target, 4)
    fresh, _ = drafter_of(name, target_of(KINDS[0], 1), 4)
    cycle = host_cycle(target, host, 4) if loop == "host" else device_loop(target, resident, 4)
    engine, turns, compared = Engine(target, host, cycle), 0, 0
    for i, prompt in enumerate(prompts_for((9, 40, 26, 64))):
        engine.submit(Sequence(list(prompt), Sampling(0.8, seed=i), max_tokens=40))
    while not engine.idle:
        engine.step()
        turns += 1
        if turns % 5 == 0:
            for seq in engine.scheduler.running:
                if seq.emitted > 1:
                    compared += entries_that_hold(host, fresh, seq)
    assert compared > 100


def entries_that_hold(host, fresh, seq) -> int:
    """Draft entries of all committed tokens but the last two equal a fresh prefill's. (The host
    loop has not written the very last ones yet, in either drafter.) -> how many were compared."""
    text = Sequence(seq.tokens[:-1], slot=0, max_tokens=1)
    lone = fresh.target if isinstance(fresh, HostHead) else fresh.model
    fresh.reset(text)
    count = len(text.tokens)
    for start in range(0, count, FINE):
        stop = min(start + FINE, count)
        step = lone.prefill(text, start, stop)
        if isinstance(fresh, HostHead):
            fresh.prefill(text, start, stop, step)
    if isinstance(fresh, HostHead):
        caches = [(d.head.inputs.head.layer.cache,) for d in (host, fresh)]
        kept = 5  # what the last cycle verified is pending
    else:
        caches, kept = [d.model.cache.layers for d in (host, fresh)], 1
    settled, compared = max(0, count - kept), 0
    for ours, theirs in zip(*caches, strict=True):
        if ours is None:
            continue
        first = max(0, settled - ours.size + 40)
        entry = torch.arange(first, settled, device="cuda") % ours.size
        for a, b in ((ours.k[seq.slot], theirs.k[0]), (ours.v[seq.slot], theirs.v[0])):
            a, b = (
                part.view(torch.uint8).unflatten(-1, (-1, part.element_size())) for part in (a, b)
            )
            if a.dim() == 5:  # values in blocks of 32 entries
                a, b = (p.transpose(2, 3).flatten(1, 2) for p in (a, b))
            assert torch.equal(a[:, entry], b[:, entry])
            assert a[:, entry].any(-1).any(-1).all(), "entries that were never written"
        compared += len(entry)
    return compared


@pytest.mark.parametrize("name", ["model", "eagle3"])
def test_rows_come_to_the_end_of_their_context(name):
    """Of the target's, and of a head's that is shorter."""
    short = target_of(KINDS[0], 3, max_len=96)
    lone = target_of(KINDS[0], 1, False, (), 96)
    lengths = (50, 70, 90, 94)
    flags = {"max_position": 80} if name == "eagle3" else {}
    host, resident = drafter_of(name, short, 7, **flags)
    texts = []
    for target, drafter, cycle in (
        (lone, NoDrafter(), host_cycle(lone, NoDrafter(), 0)),
        (short, host, device_loop(short, resident, 7)),
        (short, host, host_cycle(short, host, 7)),
    ):
        texts.append(decode(target, drafter, cycle, "nucleus", 10**6, lengths)[0])
    assert texts[0] == texts[1] == texts[2]
    assert all(len(text) == 96 for text in texts[0])


def test_argmax_drafts_change_nothing_either():
    target = target_of(KINDS[0], 3)
    for name in ("model", "eagle3"):
        host, resident = drafter_of(name, target, 4, greedy=True)
        text, _ = decode(target, host, device_loop(target, resident, 4), "nucleus")
        assert text == plain(KINDS[0], "nucleus")


@pytest.mark.parametrize("name", ["eagle3", "model", None])
def test_auto_in_the_captured_cycle(name):
    """Whatever is chosen, a cycle late: with weights and without, in cycles of any width."""
    target = target_of(KINDS[0], 3)
    head, resident = drafter_of(name, target, 4) if name else (None, None)
    weighted = None if head is None else Weighted(name, head)
    policy = Whim(4, RandomCosts(1), Menu.of({4}, {0}), name)
    drafter = AutoDrafter({"suffix": LookupTwin(2, 32)}, weighted, policy)
    chooser = LateChooser(drafter, "suffix", 3, {0, 1, 3, 4})
    captured = device_loop(target, DeviceAuto(chooser, DeviceLookup(target, 2, 32), resident), 4)
    for mode in MODES:
        said = plain(KINDS[0], mode)
        assert decode(target, drafter, captured, mode)[0] == said, mode
        predicted = decode(target, drafter, captured, mode, predicted=said)[0]
        assert predicted == said, (mode, "predicted")
    asked = [Sequence(p, max_tokens=64, reported=True) for p in prompts_for((3, 40, 17))]
    events = Engine(target, drafter, captured).run(asked)
    told = [event.report for event in events if event.report is not None]
    said_by = {guesser for report in told for guesser in report.guessers}
    assert said_by and said_by <= {"suffix", name}
    assert all(len(report.draft) == len(report.guessers) for report in told)


@pytest.mark.parametrize("lengths", [(1, 3), (2, 5), (2, 32), (40, 200)])
def test_lookup_guesses_as_its_twin_does(lengths):
    """Of texts that are short, that repeat one word, and that repeat hundreds of words; behind
    each lies what rejected drafts left there."""
    random, k = np.random.default_rng(0), 6
    long = random.integers(0, 9, 700).tolist()
    texts = [
        [1],
        [2] * 5,
        [3] * 1500,
        long,
        long + long[:400],
        random.integers(0, 3, 1100).tolist(),
    ]
    history = torch.ones((len(texts), 2048), dtype=torch.int32, device="cuda")
    for slot, text in enumerate(texts):
        history[slot, : len(text)] = torch.tensor(text)
    tokens = torch.full((len(texts), k + 1), NO_GUESS, dtype=torch.int32, device="cuda")
    start = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32, device="cuda")
    slots = torch.arange(len(texts), dtype=torch.int32, device="cuda")
    batch = CapturedBatch(Rows(tokens, start, slots), needs_sampler=False, logprobs=False)
    target = SimpleNamespace(cache=SimpleNamespace(tokens=history), vision=None)
    found = DeviceLookup(target, *lengths).propose(batch, k).tokens.tolist()
    twin, seqs = LookupTwin(*lengths), [Sequence(t, slot=slot) for slot, t in enumerate(texts)]
    for seq in seqs:
        twin.reset(seq)
    assert found == twin.propose(seqs, k).tokens.tolist()

"""`auto` changes no token, whatever it chooses: with random costs in each cycle, with requests that
have their own `speculative` options, beside predictions; and it finds the drafter that pays."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from drafters import registry
from drafters.auto import cuda as cuda_auto, jax as jax_auto
from drafters.auto.host import AutoDrafter, Weighted
from drafters.auto.late import EITHER, NO_SOURCE, TEXT, WEIGHTS, LateChooser
from drafters.eagle3.files import save_flat
from drafters.eagle3.spec import random_head
from drafters.lookup.jax import TracedLookup
from drafters.ngram.host import NgramDrafter
from drafters.none.host import NoDrafter
from drafters.suffix.host import SuffixDrafter
from specdec.assembly.engine import make_engine
from specdec.assembly.model import load_model
from specdec.core.config import ModelConfig
from specdec.core.constraint import GuidedDrafter
from specdec.core.cycle import host_cycle
from specdec.core.engine import Engine
from specdec.core.policy.choice import Menu, Policy
from specdec.core.prediction import PredictedText, Prediction
from specdec.core.types import NO_GUESS, CycleChoice, Proposal, Sequence, Speculative
from targets.cuda.device_drafter import CapturedBatch
from targets.cuda.ops import Rows
from targets.jax.device_drafter import TextDrafter
from targets.jax.device_loop import device_loop
from targets.jax.load import JaxOptions, load_target
from tests.support.commands import CUDA, refused, run
from tests.support.eagle3_oracle import SPEC
from tests.support.fakes import FakeTarget, Noise, Oracle, ScriptedTarget
from tests.support.modes import MODES
from tests.support.policies import RandomCosts, Whim
from tests.support.worded import WORDS

K = 5
TOKENS = 40
WISHES = (
    None,
    Speculative(k=0),
    Speculative(k=2),
    Speculative("suffix"),
    Speculative("head", 3),
    Speculative("auto"),
    Speculative("none", 0),
)


def auto(head, seed, depths=(0, 1, 3, K), drafted=(0, 2, K), costs=None, kind=Policy, answers=100):
    texts = {"suffix": SuffixDrafter(1, 100), "ngram": NgramDrafter(1, 3)}
    weighted = None if head is None else Weighted("head", head)
    policy = kind(K, costs or RandomCosts(seed), Menu.of(depths, drafted if head else (0,)))
    policy.weighted = None if head is None else "head"
    return AutoDrafter(texts, weighted, policy)


def requests(wishes=False, predict=None):
    prompts = np.random.default_rng(0).integers(0, 9, (7, 12)).tolist()
    seqs = [
        Sequence([*prompt, *prompt[:6]], MODES["nucleus"](i), max_tokens=TOKENS, request_id=str(i))
        for i, prompt in enumerate(prompts)
    ]
    for i, seq in enumerate(seqs):
        seq.speculative = WISHES[i] if wishes else None
        if predict is not None and i % 2:
            seq.prediction = Prediction(PredictedText(predict[str(i)][19::2]), seq.prompt_len)
    return seqs


def decoded(drafter, k, **given):
    target = FakeTarget(slots=3, vocab=9)
    engine = Engine(target, drafter, host_cycle(target, drafter, k))
    seqs = requests(**given)
    engine.run_to_end(seqs)
    return {seq.request_id: seq.tokens for seq in seqs}, seqs


@pytest.fixture(scope="module")
def plain():
    return decoded(NoDrafter(), 0)[0]


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_changes_a_token(plain, seed):
    heads = (None, Noise(9), Noise(9, wild=True), Oracle(plain, 0, 9), Oracle(plain, 1, 9))
    for head in heads:
        assert decoded(auto(head, seed), K)[0] == plain
        drafter = auto(head, seed, kind=Whim)
        assert decoded(drafter, K)[0] == plain
        works = drafter.policy.costs.works
        assert len({work.depth for work in works}) == 4, works
        assert head is None or {work.drafted for work in works} == {0, 2, K}


@pytest.mark.parametrize("seed", range(3))
def test_requests_have_their_way_and_the_same_text(plain, seed):
    given = {"wishes": True, "predict": plain if seed else None}
    text, seqs = decoded(auto(Noise(9), seed, depths=(K,)), K, **given)
    assert text == plain
    for seq in seqs:
        wish = seq.speculative
        drafted = seq.acceptance.drafted_at
        if wish is not None and wish.k is not None:
            assert max(drafted, default=-1) < wish.k, (wish, drafted)
    assert seqs[0].acceptance.drafted > 0


def test_a_wish_holds_with_any_drafter(plain):
    for k in (0, 2, 9):
        target, seqs = FakeTarget(slots=3, vocab=9), requests()
        for seq in seqs:
            seq.speculative = Speculative(k=k)
        drafter = Noise(9)
        Engine(target, drafter, host_cycle(target, drafter, K)).run_to_end(seqs)
        assert {seq.request_id: seq.tokens for seq in seqs} == plain
        assert all(max(seq.acceptance.drafted_at, default=-1) < k for seq in seqs)


class Dear:
    """A verify costs 1, and a run of the drafter with weights so much more."""

    def __init__(self, guess: float) -> None:
        self.guess = guess

    def seconds(self, work) -> float:
        return 1 + self.guess * (work.drafted > 0)

    def saw(self, work, seconds) -> None:
        pass


def run_answer(answer, drafter, rows=1):
    """Decode `answer` with this drafter; returns the engine."""
    target = ScriptedTarget(answer, 0, slots=rows)
    seqs = [Sequence([1, 2], max_tokens=len(answer), request_id=str(i)) for i in range(rows)]
    engine = Engine(target, drafter, host_cycle(target, drafter, K))
    engine.run_to_end(seqs)
    assert all(seq.tokens[2:] == answer for seq in seqs)
    return engine


@pytest.mark.parametrize(
    ("right", "cost", "runs"), [(True, 0.1, True), (True, 50.0, False), (False, 0.1, False)]
)
def test_it_finds_whose_guesses_pay(right, cost, runs):
    """On a text that repeats nothing."""
    answer = np.random.default_rng(2).integers(3, 45, 240).tolist()
    known = {str(i): [1, 2, *answer] for i in range(3)}
    drafter = auto(Oracle(known, 0 if right else 1), 0, costs=Dear(cost), depths=(K,))
    run_answer(answer, drafter, rows=3)
    chosen = drafter.policy.chosen
    assert (chosen.get("head", 0) > 0.8 * sum(chosen.values())) == runs, chosen


def test_the_best_of_a_text_that_changes_in_the_middle():
    """First the text repeats itself, then the head's guesses are right; the policy switches."""
    rng = np.random.default_rng(1)
    answer = [*([3, 4, 5, 6, 7, 8] * 20), *rng.integers(0, 40, 120).tolist()]
    told = {"0": [1, 2, *answer]}

    class Head(Oracle):
        def propose(self, seqs, k):
            known = super().propose(seqs, k).tokens
            late = np.array([[len(seq.tokens) >= 122] for seq in seqs])
            return Proposal(np.where(late, known, 39).astype(np.int32))

    def cycles(drafter):
        return run_answer(answer, drafter).acceptance.cycles

    both = cycles(auto(Head(told), 0, costs=Dear(0.1), depths=(K,)))
    assert both < 0.75 * min(cycles(Head(told)), cycles(SuffixDrafter()))


def checked(config, speculation, loop="host", tokens=20):
    """An engine with random choices gives plain decoding's texts. Returns the engine."""
    model = load_model(config, registry.resolved(speculation, config))
    ids = model.tokenizer.encode("def quicksort(items):\n    return quick")

    def texts(chosen):
        engine = make_engine(model, chosen)
        policy = engine.drafting.policy
        if policy is not None:
            whim = Whim(policy.k, RandomCosts(3), policy.menu, policy.weighted)
            engine.drafter.policy = whim
        seqs = [
            Sequence([*ids, 9 + i], MODES["everything"](i), max_tokens=tokens) for i in range(4)
        ]
        seqs[1].speculative = Speculative(k=1)
        engine.run_to_end(seqs)
        return [seq.tokens for seq in seqs], engine

    resolved = registry.resolved(speculation, config)
    said, engine = texts(replace(resolved, loop=loop))
    assert said == texts(registry.plain(replace(resolved, loop="host")))[0]
    assert engine.acceptance.drafted > 0
    return engine


@pytest.mark.usefixtures("cheap_programs")
@pytest.mark.parametrize(
    ("own", "name"),
    [
        (False, "eagle3"),
        pytest.param(True, "eagle3", marks=pytest.mark.slow),
        pytest.param(True, "model", marks=pytest.mark.slow),
    ],
)
def test_lossless_on_jax_with_a_drafter_with_weights(own, name, worded, tmp_path):
    """own: mini and what drafts for it, in place of a tiny model with a random head."""
    model, draft = ("mini", None) if own else (str(worded), str(tmp_path))
    if not own:
        head = random_head(replace(SPEC, hidden=48, vocab=WORDS, layers=(0, 1, 2)))
        save_flat(head, tmp_path, (1,))
    chosen = registry.config_type()(drafter="auto", k=4, auto_with=name, draft_model=draft)
    engine = checked(ModelConfig(model, slots=2, max_len=256), chosen)
    assert {work.drafted for work in engine.drafter.policy.costs.works} == {0, 1, 2, 4}
    assert {work.depth for work in engine.drafter.policy.costs.works} == {4}  # all are one width


@pytest.mark.usefixtures("cheap_programs")
@pytest.mark.parametrize("name", ["model", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_lossless_in_jaxs_device_loop(name, worded):
    model, draft = (str(worded), str(worded)) if name == "model" else ("mini", None)
    chosen = registry.config_type()(drafter="auto", k=4, auto_with=name, draft_model=draft)
    config = ModelConfig(model=model, slots=2, max_len=256)
    engine = checked(config, chosen, loop="device", tokens=60)
    assert {work.drafted for work in engine.drafter.policy.costs.works} == {0, 4}


@pytest.mark.usefixtures("cheap_programs")
def test_predictions_ride_with_jaxs_dispatches_and_useless_ones_do_not_cut_them_short(worded):
    chosen = registry.config_type()(drafter="auto", k=4, loop="device")
    config = ModelConfig(str(worded), slots=1, max_len=256)
    speculation = registry.resolved(chosen, config)
    engine = make_engine(load_model(config, speculation), speculation)

    def run(answer=None):
        """-> tokens, dispatches, and cycles."""
        seq, steps = Sequence([5, 6, 7, 8], MODES["everything"](1), max_tokens=100), 0
        if answer is not None:
            seq.prediction = Prediction(PredictedText(answer), seq.prompt_len)
        engine.submit(seq)
        while not engine.idle:
            engine.step()
            steps += 1
        return seq.tokens[seq.prompt_len :], steps, seq.acceptance.cycles

    answer, dispatches, cycles = run()
    again, _, fewer = run(answer)
    assert again == answer and fewer <= 21 < cycles  # 100 tokens, five a cycle
    run([WORDS - 1] * 100)  # learned what such predictions are worth
    again, more, _ = run([WORDS - 1] * 100)
    assert again == answer and more <= dispatches + 2


class Said:
    """A `DeviceDrafter` for either device loop that proposes given rows."""

    memory = ()

    def __init__(self, rows) -> None:
        self.rows, self.heard = rows, 0

    def ready(self, seqs) -> CycleChoice:
        return CycleChoice()

    def take_back(self) -> None:
        pass

    def program(self, needs_sampler):
        return self

    def weights(self):
        return ()

    def on(self, weights, memory):
        return self

    def propose(self, batch, k):
        return Proposal(self.rows)

    def observe(self, batch, step, accepted) -> None:
        self.heard += 1


def chosen(take, runs):
    names = ("text", "text", "own", "text")
    return SimpleNamespace(take=np.array(take, np.int32), runs=runs, names=names)


TEXTS = [[1, 2, 3], [4, 5, NO_GUESS], [NO_GUESS] * 3, [6, 7, 8], [NO_GUESS] * 3]
OWN = [[11, 12, 13], [14, 15, 16], [17, 18, 19], [21, 22, 23], [24, 25, 26]]
TAKE = [TEXT, EITHER, EITHER, WEIGHTS, NO_SOURCE]


@pytest.mark.parametrize("runs", [False, True])
def test_rows_take_whom_the_host_chose_in_both_device_loops(runs):
    silent = [NO_GUESS] * 3
    expected = [TEXTS[0], TEXTS[1], OWN[2] if runs else silent, OWN[3] if runs else silent, silent]
    head = Said(jnp.array(OWN))
    traced = jax_auto.DeviceAuto(chosen(TAKE, runs), Said(jnp.array(TEXTS)), head)
    rows = traced.program(False).on(traced.weights(), traced.memory)
    made = rows.propose(None, 3)
    own = WEIGHTS if runs else TEXT
    assert made.tokens.tolist() == expected
    assert made.source.tolist() == [TEXT, TEXT, own, own, TEXT]
    assert made.names[TEXT] == "text" and made.names[WEIGHTS] == "own"
    rows.observe(None, None, None)
    captured = cuda_auto.DeviceAuto(
        chosen(TAKE, runs), Said(torch.tensor(TEXTS)), Said(torch.tensor(OWN))
    )
    tokens = torch.full((5, 4), NO_GUESS)
    batch = CapturedBatch(Rows(tokens, torch.zeros(5), torch.arange(5)), False, False)
    again = captured.propose(batch, 3)
    assert again.tokens.tolist() == expected and again.names == made.names and head.heard == 1
    told = zip(again.source.tolist(), made.source.tolist(), expected, strict=True)
    assert all((c == WEIGHTS) == (j == WEIGHTS) for c, j, said in told if said[0] != NO_GUESS)
    more = [[t + 1 if runs and row in (2, 3) else t for t in e] for row, e in enumerate(expected)]
    captured, traced = (  # in a script's hands, the guesses by weights alone are others
        auto.with_weighted(lambda own: Said(own.rows + 1)) for auto in (captured, traced)
    )
    assert captured.propose(batch, 3).tokens.tolist() == more
    rows = traced.program(False).on(traced.weights(), traced.memory)
    assert rows.propose(None, 3).tokens.tolist() == more
    none = CapturedBatch(replace(batch.rows, tokens=tokens[:, :1]), False, False)
    assert captured.propose(none, 0).tokens.shape == (5, 0)


def late(head, costs):
    """A chooser, and its engine's rows driven by hand."""
    drafter = auto(head, 0, costs=costs)
    return drafter, LateChooser(drafter, "ngram", slots=2, depths={0, K})


def says(seq, answer, drafted, kept):
    """Simulate a cycle of a row with a prompt of two tokens: `kept` guesses were right."""
    at = len(seq.tokens) - 2
    seq.tokens += answer[at : at + kept + 1]
    seq.acceptance.add(drafted, kept, kept + 1, len(seq.tokens))


def test_costs_are_told_how_long_the_texts_are():
    """In the host loop, and a device loop's: those of the cycle, not of the one that follows."""
    drafter = auto(None, 0)
    decoded(drafter, K)
    works = drafter.policy.costs.works
    assert works and all(18 < work.context / work.rows <= 18 + TOKENS for work in works), works
    drafter, chooser = late(None, RandomCosts(0))
    seq = Sequence([1, 2], slot=1, max_tokens=500)
    drafter.reset(seq)
    for _ in range(3):
        chooser.choose([seq])
        says(seq, list(range(100)), [True] * K, 4)
    assert {work.context for work in drafter.policy.costs.works} == {2, 7}


def test_a_cycle_beside_which_a_prompt_was_read_costs_nothing_more():
    """A captured loop's dispatch is read after the next choice: two choices are disturbed."""
    drafter, chooser = late(None, RandomCosts(0))
    seq, told = Sequence([1, 2], slot=1, max_tokens=500), []
    drafter.reset(seq)
    for read in (0, 0, 0, 1, 0, 0, 1, 1, 0, 0):
        drafter.policy.prompt_reads += read
        before = len(drafter.policy.costs.works)
        chooser.choose([seq])
        told.append(len(drafter.policy.costs.works) - before)
        says(seq, list(range(100)), [True] * K, 4)
    assert told == [0, 1, 1, 0, 0, 1, 0, 0, 0, 1]


def test_the_late_choice_follows_what_came():
    """The test extends the rows itself, as a device loop would."""
    answer = np.random.default_rng(5).integers(3, 45, 400).tolist()
    for good, dear, runs, depth in ((True, 0.1, True, K), (False, 9.0, False, 0)):
        drafter, chooser = late(Noise(50), Dear(dear))
        drafter.policy.costs.seconds = lambda w, dear=dear: (
            1 + 0.01 * w.depth + dear * (w.drafted > 0)
        )
        seq = Sequence([1, 2], slot=1, max_tokens=500)
        drafter.reset(seq)
        seq.tokens.append(answer[0])
        ran = []
        while len(seq.tokens) < 300:
            chooser.choose([seq])
            kept = K if good and chooser.take[1] == WEIGHTS else 0
            says(seq, answer, [chooser.runs] * K, kept)
            ran.append((chooser.runs, chooser.choice.depth))
        assert ran[-1] == ran[-2] == (runs, depth), ran
        assert good == (sum(r for r, _ in ran) > len(ran) / 2)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_late_trial_is_credited_to_the_drafter_that_was_tried(behind):
    """Its guesses are wrong at first and right from the middle on. A captured loop chooses for a
    cycle before it has read the one before: the trial's tokens come when another choice stands."""
    answer = np.random.default_rng(7).integers(3, 45, 2000).tolist()
    drafter, chooser = late(Noise(50), Dear(0.1))
    drafter.policy.costs.seconds = lambda w: 1 + 0.01 * w.depth + 0.1 * (w.drafted > 0)
    seq, unread, ran = Sequence([1, 2], slot=1, max_tokens=3000), [], []
    drafter.reset(seq)
    seq.tokens.append(answer[0])
    said = 1
    for number in range(400):
        chooser.choose([seq])
        ran.append(chooser.runs)
        kept = K if number > 200 and chooser.take[1] == WEIGHTS else 0
        unread.append((answer[said : said + kept + 1], [chooser.runs] * K, kept))
        said += kept + 1
        if len(unread) > behind:
            tokens, drafted, right = unread.pop(0)
            seq.tokens += tokens
            seq.acceptance.add(drafted, right, right + 1, len(seq.tokens))
    assert sum(ran[100:200]) < 10 and sum(ran[-100:]) > 90, (sum(ran[100:200]), sum(ran[-100:]))


def test_a_row_that_had_ended_breaks_no_promise():
    """The host gets a row's end one cycle late. Until then the row emits nothing, which must not
    count as wrong guesses: long drafts would otherwise be given up whenever rows end together."""
    answer = np.random.default_rng(7).integers(3, 45, 2000).tolist()
    drafter, chooser = late(Noise(50), Dear(0.1))
    drafter.policy.costs.seconds = lambda w: 1 + 0.01 * w.depth + 0.1 * (w.drafted > 0)

    def fresh(slot):
        seq = Sequence([1, 2, answer[0]], slot=slot, max_tokens=3000)
        drafter.reset(seq)
        return seq

    lasting, other = fresh(0), None
    for number in range(60):
        if number % 3 == 0:  # the other row's request ended, and the next one has come
            other = fresh(1)
        chooser.choose([lasting, other])
        for seq in (lasting,) if number % 3 == 2 else (lasting, other):
            says(seq, answer, [chooser.runs] * K, K if chooser.runs else 0)
    assert chooser.runs and drafter.policy.promises.kept((K, K)) == 1.0


def dear_to_verify(work) -> float:
    """A guess costs half a plain cycle, as with many rows."""
    return 1 + 0.5 * work.depth


@pytest.mark.parametrize("right", [True, False])
def test_a_prediction_is_judged_like_a_drafter(right):
    """In the late choice a good prediction is used and a useless one costs nothing, even if the
    request names another drafter."""
    answer = np.random.default_rng(5).integers(3, 45, 400).tolist()
    drafter, chooser = late(None, RandomCosts(0))
    drafter.policy.costs.seconds = dear_to_verify
    seq = Sequence([1, 2], slot=1, max_tokens=500, speculative=Speculative("none"))
    text = answer if right else np.random.default_rng(6).integers(3, 45, 400).tolist()
    seq.prediction = Prediction(PredictedText(text), seq.prompt_len)
    drafter.reset(seq)
    seq.tokens.append(answer[0])
    ran = []
    while len(seq.tokens) < 300:
        choice = chooser.choose([seq])
        kept = choice.depth if right and choice.takes_known else 0
        says(seq, answer, [True] * choice.depth, kept)
        ran.append((choice.takes_known, choice.depth))
        assert chooser.take[1] == NO_SOURCE
    assert set(ran[-30:]) == ({(True, K)} if right else {(False, 0)}), ran


def test_a_match_alone_is_no_choice_for_several_cycles():
    """The match may end in any of them, and then the head should have guessed; without a head there
    is no alternative."""
    for head, alone in ((Noise(50), False), (None, True)):
        drafter, chooser = late(head, RandomCosts(0))
        drafter.policy.costs.seconds = lambda w: 1 + 9.0 * (w.drafted > 0)
        seq = Sequence([1, 2, 3, 4, 5, 6] * 4, slot=1, max_tokens=500)
        drafter.reset(seq)
        for number in range(40):
            choice = chooser.choose([seq])
            kept = K if chooser.take[1] in (TEXT, EITHER) else 0
            seq.tokens += [(len(seq.tokens) + i) % 6 + 1 for i in range(kept + 1)]
            seq.acceptance.add([True] * K, kept, kept + 1, len(seq.tokens))
            if number > 20 and not chooser.runs:
                assert choice.variant == "text"
                assert (choice.repeats, int(chooser.take[1])) == (alone, TEXT)


@pytest.mark.parametrize(
    ("wish", "take"), [(None, TEXT), ("auto", TEXT), ("ngram", TEXT), ("none", NO_SOURCE)]
)
def test_where_guesses_cost_nothing_a_row_takes_a_match_that_may_come_if_its_request_lets_it(
    wish, take
):
    """A text without a match, a loop of one width, and several cycles of it to come."""
    drafter, _ = late(None, RandomCosts(0))
    chooser = LateChooser(drafter, "ngram", 2, {K})
    seq = Sequence([1, 2, 3], slot=1, max_tokens=9, speculative=wish and Speculative(wish))
    drafter.reset(seq)
    chooser.choose([seq])
    assert chooser.take[1] == take


def test_a_choice_taken_back_is_not_heard_of():
    drafter, chooser = late(Noise(50), Dear(0.1))
    seq = Sequence([1, 2, 3], slot=1, max_tokens=9)
    drafter.reset(seq)
    for kept in (2, 0, 1):
        chooser.choose([seq])
        chooser.take_back()
        chooser.choose([seq])
        seq.tokens += range(kept + 1)
        seq.acceptance.add([True] * K, kept, kept + 1, len(seq.tokens))
    chooser.choose([seq])
    assert sum(drafter.policy.chosen.values()) == 3


def test_the_host_loop_verifies_no_prediction_that_does_not_pay():
    drafter = auto(None, 0, costs=RandomCosts(0))
    drafter.policy.costs.seconds = dear_to_verify
    guided, depths = GuidedDrafter(drafter), []
    seq = Sequence([1, 2], max_tokens=500, speculative=Speculative("none"))
    seq.prediction = Prediction(PredictedText([5, 6] * 100), seq.prompt_len)
    drafter.reset(seq)
    for _ in range(40):  # what is predicted fits two tokens back, and is never right
        seq.tokens += [5, 6]
        draft = guided.propose([seq], K).tokens
        depths.append(draft.shape[1])
        guided.observe([seq], SimpleNamespace(chosen=np.full((1, len(draft[0]) + 1), 9)), [0])
        seq.tokens.append(9)
    assert depths[0] and set(depths[-20:]) == {0} and guided.forced_prefix is None


def test_lossless_on_the_cuda_target_with_narrower_cycles(worded):
    chosen = registry.config_type()(drafter="auto", k=4, auto_with="model", draft_model=str(worded))
    config = ModelConfig(model=str(worded), backend="cuda", device="cpu", slots=2, max_len=64)
    engine = checked(config, chosen)
    assert {work.depth for work in engine.drafter.policy.costs.works} == {0, 1, 3, 4}


@pytest.mark.usefixtures("cheap_programs")
def test_jaxs_loop_runs_one_cycle_of_a_choice_that_does_not_repeat(tiny, monkeypatch):
    target = load_target(tiny["31b"], JaxOptions(slots=1, max_len=128, k=4, chunk=8))
    drafter = TextDrafter(TracedLookup(1, 3))
    traced = device_loop(target, drafter, 4, cycles=4)
    said, most = [], []
    for repeats in (True, False):
        monkeypatch.setattr(drafter, "ready", lambda _, r=repeats: CycleChoice(repeats=r))
        rounds = []

        def counted(seqs, single, rounds=rounds):
            done = traced(seqs, single)
            rounds.append(len(done))
            return done

        seqs = requests()[:1]
        Engine(target, NoDrafter(), counted).run_to_end(seqs)
        said.append(seqs[0].tokens)
        most.append(max(rounds))
    assert most == [4, 1] and said[0] == said[1]


@pytest.mark.usefixtures("cheap_programs")
def test_a_wish_holds_in_the_device_loop(tiny):
    """As in the host loop, guess for guess."""
    target = load_target(tiny["31b"], JaxOptions(slots=3, max_len=128, k=7, chunk=8))
    traced = device_loop(target, TextDrafter(TracedLookup(1, 3)), 4)
    texts = []
    for wished in (False, True):
        for drafter, cycle in (
            (host := NgramDrafter(1, 3), host_cycle(target, host, 4)),
            (NoDrafter(), traced),
        ):
            seqs = requests(wishes=wished)[:3]
            Engine(target, drafter, cycle).run_to_end(seqs)
            texts.append(([s.tokens for s in seqs], [s.acceptance.drafted_at for s in seqs]))
    free, free_traced, wished, wished_traced = texts
    assert free == free_traced and wished == wished_traced and free[0] == wished[0]
    assert not wished[1][1] and max(wished[1][2]) == 1 and max(free[1][2]) == 3


def test_its_parts_can_be_had_alone(worded):
    config = ModelConfig(model=str(worded), slots=1, max_len=64)
    speculation = registry.resolved(registry.config_type()(drafter="auto", k=2), config)
    model = load_model(config, speculation)
    assert set(model.drafters) == {"none", "ngram", "suffix", "auto"}


@pytest.mark.usefixtures("cheap_programs")
def test_bench_says_a_script_with_it_and_with_each_part(capsys, tmp_path, worded):
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"prompt": "one two", "answer": " three one two three one two"}))
    arguments = ["bench", "--script", str(script), "--model", str(worded), "--max-len", "128"]
    arguments += ["--drafter", "auto", "--auto-with", "model", "--draft-model", str(worded)]
    arguments += ["--k", "2", "--acceptance", "0.9,0.8", "--repeats", "1", "--json", *CUDA]
    document = json.loads(run(capsys, *arguments)[0].splitlines()[-1])
    assert document["equal"]
    names = [row["drafter"] for row in document["script"]]
    assert names == ["none", "suffix", "ngram", "model", "auto"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--auto-with", "ngram"], "--auto-with must be a drafter with weights"),
        (["--auto-with", "nobody"], "--auto-with must be a drafter with weights"),
        (["--auto-with", "auto"], "--auto-with must be a drafter with weights"),
        (["--draft-model", "x"], "needs --auto-with"),
        (["--suffix-min", "0"], "--suffix-min"),
    ],
)
def test_bad_options_are_one_line(capsys, options, words):
    assert words in refused(capsys, "generate", "x", "--drafter", "auto", *options)


def test_guesses_are_counted_up_to_the_first_gap():
    drafter = auto(None, 0)
    seq = Sequence([1, 2, 3, 1, 2], slot=0)
    drafter.reset(seq)
    draft = drafter.propose([seq], K).tokens
    assert draft.shape[1] <= K and ((draft != NO_GUESS) | (draft == NO_GUESS)).all()


@pytest.mark.usefixtures("cheap_programs")
def test_doctor_and_evaluation_tell_what_it_knows(capsys, tmp_path, worded):
    base = ["--model", str(worded), "--slots", "2", "--max-len", "128"]
    base += ["--drafter", "auto", "--auto-with", "none"]
    with pytest.raises(SystemExit):  # a random model reads plain code no better than noise
        run(capsys, "doctor", *base, "--json")
    out, shown = capsys.readouterr()
    costs = json.loads(out.splitlines()[-1])["policy"]["seconds"]
    assert {(c["rows"], c["depth"], c["drafted"]) for c in costs} == {(1, 4, 0), (2, 4, 0)}
    assert "what cycles cost" in shown
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one two three one two"\n"def f(x): return f(x"')
    base += ["--max-tokens", "20"]
    out, shown = run(capsys, "eval-acceptance", str(prompts), *base, "--json")
    document = json.loads(out.splitlines()[-1])
    assert document["equality"]["equal"] and "had one drafter guessed alone" in shown
    told = document["policy"]
    assert sum(told["chosen"].values()) > 0
    assert {row["drafter"] for row in told["what_if"]} >= {"none", "suffix"}

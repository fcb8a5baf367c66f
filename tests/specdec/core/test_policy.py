"""The policy's parts: survival from what was seen, costs as they were measured, and the choice
that follows from both."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specdec.core.policy.choice import SHADOW, Menu, Offer, Policy, RowOffers
from specdec.core.policy.costs import CostTable, Work
from specdec.core.policy.promises import Promises
from specdec.core.policy.report import report
from specdec.core.policy.survival import Survival, bucket_of

K = 7


def learnt(shares, drafts=4000, known=K + 1, k=K):
    """A table after random drafts; shares[j] of them have more than j right guesses, and the first
    `known` tokens of each could be compared."""
    table, random = Survival(k), np.random.default_rng(0)
    for chance in random.random(drafts):
        table.learn(2, int((chance < np.array(shares)).sum()), k, known)
    return table


def test_survival_comes_near_what_was_seen(monkeypatch):
    monkeypatch.setattr("specdec.core.policy.survival.DISCOUNT", 1.0)
    shares = [0.8, 0.6, 0.5, 0.3, 0.2, 0.1, 0.05]
    table = learnt(shares)
    assert table.survival(2) == pytest.approx(shares, abs=0.03)
    assert table.expected(2)[0] == 0 and table.expected(2)[K] == pytest.approx(sum(shares), abs=0.1)
    assert table.survival(3) == pytest.approx(shares, abs=0.03)  # without own data: the prior
    for _ in range(50):
        table.learn(3, K, K, K + 1)
    assert table.survival(3)[K - 1] > 0.7 and table.survival(2)[K - 1] < 0.2


def test_what_could_not_be_compared_counts_as_far_as_it_was_seen(monkeypatch):
    """Of a cycle that took another's guesses only the tokens that came are known."""
    monkeypatch.setattr("specdec.core.policy.survival.DISCOUNT", 1.0)
    shares = [0.8, 0.6, 0.5, 0.3, 0.2, 0.1, 0.05]
    assert learnt(shares, known=3).survival(2)[:3] == pytest.approx(shares[:3], abs=0.03)
    assert learnt([1.0] * K, known=2).survival(2)[1] > 0.99


def test_the_text_may_change():
    table = Survival(K)
    for _ in range(500):
        table.learn(1, K, K, K + 1)
    assert table.expected(1)[K] > 6
    for _ in range(100):
        table.learn(1, 0, K, K + 1)
    assert table.expected(1)[K] < 1


def test_short_drafts_forget_nothing_of_longer_ones():
    table = Survival(K)
    for _ in range(100):
        table.learn(1, K, K, K + 1)
    long = table.expected(1)[K]
    for _ in range(200):
        table.learn(1, 1, 1, 2)
    assert table.expected(1)[K] == pytest.approx(long, abs=0.1)


def test_survival_never_rises_and_nothing_seen_is_worth_a_trial():
    table = Survival(K)
    assert 0.5 < table.survival(0)[0] < 1
    random = np.random.default_rng(1)
    for right, guessed, known in random.integers(0, K + 1, (300, 3)).tolist():
        table.learn(0, right, guessed, known)
        chances = table.survival(0)
        assert all(1 >= a >= b >= 0 for a, b in zip(chances, chances[1:], strict=False))
    assert Survival(0).expected(3) == Survival(0).overall() == [0.0] and not Survival(0).buckets


@pytest.mark.parametrize(("length", "bucket"), [(0, 0), (1, 1), (3, 2), (4, 3), (63, 6), (999, 7)])
def test_buckets(length, bucket):
    assert bucket_of(length) == bucket


def test_costs_are_medians_and_of_the_most_alike():
    costs = CostTable()
    assert costs.seconds(Work(1, 4, 0)) == 1.0
    for seconds in (9.0, 0.2, 0.4, 0.3):  # the first one compiled
        costs.saw(Work(1, 4, 0), seconds)
    costs.saw(Work(1, 4, 4), 9.0)
    costs.saw(Work(1, 4, 4), 0.5)
    assert costs.seconds(Work(1, 4, 0)) == 0.3
    assert costs.seconds(Work(64, 7, 0)) == 0.3 and costs.seconds(Work(3, 1, 2)) == 0.5
    assert costs.rows() == [(Work(1, 4, 0), 0.3), (Work(1, 4, 4), 0.5)]


FAR = 131_000
SHORT_TEXTS = {0: 10.3, 1: 10.5, 4: 10.6}
"""Milliseconds by verified guesses, about those of 31B on an H100; at 131,072 tokens a plain step
took 13.5, a verify of 4 guesses 14.9."""


def table_with(far):
    costs = CostTable()
    for context, times in ((20, SHORT_TEXTS), (FAR, far)):
        for depth, seconds in times.items():
            for _ in range(3):
                costs.saw(Work(1, depth, 0, context), seconds)
    return costs


def test_what_did_not_run_with_long_texts_costs_as_much_more_there_as_what_did():
    costs = table_with({4: 14.9})
    for depth, seconds in ((4, 14.9), (1, 14.8), (0, 14.6)):
        for tokens in (FAR, 2 * FAR, 70_000):
            assert costs.seconds(Work(1, depth, 0, tokens)) == pytest.approx(seconds)
        assert costs.seconds(Work(1, depth, 0, 100)) == SHORT_TEXTS[depth]
    costs = table_with({4: 14.9, 0: 13.5})
    assert costs.seconds(Work(1, 0, 0, FAR)) == 13.5


def test_long_texts_do_not_make_what_runs_look_dear():
    """Three of ten guesses are right: more than a verify costs beyond a plain step as far out."""
    policy = policy_of(table_with({1: 14.9}), depths=(0, 1), drafted=(0,))
    for i in range(200):
        policy.table("suffix").learn(2, int(i % 10 < 3), 1, 2)
    for context in (100, FAR):
        policy.context = context
        assert policy.choose([row(("suffix", 1))]).depth == 1, context


def test_a_pause_is_no_cost_unless_it_stays():
    costs = CostTable()
    for _ in range(3):
        costs.saw(Work(1, 4, 0), 0.1)
    for _ in range(3):  # the first one is met for the first time
        costs.saw(Work(2, 4, 0), 9.0)
    assert costs.seconds(Work(2, 4, 0)) == 0.1
    for _ in range(3):
        costs.saw(Work(2, 4, 0), 9.0)
    assert costs.seconds(Work(2, 4, 0)) == 9.0


class Priced:
    """Costs by hand: a verify, what each token more costs, and each guess of the weights."""

    def __init__(self, verify=1.0, token=0.0, guess=0.0):
        self.verify, self.token, self.guess = verify, token, guess

    def seconds(self, work):
        return self.verify + self.token * work.rows * work.depth + self.guess * work.drafted

    def saw(self, work, seconds):
        pass


def policy_of(costs, depths=(0, 1, 3, K), drafted=(0, K), right=()):
    """right: (drafter, guesses that are right)."""
    policy = Policy(K, costs, Menu.of(depths, drafted), "head" if max(drafted) else None)
    for name, count in right:
        for _ in range(200):
            policy.table(name).learn(2, count, K, K + 1)
    return policy


def row(*offers, most=K, insists=False):
    return RowOffers(tuple(Offer(name, 2, guesses) for name, guesses in offers), most, insists)


def test_promises_are_worth_what_was_kept_of_them():
    promises = Promises()
    assert promises.kept((7, 7)) == 1.0
    for _ in range(200):
        promises.learn((7, 7), 30.0, 15.0)
        promises.learn((3, 3), 20.0, 25.0)
    assert 0.5 < promises.kept((7, 7)) < 0.56
    assert promises.kept((3, 3)) == promises.kept((1, 1)) == 1.0
    one = Promises()
    one.learn((3, 3), 80.0, 0.0)  # a cycle of many rows that are alike
    assert one.kept((3, 3)) == pytest.approx(5 / 6)
    for _ in range(200):  # it may be tried again
        promises.learn((3, 3), 20.0, 20.0)
    assert promises.kept((7, 7)) > 0.95


def test_a_depth_that_breaks_its_promises_is_left():
    policy = policy_of(Priced(token=0.02), right=[("suffix", K)])
    rows = [row(("suffix", K))] * 8
    assert settled(policy, rows).depth == K
    depths = []
    for _ in range(90):  # the tables expect all guesses to be right, but one is
        choice = policy.choose(rows)
        policy.learn(choice, len(rows) * (1 + min(choice.depth, 1)))
        depths.append(choice.depth)
    assert set(depths[:10]) == {K} and depths[-20:].count(K) < 10


def test_nothing_known_is_tried_as_deep_as_its_time_is_worth():
    """One row's guesses cost little, many rows' a plain cycle each few of them."""
    for rows, depth in ((1, K), (32, 1)):
        policy = policy_of(Priced(token=0.01), drafted=(0, 1, 3, K))
        assert policy.choose([row(("head", K))] * rows).depth == depth, rows


def settled(policy, rows, cycles=300, emitted=None):
    """What it chooses in the end, where cycles emit what it expects of them."""
    choice = policy.choose(rows)
    for _ in range(cycles):
        choice = policy.choose(rows)
        tokens = sum(
            1 + policy.table(name).expected(2)[min(choice.depth, K)] if name else 1
            for name in choice.by_row
        )
        policy.learn(choice, round(tokens))
    return choice


def test_each_row_takes_whose_guesses_hold():
    policy = policy_of(Priced(), right=[("suffix", 5), ("ngram", 2), ("head", 3)])
    rows = [row(("suffix", K), ("head", K)), row(("ngram", K), ("head", K)), row(("head", K))]
    assert policy.choose(rows).by_row == ("suffix", "head", "head")


def test_lookup_must_be_better_than_weights_by_more_than_a_little():
    """Equal in tokens, it stumbles before the same hard token as they, and that costs a cycle."""
    policy = policy_of(Priced(), right=[("suffix", 5), ("ngram", 6), ("head", 4)])
    rows = [row(("suffix", K), ("head", K)), row(("ngram", K), ("head", K)), row(("suffix", K))]
    policy.table("head").learn(2, 5, K, K + 1)
    assert policy.choose(rows).by_row == ("head", "ngram", "suffix")


def test_a_drafter_runs_where_it_pays():
    right = [("suffix", 3), ("head", 5)]
    rows = [row(("suffix", K), ("head", K))]
    assert settled(policy_of(Priced(guess=0.01), right=right), rows).by_row == ("head",)
    dear = settled(policy_of(Priced(guess=0.5), right=right), rows)
    assert dear.by_row == ("suffix",) and dear.drafted == 0


def test_no_more_is_verified_than_pays():
    rows = [row(("suffix", K))]
    right = [("suffix", 3)]
    assert settled(policy_of(Priced(token=0.05), right=right), rows).depth == 3
    off = settled(policy_of(Priced(token=5.0), right=right), rows)
    assert off.depth == 0


def test_what_never_pays_is_tried_again():
    """As often as it is cheap, and where it is dear so seldom that trials take a part of the time
    that does not show."""
    for guess, cycles, least, most in ((0.05, 10 * SHADOW, 7, 12), (0.5, 200 * SHADOW, 15, 20)):
        policy = policy_of(Priced(guess=guess), right=[("head", 0)])
        rows, ran = [row(("head", K), ("suffix", K))], []
        for _ in range(cycles):
            choice = policy.choose(rows)
            ran.append(choice.drafted > 0)
            policy.learn(choice, 1)
        assert least <= sum(ran) <= most, guess


def test_longer_drafts_are_tried_again_where_short_ones_pay():
    """A few times soon, for what they bring can't be judged unseen; then seldom."""
    policy = policy_of(Priced(token=0.2), drafted=(0, 1, 3, K), right=[("head", 1)])
    rows, ran = [row(("head", K))], []
    for _ in range(10 * SHADOW):
        choice = policy.choose(rows)
        ran.append(choice.drafted)
        policy.learn(choice, 1 + min(choice.depth, 1))
    soon, later = ran[:SHADOW], ran[SHADOW:]
    assert set(soon) == {1, 3} and 2 <= soon.count(3) <= 6
    assert set(later) == {1, 3} and 20 <= later.count(3) <= 26  # a third longer each: 3 %


def test_a_request_has_its_way():
    policy = policy_of(Priced(guess=9.0), right=[("head", 0), ("suffix", 5)])
    rows = [row(("suffix", K)), row(("suffix", K), most=0)]
    choice = policy.choose([row(("head", K), insists=True), *rows])
    assert choice.drafted and choice.by_row == ("head", "suffix", None)
    assert not policy.choose([row(("head", K), insists=True, most=0), *rows]).drafted


def test_rows_that_nobody_has_anything_to_say_on():
    policy = policy_of(Priced(), drafted=(0,))
    assert policy.choose([row(), row(("suffix", 0))]).by_row == (None, None)


def test_a_report_says_what_else_would_have_come():
    policy = policy_of(CostTable(), right=[("suffix", 3), ("head", 5)])
    for drafted, seconds in ((0, 0.5), (K, 1.0)):
        for _ in range(3):
            policy.costs.saw(Work(1, K, drafted), seconds)
    told = json.loads(json.dumps(report(policy)))
    best = {row["drafter"]: row for row in told["what_if"] if row["k"] in (0, K)}
    assert best["none"]["tau"] == 1 and best["none"]["tokens_per_second"] == 2
    assert best["suffix"]["tokens_per_second"] == pytest.approx(8, rel=0.05)
    assert best["head"]["tokens_per_second"] == pytest.approx(6, rel=0.05)
    assert list(told["survival"]["suffix"]) == ["2"] and len(told["seconds"]) == 2
    assert len(told["what_if"]) == 1 + 2 * K


def test_a_drafter_alone_is_judged_with_the_cycles_in_which_it_had_nothing_to_say():
    policy = policy_of(CostTable(), drafted=(0,), right=[("suffix", 5)])
    always = {r["k"]: r["tau"] for r in report(policy)["what_if"] if r["drafter"] == "suffix"}
    for _ in range(300):
        policy.choose([row(("suffix", K)), row(), row(), row()])
    seldom = {r["k"]: r["tau"] for r in report(policy)["what_if"] if r["drafter"] == "suffix"}
    assert all(seldom[k] - 1 == pytest.approx((tau - 1) / 4, abs=1e-3) for k, tau in always.items())


def test_it_counts_what_was_chosen():
    policy = policy_of(Priced(), drafted=(0,), right=[("suffix", 5)])
    policy.learn(policy.choose([row(("suffix", K)), row()]), 7)
    assert policy.chosen == {"suffix": 1, "none": 1}
    assert policy.speedup == 3.5  # tokens of a row, in the time of one plain cycle

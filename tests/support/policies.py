"""Policies and costs drawn at random, for `auto`."""

from __future__ import annotations

import random

from specdec.core.policy.choice import Choice, Policy


class RandomCosts:
    """Another table in each cycle."""

    def __init__(self, seed: int) -> None:
        self.random, self.choices, self.works = random.Random(seed), random.Random(-seed), set()

    def seconds(self, work) -> float:
        return self.random.random()

    def saw(self, work, seconds) -> None:
        self.works.add(work)


class Whim(Policy):
    """Chooses at random: any pair of the menu, and any drafter for each row."""

    def choose(self, rows):
        draw = self.costs.choices.choice
        depth, drafted = draw(self.menu.pairs)
        guessing = [
            [None, *(o.drafter for o in row.offers if drafted or o.drafter != self.weighted)]
            for row in rows
        ]
        return Choice(depth, drafted, tuple(map(draw, guessing)))

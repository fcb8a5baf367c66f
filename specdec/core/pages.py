"""Room for K/V by the page: a sequence holds pages for the text that it has, not for the longest
that it may get.

Only what grows with a text is counted: the global layers' keys and values. Rings of sliding layers
are each slot's own. The scheduler seats a sequence where its pages are free, and the last to join
gives way where a text needs more than there are.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORT_TEXT = 32
"""Tokens; the self-check's texts are no longer."""


@dataclass(frozen=True)
class PagePlan:
    """page: positions. total: pages of all slots together. ahead: positions past a text's end that
    may be written before the host has read what was chosen. longest: positions of the longest text,
    those included. reread: tokens of an answer that one prefill call reads with the bits that they
    were decoded with. mapped: whether memory is put behind a page when it is first held; else all
    of it is there from the start."""

    page: int
    total: int
    ahead: int
    longest: int
    reread: int
    mapped: bool = False

    def needed(self, tokens: int) -> int:
        """Pages of a text."""
        return -(-min(tokens + self.ahead, self.longest) // self.page)

    @property
    def most(self) -> int:
        """Pages of the longest text."""
        return self.needed(self.longest)

    def least(self, slots: int) -> int:
        """Pages without which a start makes no sense: for the longest text, and for a short one in
        every slot with one to grow."""
        return max(self.most, slots * self.needed(SHORT_TEXT) + 1)

    def texts(self, tokens: int, slots: int) -> int:
        """How many texts of so many tokens there is room for at once."""
        return min(slots, self.total // self.needed(tokens))


class Pages:
    """The pages that each slot holds."""

    def __init__(self, plan: PagePlan, slots: int) -> None:
        self.plan = plan
        self.held = [0] * slots
        """By slot."""

    @property
    def free(self) -> int:
        return self.plan.total - sum(self.held)

    def has_room(self, tokens: int) -> bool:
        """Whether a text of so many tokens may join. Beside others one page stays free: else the
        first of them that grows would send it away again."""
        spare = 1 if any(self.held) else 0
        return self.plan.needed(tokens) + spare <= self.free

    def reserve(self, slot: int, tokens: int) -> bool:
        """Hold pages for the slot's text of so many tokens. False: too few are free, and nothing
        has changed."""
        wanted = self.plan.needed(tokens)
        more = wanted - self.held[slot]
        if more > self.free:
            return False
        if more > 0:
            self.held[slot] = wanted
            self._place(slot, wanted)
        return True

    def release(self, slot: int) -> None:
        """The slot's text is gone."""
        self.held[slot] = 0

    def _place(self, slot: int, count: int) -> None:
        """Put memory behind the slot's first `count` pages."""

"""How much a receipt measures."""

from __future__ import annotations

from dataclasses import dataclass

K = 7
"""Draft tokens per cycle, at most."""
USERS = (1, 4, 8)
"""Requests at the same time for which speed is measured, as far as there are slots."""
TEMPERATURES = (0.0, 1.0)
CPU_OUTPUT = 64
"""Tokens of each timed answer on a CPU."""
DEVICE_OUTPUT = 512
"""Tokens of each timed answer on an accelerator, whose start would weigh in shorter ones."""


@dataclass(frozen=True)
class Profile:
    name: str
    max_tokens: int
    """Tokens of each recorded answer, at most."""
    ks: tuple[int, ...]
    """Draft tokens per cycle for which acceptance is replayed."""
    long_texts: tuple[int, ...]
    """Characters of the texts in the built-in long prompts."""
    repeats: int
    """How often each speed is measured."""
    least_requests: int
    """Requests of a measurement, however few the users."""
    every_drafter: bool
    """Whether speed is measured with each drafter; else plain, with weights, and combined."""


PROFILES = {
    "quick": Profile("quick", 24, (1, 3, K), (1_500, 2_500, 3_500, 4_500), 2, 1, False),
    "full": Profile(
        "full", 256, tuple(range(1, K + 1)), (4_000, 16_000, 48_000, 120_000), 3, 2, True
    ),
}


def profile_of(name: str | None, accelerated: bool) -> Profile:
    """By name; None: quick on a CPU, full on an accelerator."""
    return PROFILES[name or ("full" if accelerated else "quick")]


def output_length(accelerated: bool) -> int:
    """Tokens of each timed answer."""
    return DEVICE_OUTPUT if accelerated else CPU_OUTPUT

"""Memory: what weights and cache take, and the most that was in use."""

from __future__ import annotations

import resource

from specdec.report.parts import Section
from specdec.report.subject import Subject
from targets.backend import meter_of

KIB = 1024
"""Bytes in the unit of the system's peak."""


def measure(subject: Subject) -> Section:
    """The section, in bytes. It comes after speed: nothing later takes more."""
    held = meter_of(subject.model.target).memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    if held is None:
        unknown = dict.fromkeys(("weights", "cache", "peak_device"))
        return unknown | {"peak_rss": peak, "why_not": "this backend does not report memory"}
    return {
        "weights": held["weights"] + held["copies"],
        "cache": held["cache"],
        "peak_device": held["used"],
        "peak_rss": peak,
    }

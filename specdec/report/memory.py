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
    meter = meter_of(subject.model.target)
    held, (weights, cache) = meter.memory(), meter.sizes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    section = {"weights": weights, "cache": cache, "peak_rss": peak}
    if held is None:
        return section | {"peak_device": None, "why_not": "this backend does not report its use"}
    return section | {"peak_device": held["used"]}

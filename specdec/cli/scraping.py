"""Reads a server's /metrics, and computes figures from the difference of two readings."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.request import ProxyHandler, build_opener

from specdec.core.errors import UserError

TIMEOUT = 5.0
OPENER = build_opener(ProxyHandler({}))
"""Of URLs without a proxy: the environment's would be asked for 127.0.0.1 too."""


@dataclass(frozen=True)
class Reading:
    """All samples of one moment."""

    at: float
    """Seconds, on a clock that doesn't jump."""
    samples: dict[str, list[tuple[dict[str, str], float]]]
    """By name: labels and values."""

    def sum(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name with these labels."""
        return sum(value for _, value in self._of(name, labels))

    def sums(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Sums of a name's samples, by the values of these labels."""
        found: dict[tuple[str, ...], float] = defaultdict(float)
        for labelled, value in self._of(name, {}):
            found[tuple(labelled[label] for label in labels)] += value
        return found

    def _of(self, name: str, labels: dict[str, str]) -> Iterator[tuple[dict[str, str], float]]:
        for own, value in self.samples.get(name, ()):
            if labels.items() <= own.items():
                yield own, value


def read_metrics(url: str) -> Reading:
    """The server's /metrics now. url: as of the server. Raises UserError."""
    from prometheus_client.parser import text_string_to_metric_families

    where = f"{url.rstrip('/')}/metrics"
    try:
        with OPENER.open(where, timeout=TIMEOUT) as reply:
            text = reply.read().decode("utf-8", "replace")
    except (HTTPException, OSError, ValueError) as problem:
        why = getattr(problem, "reason", problem)
        raise UserError(f"cannot read {where} ({why}): is `specdec serve` running there?") from None
    samples = defaultdict(list)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
    except ValueError:
        samples.clear()
    if not samples.keys() >= {"specdec:verify_passes_total", "specdec:num_requests_decoding"}:
        raise UserError(f"{where} is not of a specdec server of this version")
    return Reading(time.monotonic(), samples)


@dataclass(frozen=True)
class ServerFigures:
    """Figures for the time between two readings. None: there was no data."""

    model: str
    seconds: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    waiting: float
    """Requests without a slot."""
    prefilling: float
    """Requests of which the prompt is being read."""
    decoding: float
    running: float
    """Requests that hold a slot: those that prefill and those that decode."""
    slots: float
    tau: float | None
    speedup: float | None
    """Over plain decoding."""
    cached: float | None
    """Share of the prompts' tokens that needed no prefill."""
    tau_by_drafter: dict[str, float] = field(default_factory=dict)
    """By the drafter that made the draft's first guess; none: without a guess."""
    passes_by_drafter: dict[str, float] = field(default_factory=dict)
    """By the same: its share of the verify passes."""
    acceptance: dict[str, list[float]] = field(default_factory=dict)
    """By drafter: the share of the guesses at each position that were accepted."""
    cycle_ms: dict[str, float] = field(default_factory=dict)
    """By part: milliseconds per verify pass."""
    queue_ms: dict[str, float] = field(default_factory=dict)
    first_token_ms: dict[str, float] = field(default_factory=dict)
    between_tokens_ms: dict[str, float] = field(default_factory=dict)
    """By quantile."""


def figures_between(first: Reading, last: Reading) -> ServerFigures:
    grown = _Grown(first, last)
    seconds = last.at - first.at
    passes = grown.sum("specdec:verify_passes_total")
    parts = {part: s for (part,), s in grown.sums("specdec:engine_seconds_total", "part").items()}
    parts.pop("prefill", None)
    drafts = _drafts(grown)
    made = sum(count for _, count, _ in drafts)
    return ServerFigures(
        model=next(iter(last.sums("specdec:slots", "model_name")))[0],
        seconds=seconds,
        tokens_per_second=grown.sum("vllm:generation_tokens_total") / seconds,
        prompt_tokens_per_second=grown.sum("vllm:prompt_tokens_total") / seconds,
        waiting=last.sum("vllm:num_requests_waiting"),
        prefilling=last.sum("specdec:num_requests_prefilling"),
        decoding=last.sum("specdec:num_requests_decoding"),
        running=last.sum("vllm:num_requests_running"),
        slots=last.sum("specdec:slots"),
        tau=_share(grown.sum("specdec:verified_tokens_total"), passes),
        speedup=_share(grown.sum("specdec:plain_seconds_total"), sum(parts.values())) or None,
        cached=_share(
            grown.sum("vllm:prefix_cache_hits_total"), grown.sum("vllm:prefix_cache_queries_total")
        ),
        tau_by_drafter={name: emitted / count for name, count, emitted in drafts},
        passes_by_drafter={name: count / made for name, count, _ in drafts},
        acceptance=_acceptance(grown),
        cycle_ms={part: 1000 * s / passes for part, s in parts.items() if s} if passes else {},
        queue_ms=_quantiles(grown, "vllm:request_queue_time_seconds"),
        first_token_ms=_quantiles(grown, "vllm:time_to_first_token_seconds"),
        between_tokens_ms=_quantiles(grown, "vllm:inter_token_latency_seconds"),
    )


class _Grown:
    """By how much counters grew."""

    def __init__(self, first: Reading, last: Reading) -> None:
        self._first, self._last = first, last

    def sum(self, name: str) -> float:
        return max(0.0, self._last.sum(name) - self._first.sum(name))

    def sums(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        before = self._first.sums(name, *labels)
        return {
            key: max(0.0, value - before[key])
            for key, value in self._last.sums(name, *labels).items()
        }


def _share(of: float, whole: float) -> float | None:
    return of / whole if whole else None


def _drafts(grown: _Grown) -> list[tuple[str, float, float]]:
    """Drafters with their passes and the tokens that these emitted, the busiest first."""
    emitted = grown.sums("specdec:drafter_verified_tokens_total", "drafter")
    passes = grown.sums("specdec:drafter_passes_total", "drafter")
    busiest = sorted(passes.items(), key=lambda item: -item[1])
    return [(drafter, count, emitted[drafter,]) for (drafter,), count in busiest if count]


def _acceptance(grown: _Grown) -> dict[str, list[float]]:
    labels = "drafter", "position"
    accepted = grown.sums("specdec:accepted_tokens_total", *labels)
    found: dict[str, list[float]] = {}
    drafted = grown.sums("specdec:draft_tokens_total", *labels)
    for (drafter, position), count in sorted(drafted.items(), key=lambda item: int(item[0][1])):
        if count:
            found.setdefault(drafter, []).append(accepted[drafter, position] / count)
    return found


def _quantiles(grown: _Grown, name: str) -> dict[str, float]:
    """Milliseconds, interpolated within buckets as Prometheus does."""
    buckets = [(float(le), count) for (le,), count in grown.sums(f"{name}_bucket", "le").items()]
    buckets.sort()
    if not buckets or not buckets[-1][1]:
        return {}
    return {f"p{q}": 1000 * _quantile(buckets, q / 100) for q in (50, 95)}


def _quantile(buckets: list[tuple[float, float]], share: float) -> float:
    """buckets: (upper bound, how many lie at or below it), ascending; the last is infinite."""
    rank = share * buckets[-1][1]
    low, below = 0.0, 0.0
    for high, count in buckets:
        if count >= rank:
            if high == float("inf"):
                return low
            return low + (high - low) * (rank - below) / (count - below)
        low, below = high, count
    return low


def as_json(figures: ServerFigures) -> dict[str, Any]:
    """The document that ends stdout."""
    return {name: _rounded(value) for name, value in vars(figures).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value

"""Prometheus metrics under vLLM's names, so that its dashboards work here unchanged."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from time import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.cycle_reports import Speculating
from serve.engine_metrics import LABELS, EngineCollector
from serve.runner import EngineRunner

FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)  # vLLM's, so that histograms of both can be added up
REQUEST_BUCKETS = (
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)  # vLLM's, and those below 0.3: a prompt can be read in a few milliseconds
BETWEEN_TOKENS_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)  # vLLM's, and three below: a cycle can take a few milliseconds


class TokenCollector(Collector):
    """What every update adds to. Plain numbers, as only asyncio's thread writes and reads them:
    the library's own take two locks each time, a tenth of what a streamed token costs."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self.generated = 0
        self._since = time()
        self._gaps = [0] * (len(BETWEEN_TOKENS_BUCKETS) + 1)
        self._seconds = 0.0

    def gap(self, seconds: float, updates: int) -> None:
        """updates: how many came at its end; nothing lies between these."""
        self._gaps[bisect_left(BETWEEN_TOKENS_BUCKETS, seconds)] += 1
        self._gaps[0] += updates - 1
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=LABELS)
        tokens.add_metric(self._labels, self.generated, self._since)
        yield tokens
        gaps = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds",
            "Seconds between two updates of a sequence; one may bring several tokens.",
            labels=LABELS,
        )
        bounds = [*map(str, BETWEEN_TOKENS_BUCKETS), "+Inf"]
        below = list(zip(bounds, accumulate(self._gaps), strict=True))
        gaps.add_metric(self._labels, below, self._seconds)
        labels: dict[str, str] = dict(zip(LABELS, self._labels, strict=True))
        gaps.add_sample(f"{gaps.name}_created", labels, self._since)
        yield gaps


def _sizes(most: int) -> tuple[float, ...]:
    """vLLM's buckets for numbers of tokens: 1, 2, 5, 10, ... up to `most`."""
    steps = (digit * 10.0**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= most)


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(
        self, runner: EngineRunner, model_name: str, speculating: Speculating, engine: str = "0"
    ) -> None:
        """engine: the label that distinguishes several engines of the same model."""
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": engine}
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._success = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds",
            "Seconds that a sequence waited for a slot.",
            REQUEST_BUCKETS,
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds",
            "Seconds from a sequence's slot to its first token.",
            REQUEST_BUCKETS,
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds",
            "Seconds from a sequence's first token to its last.",
            REQUEST_BUCKETS,
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds",
            "Seconds from a sequence's slot to its end.",
            REQUEST_BUCKETS,
        )
        self._whole = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "Seconds from a request's arrival to the end of a sequence of it.",
            REQUEST_BUCKETS,
        )
        sizes = _sizes(runner.engine.target.max_len)
        self._prompt_sizes = self._histogram(
            "vllm:request_prompt_tokens", "Tokens of a sequence's prompt.", sizes
        )
        self._answer_sizes = self._histogram(
            "vllm:request_generation_tokens", "Tokens of a sequence's answer.", sizes
        )
        self._tokens = TokenCollector(tuple(self._labels.values()))
        self.registry.register(self._tokens)
        for reason in ("stop", "length", "abort", "error"):  # so that a rate starts from zero
            self._success.labels(**self._labels, finished_reason=reason)
        self.registry.register(EngineCollector(runner, tuple(self._labels.values()), speculating))

    def queued(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def first_token(self, seconds: float, since_seated: float) -> None:
        self._first_token.observe(seconds)
        self._prefill.observe(since_seated)

    def decoded(self, seconds: float) -> None:
        self._decode.observe(seconds)

    def between_tokens(self, seconds: float, updates: int) -> None:
        self._tokens.gap(seconds, updates)

    def generated(self, tokens: int) -> None:
        self._tokens.generated += tokens

    def inferred(self, seconds: float) -> None:
        self._inference.observe(seconds)

    def read(self, prompt_tokens: int) -> None:
        self._prompt.inc(prompt_tokens)

    def finished(self, reason: str, seconds: float, prompt_tokens: int, answer_tokens: int) -> None:
        """Count an end by vLLM's reasons: stop, length, abort or error. seconds: since the request
        came."""
        self._whole.observe(seconds)
        self._prompt_sizes.observe(prompt_tokens)
        self._answer_sizes.observe(answer_tokens)
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, help_text, LABELS, registry=self.registry, buckets=buckets)
        return made.labels(**self._labels)

    def _counter(self, name: str, help_text: str) -> Counter:
        counter = Counter(name, help_text, LABELS, registry=self.registry)
        return counter.labels(**self._labels)

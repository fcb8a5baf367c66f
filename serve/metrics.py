"""Prometheus metrics under vLLM's names, so that its dashboards work here unchanged."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.runner import EngineRunner
from specdec.core.policy.choice import Policy
from specdec.core.policy.report import alternatives, what_if

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)  # vLLM's, so that histograms of both can be added up
LABELS = ("model_name", "engine")


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, runner: EngineRunner, model_name: str, k: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            LABELS,
            registry=self.registry,
            buckets=FIRST_TOKEN_BUCKETS,
        ).labels(**self._labels)
        for reason in ("stop", "length", "abort", "error"):  # so that a rate starts from zero
            self._success.labels(**self._labels, finished_reason=reason)
        self.registry.register(_EngineCollector(runner, tuple(self._labels.values()), k))

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        self._first_token.observe(seconds)
        self._prompt.inc(prompt_tokens)

    def generated(self, tokens: int) -> None:
        self._generated.inc(tokens)

    def finished(self, reason: str) -> None:
        """Count an end by vLLM's reasons: stop, length, abort or error."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str) -> Counter:
        counter = Counter(name, help_text, LABELS, registry=self.registry)
        return counter.labels(**self._labels)


class _EngineCollector(Collector):
    """Reads the engine's own counts when scraped: nothing is counted twice.

    The engine thread writes meanwhile, so two counters of one scrape may be a cycle apart.
    """

    def __init__(self, runner: EngineRunner, labels: tuple[str, ...], k: int) -> None:
        self._runner, self._labels, self._k = runner, labels, k

    def collect(self) -> Iterator[Metric]:
        counts = self._runner.engine.acceptance
        # A draft is a verify pass that had something to verify (vLLM's v1 scheduler counts so);
        # a guess always begins at position 0.
        drafts = counts.drafted_at[0]
        yield self._count("num_drafts", "Number of spec decoding drafts.", drafts)
        yield self._count("num_draft_tokens", "Number of draft tokens.", counts.drafted)
        yield self._count("num_accepted_tokens", "Number of accepted tokens.", counts.accepted)
        yield self._per_position()
        cache = self._runner.engine.prefix_cache
        queries, hits = (cache.queries, cache.hits) if cache else (0, 0)
        yield self._counter("prefix_cache_queries", "Prompt tokens that were looked up.", queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens that needed no prefill.", hits)
        policy = self._runner.engine.drafting.policy
        if policy is not None:
            yield from self._choices(policy)
        yield self._gauge("running", "Sequences that hold a slot.", self._runner.running)
        yield self._gauge("waiting", "Sequences that wait for a slot.", self._runner.waiting)

    def _choices(self, policy: Policy) -> Iterator[Metric]:
        """What `auto` knows; no other engine has it, so the names are ours."""
        taken = CounterMetricFamily(
            "specdec:drafter_rows",
            "Rows of cycles that took a drafter's guesses.",
            labels=(*LABELS, "drafter"),
        )
        for drafter, rows in sorted(policy.chosen.items()):
            taken.add_metric((*self._labels, drafter), rows)
        yield taken
        alone = GaugeMetricFamily(
            "specdec:drafter_tokens_per_pass",
            "Tokens per verify pass, had this drafter alone guessed k of them.",
            labels=(*LABELS, "drafter", "k"),
        )
        for drafter, k in alternatives(policy):
            tau = what_if(policy, drafter, k, rows=1)["tau"]
            alone.add_metric((*self._labels, drafter, str(k)), tau)
        yield alone
        seconds = GaugeMetricFamily(
            "specdec:cycle_seconds",
            "Median seconds of a cycle by rows, tokens verified and guesses by weights.",
            labels=(*LABELS, "rows", "depth", "drafted"),
        )
        for work, median in policy.costs.rows():
            seconds.add_metric((*self._labels, *map(str, work)), median)
        yield seconds

    def _count(self, name: str, help_text: str, value: int) -> Metric:
        return self._counter(f"spec_decode_{name}", help_text, value)

    def _counter(self, name: str, help_text: str, value: int) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", help_text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _per_position(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens per draft position.",
            labels=(*LABELS, "position"),
        )
        accepted_at = self._runner.engine.acceptance.accepted_at
        for position in range(self._k):
            family.add_metric((*self._labels, str(position)), accepted_at[position])
        return family

    def _gauge(self, name: str, help_text: str, value: int) -> Metric:
        family = GaugeMetricFamily(f"vllm:num_requests_{name}", help_text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

"""What the engine itself counts, read when /metrics is asked: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.reads import Speculating
from serve.runner import EngineRunner

LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """vLLM's names where it has them, `specdec:` for what it has not.

    The engine thread writes meanwhile, so two counters of one scrape may be a cycle apart.
    """

    def __init__(
        self, runner: EngineRunner, labels: tuple[str, ...], speculating: Speculating
    ) -> None:
        self._runner, self._labels, self._speculating = runner, labels, speculating
        self._highest: dict[tuple[str, int], int] = {}

    def collect(self) -> Iterator[Metric]:
        yield from self._speculation()
        yield from self._guesses()
        yield from self._times()
        yield from self._queue()
        cache = self._runner.engine.prefix_cache
        queries, hits = (cache.queries, cache.hits) if cache else (0, 0)
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens that were looked up.", queries
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens that needed no prefill.", hits)

    def _speculation(self) -> Iterator[Metric]:
        counts = self._runner.engine.acceptance
        # A draft is a verify pass that had something to verify (vLLM's v1 scheduler counts so);
        # a guess always begins at position 0.
        for name, help_text, value in (
            ("num_drafts", "Number of spec decoding drafts.", counts.drafted_at[0]),
            ("num_draft_tokens", "Number of draft tokens.", counts.drafted),
            ("num_accepted_tokens", "Number of accepted tokens.", counts.accepted),
        ):
            yield self._counter(f"vllm:spec_decode_{name}", help_text, value)
        yield self._labelled(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens per draft position.",
            ("position",),
            [((str(i),), counts.accepted_at[i]) for i in range(self._speculating.k)],
        )
        yield self._counter(
            "specdec:verify_passes", "Verify passes: one per row and cycle.", counts.cycles
        )
        yield self._counter("specdec:verified_tokens", "Tokens that they emitted.", counts.emitted)

    def _guesses(self) -> Iterator[Metric]:
        """By who guessed, and position."""
        positions = range(self._speculating.k)
        for name, help_text, of in (
            ("draft", "Guesses, by who made them and position in the draft.", "drafted_at"),
            ("accepted", "Those of them that were accepted.", "accepted_at"),
        ):
            samples = [sample for i in positions for sample in self._guesses_at(of, i)]
            yield self._labelled(
                f"specdec:{name}_tokens", help_text, ("drafter", "position"), samples
            )

    def _guesses_at(self, of: str, position: int) -> Iterator[tuple[tuple[str, str], int]]:
        """What was counted at one position; the drafter's own is the rest of all."""
        engine, name = self._runner.engine, self._speculating.name
        rest = getattr(engine.acceptance, of)[position]
        for guesser, guesses in engine.led.items():
            count = getattr(guesses, of)[position]
            rest -= count
            yield (name(guesser), str(position)), count
        # a cycle may come between two readings: a counter must not fall for that
        key = of, position
        self._highest[key] = max(rest, self._highest.get(key, 0))
        yield (name("drafter"), str(position)), self._highest[key]

    def _times(self) -> Iterator[Metric]:
        times = self._runner.engine.times
        yield self._labelled(
            "specdec:engine_seconds",
            "Where the engine's time goes: prefill; draft, verify and learn of cycles that the "
            "host drives; device, whole cycles of a device loop; host, all else.",
            ("part",),
            [((part,), value) for part, value in times.seconds.items()],
        )
        if times.plain_costs is not None:
            yield self._counter(
                "specdec:plain_seconds",
                "Seconds that plain decoding would have taken for the same tokens, by its step's "
                "cost as measured at the start.",
                times.plain,
            )

    def _queue(self) -> Iterator[Metric]:
        runner = self._runner
        for name, help_text, value in (
            ("vllm:num_requests_running", "Sequences that hold a slot.", runner.running),
            ("vllm:num_requests_waiting", "Sequences that wait for a slot.", runner.waiting),
            ("specdec:slots", "Sequences that can decode together.", runner.engine.target.slots),
        ):
            family = GaugeMetricFamily(name, help_text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        return self._labelled(name, help_text, (), [((), value)])

    def _labelled(
        self,
        name: str,
        help_text: str,
        labels: tuple[str, ...],
        samples: Iterable[tuple[tuple[str, ...], float]],
    ) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=(*LABELS, *labels))
        for values, value in samples:
            family.add_metric((*self._labels, *values), value)
        return family

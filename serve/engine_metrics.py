"""Metrics that the engine counts itself: they are read at each scrape of /metrics, not copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.cycle_reports import Speculating
from serve.runner import EngineRunner
from specdec.core.policy.choice import Policy
from specdec.core.policy.report import alternatives, what_if

LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """Metrics have vLLM's names where vLLM has them, else the prefix `specdec:`.

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
        yield from self._drafts()
        yield from self._times()
        yield from self._queue()
        yield from self._room()
        if (policy := self._runner.engine.drafting.policy) is not None:
            yield from self._choices(policy)
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
        """Drafted and accepted tokens, by source of the guess and position in the draft."""
        positions = range(self._speculating.k)
        for name, help_text, of in (
            ("draft", "Draft tokens by source and position in the draft.", "drafted_at"),
            ("accepted", "Accepted draft tokens by source and position.", "accepted_at"),
        ):
            samples = [sample for i in positions for sample in self._guesses_at(of, i)]
            yield self._labelled(
                f"specdec:{name}_tokens", help_text, ("drafter", "position"), samples
            )

    def _guesses_at(self, of: str, position: int) -> Iterator[tuple[tuple[str, str], int]]:
        """The counts at one position by source: `engine.forced` has those of grammars and
        predictions; the drafter's own are the total less these."""
        engine, name = self._runner.engine, self._speculating.name
        rest = getattr(engine.acceptance, of)[position]
        for guesser, guesses in engine.forced.items():
            count = getattr(guesses, of)[position]
            rest -= count
            yield (name(guesser), str(position)), count
        # The engine may run a cycle between two of these reads; a counter must never decrease.
        key = of, position
        self._highest[key] = max(rest, self._highest.get(key, 0))
        yield (name("drafter"), str(position)), self._highest[key]

    def _drafts(self) -> Iterator[Metric]:
        """Verify passes and what they emitted, by the source of the draft's first guess."""
        drafts = sorted(self._runner.engine.drafts.items())
        for name, help_text, of in (
            (
                "passes",
                "Verify passes by source of the draft's first guess; none: no guess.",
                "passes",
            ),
            ("verified_tokens", "Tokens that they emitted.", "emitted"),
        ):
            samples: Counter[str] = Counter()
            for source, counts in drafts:
                samples[self._speculating.name(source)] += getattr(counts, of)
            yield self._labelled(
                f"specdec:drafter_{name}",
                help_text,
                ("drafter",),
                [((drafter,), count) for drafter, count in samples.items()],
            )

    def _times(self) -> Iterator[Metric]:
        times = self._runner.engine.times
        yield self._labelled(
            "specdec:engine_seconds",
            "Engine time by part: prefill; draft, verify and learn in cycles of the host loop; "
            "device, whole cycles of a device loop; host, everything else.",
            ("part",),
            [((part,), value) for part, value in times.seconds.items()],
        )
        if times.plain_costs is not None:
            yield self._counter(
                "specdec:plain_seconds",
                "Seconds that plain decoding would have taken for the same tokens, from the cost "
                "of its step measured at start-up.",
                times.plain,
            )

    def _choices(self, policy: Policy) -> Iterator[Metric]:
        """Statistics of the drafter `auto`: its choices, its estimates and its measured costs."""
        yield self._labelled(
            "specdec:drafter_rows",
            "Rows of cycles that verified this drafter's draft.",
            ("drafter",),
            [((drafter,), rows) for drafter, rows in sorted(policy.chosen.items())],
        )
        alone = GaugeMetricFamily(
            "specdec:drafter_tokens_per_pass",
            "Estimated tokens per verify pass if this drafter alone drafted k tokens.",
            labels=(*LABELS, "drafter", "k"),
        )
        for drafter, k in alternatives(policy):
            tau = what_if(policy, drafter, k, rows=1)["tau"]
            alone.add_metric((*self._labels, drafter, str(k)), tau)
        yield alone
        seconds = GaugeMetricFamily(
            "specdec:cycle_seconds",
            "Median seconds of a cycle by rows, verified tokens, tokens drafted with weights and "
            "tokens of all texts.",
            labels=(*LABELS, "rows", "depth", "drafted", "context"),
        )
        for work, median in policy.costs.rows():
            seconds.add_metric((*self._labels, *map(str, work)), median)
        yield seconds

    def _queue(self) -> Iterator[Metric]:
        runner = self._runner
        for name, help_text, value in (
            ("vllm:num_requests_running", "Sequences that hold a slot.", runner.running),
            ("vllm:num_requests_waiting", "Sequences that wait for a slot.", runner.waiting),
            (
                "specdec:num_requests_prefilling",
                "Sequences in slots of which the prompt is being read.",
                runner.prefilling,
            ),
            ("specdec:num_requests_decoding", "Sequences in slots that decode.", runner.decoding),
            ("specdec:slots", "Sequences that can decode together.", runner.engine.target.slots),
        ):
            family = GaugeMetricFamily(name, help_text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _room(self) -> Iterator[Metric]:
        """Room for K/V: pages that sequences share, or a whole slot for each."""
        runner = self._runner
        pages, slots = runner.engine.scheduler.pages, runner.engine.target.slots
        used = runner.running / slots if pages is None else 1 - pages.free / pages.plan.total
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc",
            "Share of the room for K/V that sequences hold; 1 means all.",
            labels=LABELS,
        )
        usage.add_metric(self._labels, used)
        yield usage
        yield self._counter(
            "vllm:num_preemptions",
            "Sequences that left their slots for others' texts, to be read again later.",
            runner.engine.gave_way,
        )

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

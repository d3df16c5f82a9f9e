"""What Prometheus reads: requests and times seen by the server, and the engine's own counters at each scrape.

Every app has a registry of its own, so that two of them in one process (tests) do not add up.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stretto.engine.request import Completion, EngineStats
from stretto.serve.limits import Gate
from stretto.serve.openai import Job

# From a token on a GPU to a queue on a laptop; each step about doubles.
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_COUNTERS = {
    "prompt_tokens": "Prompt tokens computed, prefix-cache hits excluded",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "output_tokens": "Tokens sampled",
    "num_steps": "Steps of the engine",
    "num_preemptions": "Sequences that lost their pages and were computed again",
    "drafted_tokens": "Tokens drafted by self-speculation",
    "accepted_tokens": "Drafted tokens that were accepted",
}
_GAUGES = {
    "num_running": "Sequences being computed",
    "num_waiting": "Sequences queued in the engine",
    "num_pages": "Pages of the cache",
    "num_free_pages": "Pages free, or cached and not in use",
    "num_cached_pages": "Pages of the prefix cache",
    "weight_version": "Version of the weights",
}


class _EngineCollector(Collector):
    """Renders the stats that the last scrape asked the engine for."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterable[Metric]:
        if self.stats is None:
            return
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(
                f"stretto_engine_{name.removeprefix('num_')}", text, value=getattr(self.stats, name)
            )
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"stretto_engine_{name}", text, value=getattr(self.stats, name))


class Metrics:
    """Counters and histograms of one app."""

    def __init__(self, gate: Gate) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self._engine = _EngineCollector()
        registry.register(self._engine)
        self.requests = Counter(
            "stretto_http_requests", "Answers sent, by path and status", ["path", "status"], registry=registry
        )
        self.gone = Counter(
            "stretto_http_gone", "Requests whose client went away or stopped reading", ["path"], registry=registry
        )
        open_requests = Gauge("stretto_http_open", "Generating requests open now", registry=registry)
        open_requests.set_function(lambda: gate.num_open)
        self.level = Gauge(
            "stretto_elastic_level", "Rung new requests get: 0 is the target, the last the floor", registry=registry
        )
        self.refused = Counter("stretto_elastic_refused", "Requests refused on the floor", registry=registry)
        self.given = Counter(
            "stretto_elastic_requests",
            "Requests by the Subnet they got and why",
            ["subnet", "reason"],
            registry=registry,
        )
        self.flops = Counter("stretto_flops", "FLOPs spent, by Subnet", ["subnet"], registry=registry)
        self.tokens = Counter("stretto_output_tokens", "Tokens answered, by Subnet", ["subnet"], registry=registry)
        self.first_token_s = Histogram(
            "stretto_first_token_seconds", "Arrival to first token", buckets=_SECONDS, registry=registry
        )
        self.queued_s = Histogram(
            "stretto_queued_seconds", "Arrival to first step", buckets=_SECONDS, registry=registry
        )
        self.total_s = Histogram("stretto_total_seconds", "Arrival to last token", buckets=_SECONDS, registry=registry)
        self.token_s = Histogram(
            "stretto_token_seconds",
            "Time between tokens, mean of a choice",
            buckets=_SECONDS,
            registry=registry,
        )

    def finished(self, job: Job, done: Completion) -> None:
        """Note a finished choice."""
        use = done.usage
        # Presets only: any axes a client may send as a label would let it grow our memory.
        subnet = _label(job)
        self.flops.labels(subnet).inc(use.flops)
        self.tokens.labels(subnet).inc(use.output_tokens)
        self.queued_s.observe(use.queued_s)
        self.total_s.observe(use.total_s)
        if use.output_tokens:
            self.first_token_s.observe(use.first_token_s)
        if use.output_tokens > 1:
            self.token_s.observe((use.total_s - use.first_token_s) / (use.output_tokens - 1))

    def started(self, job: Job) -> None:
        """Note a request and the Subnet it got."""
        self.given.labels(_label(job), job.given.reason).inc()

    def render(self, stats: EngineStats | None) -> bytes:
        """The exposition text; ``stats`` None (a dead engine) leaves the engine's metrics out."""
        self._engine.stats = stats
        return generate_latest(self._registry)


def _label(job: Job) -> str:
    return job.given.name if job.given.name.isidentifier() else "other"

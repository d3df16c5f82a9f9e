"""Prometheus metrics: requests and times measured by the server, and the engine's counters.

Every application has its own registry, so that two applications in one process (tests) do not share counters.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stretto.engine.request import Completion, EngineStats
from stretto.server.elastic import Given, LoadControl
from stretto.server.limits import Gate

# Buckets from the time of a token on a GPU to that of a queue on a laptop, each about twice the one before.
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_COUNTERS = {
    "prompt_tokens": "Prompt tokens computed, prefix-cache hits excluded",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "output_tokens": "Tokens sampled",
    "num_steps": "Steps of the engine",
    "num_preemptions": "Preempted sequences, which are recomputed",
    "num_timeouts": "Requests that found no place in the batch within the time limit",
}
_GAUGES = {
    "num_running": "Sequences being computed",
    "num_waiting": "Sequences queued in the engine",
    "num_pages": "Pages of the cache",
    "num_free_pages": "Pages free, or cached and not in use",
    "num_cached_pages": "Pages of the prefix cache",
    "cache_bytes": "Size of the cache",
    "max_len": "Tokens that prompt and completion of one request may have together",
    "weight_version": "Version of the weights",
}


class Metrics(Collector):
    """Counters and histograms of one application, and a collector of the engine's counters."""

    def __init__(self, gate: Gate, control: LoadControl) -> None:
        self._stats: EngineStats | None = None
        self._registry = registry = CollectorRegistry()
        registry.register(self)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"stretto_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"stretto_{name}_seconds", text, buckets=_SECONDS, registry=registry)

        self.requests = counter("http_requests", "Answers sent, by path and status", "path", "status")
        self.gone = counter("http_gone", "Requests whose client went away or stopped reading", "path")
        Gauge("stretto_http_open", "Open requests", registry=registry).set_function(lambda: gate.num_open)
        held = Gauge("stretto_http_body_bytes", "Bytes of request bodies held", registry=registry)
        held.set_function(lambda: gate.num_body_bytes)
        text = "Steps below the default size that new requests get; 0: none"
        Gauge("stretto_elastic_level", text, registry=registry).set_function(lambda: control.level)
        self.refused = counter("elastic_refused", "Requests refused at the floor")
        self._given = counter("elastic_requests", "Requests by size and reason", "subnet", "reason")
        self._flops = counter("flops", "FLOPs, by size", "subnet")
        self._tokens = counter("output_tokens", "Output tokens, by size", "subnet")
        self._first_token_s = seconds("first_token", "Arrival to first token")
        self._queued_s = seconds("queued", "Arrival to first step")
        self._total_s = seconds("total", "Arrival to last token")
        self._token_s = seconds("token", "Time between tokens, mean of a choice")

    def started(self, given: Given) -> None:
        """Count a request with its Subnet."""
        self._given.labels(_label(given), given.reason).inc()

    def finished(self, given: Given, done: Completion) -> None:
        """Count a finished choice."""
        use = done.usage
        self._flops.labels(_label(given)).inc(use.flops)
        self._tokens.labels(_label(given)).inc(use.output_tokens)
        self._queued_s.observe(use.queued_s)
        self._total_s.observe(use.total_s)
        if use.output_tokens:
            self._first_token_s.observe(use.first_token_s)
        if use.output_tokens > 1:
            self._token_s.observe((use.total_s - use.first_token_s) / (use.output_tokens - 1))

    def render(self, stats: EngineStats | None) -> bytes:
        """The exposition text; ``stats`` None (a dead engine) leaves the engine's metrics out."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's counters that were passed to `render`. Called by the registry."""
        for kind, texts in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, text in texts.items() if self._stats is not None else ():
                plain = name.removeprefix("num_") if kind is CounterMetricFamily else name
                yield kind(f"stretto_engine_{plain}", text, value=getattr(self._stats, name))


def _label(given: Given) -> str:
    """Label of a size: a preset's name, else ``other``. Clients can send arbitrary axes, and each label takes memory."""
    return given.name if given.name.isidentifier() else "other"

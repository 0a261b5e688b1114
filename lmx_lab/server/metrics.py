"""The route ``GET /metrics``: metrics of the engine and of requests, in the formats of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmx_lab.engine import ModelManager
from lmx_lab.engine.lookup import public_id
from lmx_lab.server.requests import RequestEnd
from lmx_lab.values.engine import COUNTERS
from lmx_lab.values.outputs import GenerationReport

FORMATS = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")}
"""Content types of the response; the ``Accept`` header selects one."""
# From 1 ms, a token of a small model, to 100 s, the first token of a long prompt on a CPU.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)


class Metrics:
    """The metrics of one server. They are not global, so that two servers in one process have separate metrics.

    No label has a value that a caller can choose, so the number of time series is limited: one per outcome and error
    code, and a few for each model in memory.
    """

    def __init__(self, manager: ModelManager) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(manager))
        self._requests = Counter(
            "lmx_lab_requests",
            "Requests that have ended with stop, length, tool_calls, cancelled, or error and its code. The kind is "
            "embedding, rerank, chat, which includes plain completions, or internal, such as scoring an answer for a "
            "panel. For chat, each choice of each prompt counts. "
            "A refused request counts once, unless its body was malformed.",
            ("kind", "outcome", "code"),
            registry=self._registry,
        )
        self._queue_s = self._histogram("queue", "From a request's arrival to its slot.")
        self._ttft_s = self._histogram("time_to_first_token", "From a request's arrival to its first token.")
        self._token_s = self._histogram("time_per_output_token", "Decoding time of a request, for each output token.")
        self._request_s = self._histogram("request", "From a request's arrival to its last token.")
        self._encode_s = Histogram(
            "lmx_lab_encode_seconds",
            "From the arrival of a request for embeddings or scores to its whole result. Without failed requests.",
            ("kind",),
            buckets=BUCKETS_S,
            registry=self._registry,
        )

    def _histogram(self, name: str, what: str) -> Histogram:
        text = f"{what} Only generations that ended with stop, length or tool_calls are included."
        return Histogram(f"lmx_lab_{name}_seconds", text, buckets=BUCKETS_S, registry=self._registry)

    def observe(self, end: RequestEnd) -> None:
        """Count the end of a request. May be called from any thread."""
        event, report = end.event, end.report
        self._requests.labels(kind=event.kind, outcome=event.finish_reason, code=event.code or "").inc()
        if event.kind == "internal":
            return
        if isinstance(report, GenerationReport):
            self._queue_s.observe(report.queue_s)
            self._request_s.observe(report.total_s)
            if report.output_tokens:
                self._ttft_s.observe(report.ttft_s)
                self._token_s.observe(report.decode_s / report.output_tokens)
        elif report is not None:
            self._encode_s.labels(kind=event.kind).observe(report.total_s)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the current metrics in the format that an Accept header requests, and its content type."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):
            # The header contains an invalid version, which prometheus_client 0.26 compares as a string.
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type


class _EngineCollector(Collector):
    """Reads the engine's snapshot at each scrape, so that no count is kept twice and an idle server does no work."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        now = self._manager.snapshot
        up = self._manager.alive and now.state != "dead"
        stalled = now.stalled(time.perf_counter(), self._manager.settings.stall_limit_s)
        yield _gauge("engine_up", "Whether the engine of the loaded model is running.", up)
        yield _gauge(
            "engine_stalled", "Whether requests are waiting and the engine has made no step for too long.", stalled
        )
        yield _gauge("uptime_seconds", "Seconds since the server was created.", self._manager.uptime_s)
        yield _gauge("requests_active", "Requests that are being computed.", now.active_requests)
        yield _gauge("requests_queued", "Requests that wait for a slot.", now.queued_requests)
        for name, what in COUNTERS.items():
            yield CounterMetricFamily(f"lmx_lab_{name}", what, value=getattr(now.totals, name))
        yield _gauge("memory_used_bytes", "Memory that the engines use.", now.memory_used_bytes)
        yield _gauge("memory_peak_bytes", "Sum of the peak memory of each engine.", now.memory_peak_bytes)
        yield _gauge("memory_total_bytes", "Memory of the device.", now.memory_total_bytes)
        yield _gauge(
            "memory_footprint_bytes",
            "Physical memory of the server and of llama.cpp's processes.",
            now.memory_footprint_bytes,
        )
        yield _gauge(
            "memory_limit_bytes",
            "Limit of the footprint, which is lower while memory is short.",
            now.memory_limit_bytes,
        )
        yield _gauge(
            "memory_pressure",
            "Whether the machine or the container is short of memory.",
            now.memory_pressure is not None,
        )
        yield _gauge("model_memory_bytes", "Memory of the loaded model.", now.model_memory_bytes)
        yield _gauge("prefix_cache_bytes", "Memory of the KV caches of ended requests.", now.prefix_cache_bytes)
        loaded = GaugeMetricFamily("lmx_lab_model_loaded", "1 for the loaded model.", labels=("model",))
        if now.model is not None:
            loaded.add_metric((public_id(now.model, local=False),), 1)
        yield loaded
        resident = GaugeMetricFamily(
            "lmx_lab_resident_memory_bytes", "Memory of each model in memory.", labels=("model",)
        )
        running = GaugeMetricFamily("lmx_lab_resident_requests", "Requests of each model in memory.", labels=("model",))
        # Models that were loaded by their paths may have the same public id.
        sums: dict[str, tuple[int, int]] = {}
        for state in now.models:
            name = public_id(state.entry.id, local=False)
            memory_bytes, requests = sums.get(name, (0, 0))
            sums[name] = memory_bytes + state.memory_bytes, requests + state.requests
        for name, (memory_bytes, requests) in sums.items():
            resident.add_metric((name,), memory_bytes)
            running.add_metric((name,), requests)
        yield from (resident, running)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"lmx_lab_{name}", what, value=float(value))


def metrics_routes(metrics: Metrics) -> APIRouter:
    """Return the router of ``/metrics``."""
    router = APIRouter(tags=["admin"])

    @router.get("/metrics", response_class=Response, responses={200: {"content": FORMATS}})
    async def figures(request: Request) -> Response:
        """Return the server's metrics in a format of Prometheus."""
        body, content_type = metrics.render(",".join(request.headers.getlist("accept")))
        return Response(body, headers={"content-type": content_type})

    return router

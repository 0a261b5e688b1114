"""Export requests as OpenTelemetry spans with the attributes of the GenAI conventions, over OTLP/HTTP.

The module imports the SDK, which is an optional package, so it is imported only if the setting ``otel`` is not ``off``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from lmx_lab.engine.model_lookup import public_id
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.guard import Scope
from lmx_lab.http.middleware import VERSION
from lmx_lab.server.generation import RequestEnd
from lmx_lab.server.span_attributes import (
    PROVIDER,
    Attributes,
    answer_attributes,
    call_attributes,
    content_attributes,
    http_attributes,
    request_attributes,
)
from lmx_lab.values.encoding import EncodeReport
from lmx_lab.values.timeline import phase_durations

log = logging.getLogger(__name__)
EXPORTER_LOG = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
ENDPOINT, TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
DEFAULT_ENDPOINT = "http://localhost:4318"
CLOSE_S = 3.0
"""Time for the collector to accept the last spans when the server stops."""
RETRY_S = 30.0
"""Time for which spans are dropped after the collector has not accepted some."""
CHOICES_WITH_PHASES = 16
"""Number of answers of a request whose phases are exported. The others count only in the attributes."""


@dataclass(frozen=True)
class _Ended:
    """The end of a generation, an embedding or a rerank, with its times as Unix times in nanoseconds."""

    end: RequestEnd
    arrived_ns: int
    ended_ns: int


@dataclass(frozen=True)
class _Running:
    """A request over HTTP or a WebSocket that has not ended."""

    began_ns: int
    ends: list[_Ended] = field(default_factory=list)


class RequestSpans:
    """Exports one span for each request, with a child for each phase of its answers.

    A request over HTTP is a span of kind ``SERVER``, whose parent is the caller's span if it has sent ``traceparent``.
    A request of the notebook is an ``INTERNAL`` span. Requests without a generation, an embedding or a rerank are not
    exported, nor are those whose body was malformed.

    A thread of the SDK sends the spans. At most ``OTEL_BSP_MAX_QUEUE_SIZE`` of them wait, 2,048 by default; if there
    are more, the oldest are dropped.

    Args:
        content: Whether the texts of prompts and answers are exported.

    Raises:
        InvalidRequestError: a variable of OpenTelemetry in the environment has a value that is not supported.
    """

    def __init__(self, *, content: bool) -> None:
        self.content = content
        self._exporter = _Exporter(_endpoint(os.environ))
        self._processor = BatchSpanProcessor(self._exporter)
        resource = Resource.create({SERVICE_VERSION: VERSION})
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: PROVIDER}))
        # Not the global provider, which belongs to the program that runs the server.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("lmx_lab", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._running: dict[str, _Running] = {}

    def begin(self, scope: Scope) -> None:
        """Called at the start of a request over HTTP or a WebSocket."""
        self._running[scope["lmx_lab.request_id"]] = _Running(time.time_ns())

    def observe(self, end: RequestEnd) -> None:
        """Called at the end of each generation, embedding and rerank, on any thread."""
        ended = _with_times(end)
        running = self._running.get(end.request_id)
        if running is not None:
            running.ends.append(ended)
        else:
            self._export([ended], SpanKind.INTERNAL, Context(), {}, (ended.arrived_ns, ended.ended_ns))

    def end(self, scope: Scope, status: int | None) -> None:
        """Called at the end of a request.

        Args:
            status: The HTTP status; None if the client disconnected before the response.
        """
        running = self._running.pop(scope["lmx_lab.request_id"], None)
        if running is None or not running.ends:
            return
        ends = sorted(running.ends, key=lambda each: each.end.index)
        parent = self._propagator.extract(Headers(scope=scope), Context())
        self._export(ends, SpanKind.SERVER, parent, http_attributes(scope, status), (running.began_ns, time.time_ns()))

    def close(self) -> None:
        """Send the spans that wait, for ``CLOSE_S`` at most. Blocks. Idempotent."""
        sending = threading.Thread(target=self._processor.shutdown, name="lmx-lab last spans", daemon=True)
        with suppress(RuntimeError):  # Python is exiting and starts no threads any more.
            sending.start()
            sending.join(CLOSE_S)
        self._exporter.shutdown()
        if sending.is_alive():
            # It ends soon, because the pauses between attempts have ended.
            sending.join(CLOSE_S)
        EXPORTER_LOG.removeFilter(self._exporter.is_logged)

    def _export(
        self, ends: Sequence[_Ended], kind: SpanKind, parent: Context, attributes: Attributes, times_ns: tuple[int, int]
    ) -> None:
        first, (began_ns, ended_ns) = ends[0].end, times_ns
        attributes |= call_attributes(first)
        model = attributes.get("gen_ai.request.model", public_id(first.model, local=False))
        name = f"{attributes['gen_ai.operation.name']!s} {model!s}".rstrip()
        span = self._tracer.start_span(name, parent, kind, attributes, start_time=min(began_ns, ends[0].arrived_ns))
        if span.is_recording():
            span.set_attributes(request_attributes(first))
            span.set_attributes(answer_attributes([each.end for each in ends]))
            if self.content:
                span.set_attributes(content_attributes([each.end for each in ends]))
            if (code := next((each.end.code for each in ends if each.end.code is not None), None)) is not None:
                span.set_attribute("error.type", code)
                span.set_status(StatusCode.ERROR)
            for each in ends[:CHOICES_WITH_PHASES]:
                self._export_phases(each, set_span_in_context(span, Context()), len(ends) > 1)
        span.end(ended_ns)

    def _export_phases(self, ended: _Ended, parent: Context, numbered: bool) -> None:
        at_ns = ended.arrived_ns
        for name, duration_s, attributes in _phases(ended):
            if numbered:
                attributes["lmx.choice.index"] = ended.end.index
            if duration_s > 0:
                span: Span = self._tracer.start_span(name, parent, attributes=attributes, start_time=at_ns)
                at_ns = min(at_ns + round(duration_s * 1e9), ended.ended_ns)
                span.end(at_ns)


class _Exporter(SpanExporter):
    """Sends spans to a collector. Logs one warning when it does not accept them, and a message when it does again.

    Args:
        endpoint: Address to which spans are sent.
    """

    def __init__(self, endpoint: str) -> None:
        self._inner = OTLPSpanExporter(endpoint=endpoint)
        parts = urlsplit(endpoint)
        # Without the user and the password that it may contain.
        self._shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._failed_at: float | None = None
        """When the collector did not accept spans (``time.monotonic``); None if it accepted the last ones."""
        self._thread: int | None = None
        """The thread that is sending."""
        self._is_shut_down = False
        EXPORTER_LOG.addFilter(self.is_logged)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._failed_at is not None and time.monotonic() - self._failed_at < RETRY_S:
            # Dropped at once, because the SDK would try again for 10 s, while its queue becomes full.
            return SpanExportResult.FAILURE
        self._thread = threading.get_ident()
        try:
            result = self._inner.export(spans)
        finally:
            self._thread = None
        if result is SpanExportResult.SUCCESS:
            if self._failed_at is not None:
                log.info("%s accepts spans again", self._shown)
            self._failed_at = None
            return result
        if self._failed_at is None:
            log.warning(
                "%s does not accept spans, so they are dropped; check that a collector for OTLP/HTTP runs there, or "
                "change %s",
                self._shown,
                ENDPOINT,
            )
        self._failed_at = time.monotonic()
        return result

    def is_logged(self, record: logging.LogRecord) -> bool:
        """Return False for the messages of the SDK about each attempt, which ``export`` replaces."""
        return record.thread != self._thread

    def shutdown(self) -> None:
        """End the pauses between attempts. Idempotent; may be called on any thread."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._inner.shutdown()


def _endpoint(environ: Mapping[str, str]) -> str:
    """Return the address to which spans are sent, according to the environment.

    Raises:
        InvalidRequestError: the address is not one of HTTP, or another protocol is required.
    """
    name = TRACES_ENDPOINT if environ.get(TRACES_ENDPOINT) else ENDPOINT
    given = environ.get(name) or DEFAULT_ENDPOINT
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequestError(
            f"{name} is not an address that begins with http:// or https://; set it to that of a collector for "
            f"OTLP/HTTP, such as {DEFAULT_ENDPOINT}",
            param="otel",
        )
    protocol = next((each for each in PROTOCOLS if environ.get(each)), None)
    if protocol is not None and environ[protocol] != PROTOCOL:
        raise InvalidRequestError(
            f"{protocol} is {environ[protocol]!r:.40}, but spans are sent with {PROTOCOL}; unset it, and use the "
            "collector's port for HTTP, which is usually 4318",
            param="otel",
        )
    return given if name == TRACES_ENDPOINT else f"{given.rstrip('/')}/v1/traces"


# Times


def _with_times(end: RequestEnd) -> _Ended:
    """Add the times of an end that is reported now. The engine has measured the arrival of the request."""
    now_ns, now = time.time_ns(), time.perf_counter()
    if end.steps is not None:
        elapsed_s = now - end.steps.arrived_at
    else:
        elapsed_s = end.report.total_s if end.report is not None else 0.0
    return _Ended(end, now_ns - round(elapsed_s * 1e9), now_ns)


def _phases(ended: _Ended) -> Iterator[tuple[str, float, Attributes]]:
    """Yield the name, the duration in seconds and the attributes of each phase, in their order without gaps."""
    end, report = ended.end, ended.end.report
    if isinstance(report, EncodeReport):
        yield "queued", report.queue_s, {}
        yield "compute", report.compute_s, {"lmx.tokens": report.tokens}
    elif end.steps is not None:
        measured = None if report is None else (report.queue_s, report.prefill_s, report.decode_s)
        elapsed_s = (ended.ended_ns - ended.arrived_ns) / 1e9
        steps = () if measured is not None else end.steps.steps()
        queue_s, prefill_s, decode_s = phase_durations(steps, elapsed_s=elapsed_s, report=measured)
        event = end.event()
        computed = event.prompt_tokens - (report.cached_tokens if report is not None else 0)
        yield "queued", queue_s, {}
        yield "prefill", prefill_s, {"lmx.tokens": computed}
        yield "decode", decode_s, {"lmx.tokens": event.completion_tokens}

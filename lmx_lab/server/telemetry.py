"""Export requests as OpenTelemetry spans with the attributes of the GenAI conventions, over OTLP/HTTP.

The OpenTelemetry SDK is an optional package, so this module is imported only if the setting ``otel`` is not ``off``.
The conventions are in development (github.com/open-telemetry/semantic-conventions-genai), so the SDK has no stable
constants for the names.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.re import parse_env_headers
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers

from lmx_lab.engine import ChatPrompt, EmbeddingRequest, GenerationRequest, InfillPrompt, TextPrompt
from lmx_lab.engine.lookup import public_id
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.guard import Scope
from lmx_lab.http.middleware import VERSION
from lmx_lab.server.requests import Exchange, RequestEnd
from lmx_lab.values.outputs import EncodeReport, GenerationReport, merge_deltas
from lmx_lab.values.timeline import phase_durations

log = logging.getLogger(__name__)
EXPORTER_LOG = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
ENDPOINT, TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
TRACES_HEADERS, HEADERS = "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"
HEADERS_LOG = logging.getLogger("opentelemetry.util.re")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OPERATIONS = {"embedding": "embeddings", "rerank": "rerank"}
"""Values of ``gen_ai.operation.name`` by kind, for requests that are not generations."""
TEXTS = ("content", "response", "arguments")
"""Fields of a message part that contain text."""
Attributes = dict[str, AttributeValue]


class RequestSpans:
    """Exports one span for each request, with a child for each phase of its answers.

    A request over HTTP is a span of kind ``SERVER``. Its parent is the caller's span if the request has the header
    ``traceparent``. A request of the notebook is an ``INTERNAL`` span. Requests without a generation, an embedding or a
    rerank are not exported, nor are requests with a malformed body.

    A thread of the SDK sends the spans. Its queue holds up to ``OTEL_BSP_MAX_QUEUE_SIZE`` spans, by default 2,048. If
    the queue is full, the oldest spans are dropped.

    Args:
        content: Whether the texts of prompts and answers are exported.
        retry_s: Time for which spans are dropped after the collector did not accept any.
        close_s: Maximum time to send the remaining spans when the server stops.
        last_attempt_s: Additional time for an attempt that is still running after ``close_s``.

    Raises:
        InvalidRequestError: an environment variable of OpenTelemetry has an unsupported value.
    """

    def __init__(
        self, *, content: bool, retry_s: float = 30.0, close_s: float = 3.0, last_attempt_s: float = 0.2
    ) -> None:
        self.content = content
        self._retry_s = retry_s
        self._close_s = close_s
        self._last_attempt_s = last_attempt_s
        self._endpoint = _endpoint(os.environ)
        _check_headers(os.environ)
        self._propagator = TraceContextTextMapPropagator()
        self._is_open = False
        self.open()

    def open(self) -> None:
        """Start to export again after ``close``. Does nothing if it was not closed.

        Raises:
            InvalidRequestError: an environment variable of OpenTelemetry has an unsupported value.
        """
        if self._is_open:
            return
        try:
            self._exporter = _Exporter(self._endpoint, self._retry_s)
            resource = Resource.create({SERVICE_VERSION: VERSION})
            if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
                resource = resource.merge(Resource({SERVICE_NAME: "lmx-lab"}))
            # Not the global provider, which belongs to the program that runs the server.
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._tracer = provider.get_tracer("lmx_lab", VERSION)
            # Starts the thread that sends the spans.
            self._processor = BatchSpanProcessor(self._exporter)
        except (ValueError, RuntimeError) as exc:
            names = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
            raise InvalidRequestError(
                f"the OpenTelemetry SDK does not accept its environment variables: {exc!s:.200}; correct or unset one "
                f"of {names:.500}",
                param="otel",
            ) from exc
        provider.add_span_processor(self._processor)
        EXPORTER_LOG.addFilter(self._exporter.is_logged)
        self._is_open = True

    def observe(self, end: RequestEnd) -> None:
        """Export a generation, an embedding or a rerank that belongs to no exchange. May be called on any thread."""
        if not end.in_exchange:
            self._export([end], SpanKind.INTERNAL, Context(), {}, (end.began_at, end.ended_at))

    def observe_exchange(self, exchange: Exchange, status: int | None) -> None:
        """Export a request over HTTP or a WebSocket that has ended. The status is None if there was no response."""
        if exchange.ends:
            ends = sorted(exchange.ends, key=lambda each: each.event.index)
            parent = self._propagator.extract(Headers(scope=exchange.scope), Context())
            attributes = http_attributes(exchange.scope, status)
            self._export(ends, SpanKind.SERVER, parent, attributes, (exchange.began_at, time.perf_counter()))

    def close(self) -> None:
        """Send the queued spans, which takes up to ``close_s``, and end the thread. Blocks. Idempotent."""
        self._is_open = False
        sending = threading.Thread(target=self._processor.shutdown, name="lmx-lab last spans", daemon=True)
        with suppress(RuntimeError):  # While Python exits, it does not start threads.
            sending.start()
            sending.join(self._close_s)
        self._exporter.shutdown()
        if sending.is_alive():
            # The shutdown has ended the pauses between attempts, so the thread ends soon if the collector responds.
            sending.join(self._last_attempt_s)

    def _export(
        self,
        ends: Sequence[RequestEnd],
        kind: SpanKind,
        parent: Context,
        attributes: Attributes,
        times: tuple[float, float],
    ) -> None:
        # The times of spans are measured with another clock.
        offset_ns = time.time_ns() - round(time.perf_counter() * 1e9)
        first, (began_at, ended_at) = ends[0], times
        attributes |= call_attributes(first)
        model = attributes.get("gen_ai.request.model", public_id(first.event.model, local=False))
        name = f"{attributes['gen_ai.operation.name']!s} {model!s}".rstrip()
        began_ns = offset_ns + round(min(began_at, first.began_at) * 1e9)
        span = self._tracer.start_span(name, parent, kind, attributes, start_time=began_ns)
        if span.is_recording():
            span.set_attributes(request_attributes(first))
            span.set_attributes(answer_attributes(ends))
            if self.content:
                span.set_attributes(content_attributes(ends))
            if (code := next((each.event.code for each in ends if each.event.code is not None), None)) is not None:
                span.set_attribute("error.type", code)
                span.set_status(StatusCode.ERROR)
            inside = set_span_in_context(span, Context())
            # The attributes count all answers, but at most 16 have phases.
            for each in ends[:16]:
                at = each.began_at
                for phase, duration_s, details in _phases(each):
                    if len(ends) > 1:
                        details["lmx.choice.index"] = each.event.index
                    if duration_s > 0:
                        start_ns = offset_ns + round(at * 1e9)
                        child: Span = self._tracer.start_span(phase, inside, attributes=details, start_time=start_ns)
                        at = min(at + duration_s, each.ended_at)
                        child.end(offset_ns + round(at * 1e9))
        span.end(offset_ns + round(ended_at * 1e9))


class _Exporter(SpanExporter):
    """Sends spans to a collector. Logs one warning when the collector stops accepting spans, and a message when it
    accepts them again.

    Args:
        endpoint: Address to which spans are sent.
        retry_s: Time for which spans are dropped after the collector did not accept any.
    """

    def __init__(self, endpoint: str, retry_s: float) -> None:
        self._retry_s = retry_s
        self._inner = OTLPSpanExporter(endpoint=endpoint)
        parts = urlsplit(endpoint)
        # Without the user name and the password that the address may contain.
        self._shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._failed_at: float | None = None
        """Time at which the collector last refused spans (``time.monotonic``); None if it accepted the last ones."""
        self._thread: int | None = None
        """The thread that is sending."""
        self._is_shut_down = False
        self._status: int | None = None
        """HTTP status of the last response that refused spans; None if there was no response."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._is_shut_down:
            return SpanExportResult.FAILURE
        if self._failed_at is not None and time.monotonic() - self._failed_at < self._retry_s:
            # Dropped immediately, because the SDK would retry for 10 s while its queue fills up.
            return SpanExportResult.FAILURE
        self._thread, self._status = threading.get_ident(), None
        try:
            result = self._inner.export(spans)
        finally:
            self._thread = None
            if self._is_shut_down:
                EXPORTER_LOG.removeFilter(self.is_logged)
        if result is SpanExportResult.SUCCESS:
            if self._failed_at is not None:
                log.info("%s accepts spans again", self._shown)
            self._failed_at = None
            return result
        if self._failed_at is None:
            status = "" if self._status is None else f" (HTTP status {self._status})"
            remedy = f"check that a collector for OTLP/HTTP runs there, or change {ENDPOINT}"
            if self._status in (401, 403):
                remedy = f"set {HEADERS} to the headers that the collector requires"
            log.warning("%s does not accept spans%s, so they are dropped; %s", self._shown, status, remedy)
        self._failed_at = time.monotonic()
        return result

    def is_logged(self, record: logging.LogRecord) -> bool:
        """Return False for the messages of the SDK about each attempt, which ``export`` replaces."""
        if record.thread == self._thread and isinstance(record.args, tuple):
            # The reason is not kept, because it can contain an address with a key.
            self._status = next((each for each in record.args if isinstance(each, int)), self._status)
        return record.thread != self._thread

    def shutdown(self) -> None:
        """End the pauses between attempts. Idempotent; may be called on any thread."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._inner.shutdown()
        if self._thread is None:
            EXPORTER_LOG.removeFilter(self.is_logged)


def _endpoint(environ: Mapping[str, str]) -> str:
    """Return the address to which spans are sent, according to the environment.

    Raises:
        InvalidRequestError: the address is not an HTTP address, or the environment names another protocol.
    """
    name = TRACES_ENDPOINT if environ.get(TRACES_ENDPOINT) else ENDPOINT
    default = "http://localhost:4318"
    given = (environ.get(name) or default).strip()
    try:
        parts = urlsplit(given)
        # Reading the port checks it.
        is_complete = bool(parts.hostname) and parts.port != 0 and parts.scheme in ("http", "https")
    except ValueError:
        is_complete = False
    if not is_complete or any(map(str.isspace, given)):
        raise InvalidRequestError(
            f"{name} is not a valid address that begins with http:// or https://; set it to that of a collector for "
            f"OTLP/HTTP, such as {default}",
            param="otel",
        )
    if name == ENDPOINT and ("?" in given or "#" in given):
        raise InvalidRequestError(
            f"{ENDPOINT} contains ? or #, but /v1/traces is appended to it; set {TRACES_ENDPOINT} to the whole address",
            param="otel",
        )
    protocol = next((each for each in PROTOCOLS if environ.get(each)), None)
    if protocol is not None and environ[protocol] != "http/protobuf":
        raise InvalidRequestError(
            f"{protocol} is {environ[protocol]!r:.40}, but spans are sent with http/protobuf; unset it, and use the "
            "collector's port for HTTP, which is usually 4318",
            param="otel",
        )
    return given if name == TRACES_ENDPOINT else f"{given.rstrip('/')}/v1/traces"


def _check_headers(environ: Mapping[str, str]) -> None:
    """Check the headers that are sent to the collector. The SDK would only log headers that it does not accept.

    Raises:
        InvalidRequestError: a header is malformed. The message does not contain the header, because it may be a key.
    """
    name = TRACES_HEADERS if TRACES_HEADERS in environ else HEADERS
    HEADERS_LOG.addFilter(_drop)
    try:
        is_valid = all(
            parse_env_headers(each, liberal=True) for each in environ.get(name, "").split(",") if each.strip()
        )
    finally:
        HEADERS_LOG.removeFilter(_drop)
    if not is_valid:
        raise InvalidRequestError(
            f"{name} has a header that is not of the form name=value, or whose value is not encoded as in a URL; "
            "correct it, for example authorization=Bearer%20KEY",
            param="otel",
        )


def _drop(_: logging.LogRecord) -> bool:
    return False


# Times


def _phases(end: RequestEnd) -> Iterator[tuple[str, float, Attributes]]:
    """Yield the name, the duration in seconds and the attributes of each phase, in order and without gaps."""
    report = end.report
    if isinstance(report, EncodeReport):
        yield "queued", report.queue_s, {}
        yield "compute", report.compute_s, {"lmx.tokens": report.tokens}
    elif end.steps is not None:
        measured = None if report is None else (report.queue_s, report.prefill_s, report.decode_s)
        steps = () if measured is not None else end.steps.steps()
        queue_s, prefill_s, decode_s = phase_durations(steps, elapsed_s=end.ended_at - end.began_at, report=measured)
        event = end.event
        computed = event.prompt_tokens - (report.cached_tokens if report is not None else 0)
        yield "queued", queue_s, {}
        yield "prefill", prefill_s, {"lmx.tokens": computed}
        yield "decode", decode_s, {"lmx.tokens": event.completion_tokens}


# Attributes


def call_attributes(end: RequestEnd) -> Attributes:
    """Return the attributes that a sampler can use to decide whether a request is exported."""
    is_chat = not isinstance(end.request, GenerationRequest) or isinstance(end.request.prompt, ChatPrompt)
    operation = OPERATIONS.get(end.event.kind, "chat" if is_chat else "text_completion")
    attributes: Attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "lmx-lab"}
    if end.request.model is not None:
        attributes["gen_ai.request.model"] = public_id(end.request.model, local=False)[:200]
    return attributes


def http_attributes(scope: Scope, status: int | None) -> Attributes:
    """Return the HTTP attributes of a request over HTTP or a WebSocket. The status is None if there was no response."""
    attributes: Attributes = {"url.path": scope["path"]}
    if scope.get("method"):
        attributes["http.request.method"] = scope["method"]
    if status is not None:
        attributes["http.response.status_code"] = status
    address, port = scope.get("server") or (None, None)
    if address is not None:
        attributes["server.address"] = address
        if port is not None:
            attributes["server.port"] = port
    return attributes


def request_attributes(end: RequestEnd) -> Attributes:
    """Return the parameters of a request."""
    request = end.request
    if isinstance(request, EmbeddingRequest) and request.dimensions is not None:
        return {"gen_ai.embeddings.dimension.count": request.dimensions}
    if not isinstance(request, GenerationRequest):
        return {}
    sampling = request.sampling
    attributes: Attributes = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    # OTLP integers have 64 bits.
    if sampling.seed is not None and -(2**63) <= sampling.seed < 2**63:
        attributes["gen_ai.request.seed"] = sampling.seed
    return attributes


def answer_attributes(ends: Sequence[RequestEnd]) -> Attributes:
    """Return the token counts and times of all answers to a request. A prompt is computed once, so it counts once."""
    first = ends[0].event
    attributes: Attributes = {}
    if first.request_id:
        attributes["gen_ai.response.id"] = first.request_id
    if first.model:
        attributes["gen_ai.response.model"] = public_id(first.model, local=False)
    prompts: dict[int, list[RequestEnd]] = {}
    for end in ends:
        prompts.setdefault(id(end.request), []).append(end)
    attributes["gen_ai.usage.input_tokens"] = sum(group[0].event.prompt_tokens for group in prompts.values())
    if first.kind != "chat":
        return attributes
    if len(prompts) == 1 and len(ends) > 1:
        attributes["gen_ai.request.choice.count"] = len(ends)
    attributes["gen_ai.response.finish_reasons"] = [end.event.finish_reason for end in ends]
    attributes["gen_ai.usage.output_tokens"] = sum(end.event.completion_tokens for end in ends)
    reports = [end.report for end in ends if isinstance(end.report, GenerationReport)]
    if reports:
        # All choices except the first one read the whole prompt from the cache.
        cached = [
            min(end.report.cached_tokens if isinstance(end.report, GenerationReport) else 0 for end in group)
            for group in prompts.values()
        ]
        attributes["gen_ai.usage.cache_read.input_tokens"] = sum(cached)
        if reasoning := sum(report.reasoning_tokens for report in reports):
            attributes["gen_ai.usage.reasoning.output_tokens"] = reasoning
    if any(report.output_tokens for report in reports):
        first_token_s = min(report.ttft_s for report in reports if report.output_tokens)
        attributes["gen_ai.response.time_to_first_chunk"] = first_token_s
    return attributes


# Texts


def content_attributes(ends: Sequence[RequestEnd]) -> Attributes:
    """Return the prompt and the answers as JSON in the form of the GenAI conventions."""
    first = ends[0]
    attributes: Attributes = {}
    # Token ids have no text.
    messages: list[dict[str, Any]] = []
    match first.request.prompt if isinstance(first.request, GenerationRequest) else None:
        case ChatPrompt() as prompt:
            for message in prompt.messages:
                role, content = str(message.get("role")), message.get("content")
                given = [content] if isinstance(content, str) else content or []
                texts = [part if isinstance(part, str) else str(part.get("text", "")) for part in given]
                if role == "tool":
                    id_ = message.get("tool_call_id")
                    parts = [{"type": "tool_call_response", "id": id_, "response": "".join(texts)}]
                else:
                    parts = [_text_part(text) for text in texts if text]
                    for call in message.get("tool_calls") or []:
                        function = call.get("function") or {}
                        parts.append(_call_part(call.get("id"), function.get("name"), function.get("arguments")))
                messages.append(_message(role, parts))
        case TextPrompt() as prompt:
            messages = [_message("user", [_text_part(prompt.text)])]
        case InfillPrompt() as prompt:
            messages = [_message("user", [_text_part(prompt.prefix), _text_part(prompt.suffix)])]
    if messages:
        attributes["gen_ai.input.messages"] = _to_json(messages)
    if first.event.kind == "chat":
        outputs = []
        for end in ends:
            answer = merge_deltas(end.deltas)
            parts = [{"type": "reasoning", "content": answer.reasoning}] if answer.reasoning else []
            if answer.text:
                parts.append(_text_part(answer.text))
            parts += [_call_part(call.id, call.name, call.arguments) for call in answer.tool_calls]
            outputs.append(_message("assistant", parts) | {"finish_reason": end.event.finish_reason})
        attributes["gen_ai.output.messages"] = _to_json(outputs)
    return attributes


def _message(role: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": role, "parts": parts}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _call_part(id_: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_call", "id": id_, "name": name, "arguments": arguments}


def _to_json(messages: Sequence[dict[str, Any]]) -> str:
    """Return messages as JSON of at most 16,384 characters. If they are longer, only the last ones are kept, the first
    of which is truncated.
    """
    left, kept = 16_384, []
    for message in reversed(messages):
        text = json.dumps(message, ensure_ascii=False, default=str)
        if len(text) > left:
            parts = []
            for part in message["parts"]:
                texts = {
                    key: part[key] if isinstance(part[key], str) else json.dumps(part[key])
                    for key in TEXTS
                    if key in part
                }
                for key, written in texts.items():
                    texts[key] = written if len(written) <= left else f"{written[:left]}…"
                    left = max(0, left - len(written))
                parts.append(part | texts)
            kept.append(json.dumps(message | {"parts": parts}, ensure_ascii=False, default=str))
            break
        kept.append(text)
        left -= len(text)
    # A lone surrogate cannot be encoded.
    return f"[{', '.join(reversed(kept))}]".encode(errors="replace").decode()

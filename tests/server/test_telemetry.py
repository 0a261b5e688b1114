"""Test the spans that a collector for OTLP/HTTP receives for requests to the echo engine."""

import contextlib
import json
import logging
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import lmx_lab
from lmx_lab.engine import ChatPrompt, GenerationRequest
from lmx_lab.errors import InvalidRequestError, PortTakenError
from lmx_lab.http.uvicorn_server import bind
from lmx_lab.server.telemetry import EXPORTER_LOG, RequestSpans, answer_attributes, content_attributes
from lmx_lab.settings import Settings
from lmx_lab.values.outputs import Delta
from tests.support.labs import manager_of, serving
from tests.support.samples import request_end
from tests.support.waiting import until

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TEXT = "the sea is wide"
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class Collector:
    """A server that receives spans."""

    status: int
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def resources(self):
        """The spans of each request, with the service that has sent them."""
        return [spans for body in self.bodies for spans in ExportTraceServiceRequest.FromString(body).resource_spans]

    @property
    def spans(self):
        return [span for resource in self.resources for scope in resource.scope_spans for span in scope.spans]


@contextlib.contextmanager
def collector(port=0, *, status=200):
    """Run a collector whose address is in the environment."""
    running = Collector(status)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/traces"
            running.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            running.headers.append(dict(self.headers))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(running.status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server, pytest.MonkeyPatch.context() as patched:
        running.url = f"http://127.0.0.1:{server.server_port}"
        patched.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield running
        finally:
            server.shutdown()
            thread.join()


def post(lab, path, headers=None, **fields):
    """Send a request, and return its id."""
    answer = httpx2.post(f"{lab.url}{path}", json={"model": "echo", **fields}, headers=headers)
    return str(answer.headers["x-request-id"])


def chat(lab, headers=None, **fields):
    return post(lab, "/v1/chat/completions", headers, messages=[{"role": "user", "content": TEXT}], **fields)


def leave(lab):
    """Send a request, disconnect after the first words of its answer, and return its id when it has ended."""
    body = {"messages": [{"role": "user", "content": TEXT}], "stream": True, "max_tokens": 10_000, "ignore_eos": True}
    with httpx2.stream("POST", f"{lab.url}/v1/chat/completions", json=body) as answer:
        next(line for line in answer.iter_lines() if "the" in line)
    until(lambda: not manager_of(lab).snapshot.active_requests)
    return str(answer.headers["x-request-id"])


@dataclass(frozen=True)
class Sent:
    """The spans that a collector has received for some requests, and the ids of these requests."""

    collector: Collector
    ids: dict[str, str]
    port: int

    def span(self, name: str) -> Span:
        """Return the span of a request."""
        (span,) = [it for it in self.collector.spans if attributes(it).get("gen_ai.response.id") == self.ids[name]]
        return span

    def children(self, span):
        return [it for it in self.collector.spans if it.parent_span_id == span.span_id]


def attributes(span):
    return {each.key: value(each.value) for each in span.attributes}


def value(given):
    kind = given.WhichOneof("value")
    return [value(each) for each in given.array_value.values] if kind == "array_value" else getattr(given, kind)


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """Send requests to a server that exports spans without texts, and stop the server."""
    parent = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    with collector() as target:
        with serving(tmp_path_factory.mktemp("home"), "echo", otel="spans", echo_tokens_per_s=200) as lab:
            ids = {
                "cancelled": leave(lab),
                "chat": chat(lab, parent, n=2, temperature=0.5, top_p=0.9, top_k=5, seed=7, max_tokens=3),
                "not sampled": chat(lab, {"traceparent": f"00-{TRACE}-{CALLER}-00"}),
                "stream": chat(lab, stream=True),
                "texts": post(lab, "/v1/completions", prompt=["one two", "three"], max_tokens=8, temperature=0),
                "messages": post(lab, "/v1/messages", messages=[{"role": "user", "content": TEXT}], max_tokens=9),
                "responses": post(lab, "/v1/responses", input=TEXT),
                "ollama": post(lab, "/api/chat", messages=[{"role": "user", "content": TEXT}], stream=False),
                "embeddings": post(lab, "/v1/embeddings", input=["one two", "three"]),
                "rerank": post(lab, "/v1/rerank", query="sea", documents=["water", "bread"]),
                "unknown": chat(lab, model="gpt-4o"),
                "malformed": chat(lab, temperature="hot"),
                "tokens": post(lab, "/tokenize", content=TEXT),
            }
            lab.chat(TEXT)
            port = lab.server.port
        yield Sent(target, ids, port)


def test_a_span_has_the_attributes_of_the_conventions_and_is_a_child_of_the_caller(sent):
    span = sent.span("chat")
    assert span.name == "chat echo"
    assert (span.kind, span.trace_id.hex(), span.parent_span_id.hex()) == (Span.SPAN_KIND_SERVER, TRACE, CALLER)
    found = attributes(span)
    time_to_first_token_s = found.pop("gen_ai.response.time_to_first_chunk")
    assert 0 <= time_to_first_token_s <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    prompt_tokens = found.pop("gen_ai.usage.input_tokens")
    assert 0 <= found.pop("gen_ai.usage.cache_read.input_tokens") < prompt_tokens
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lmx-lab",
        "gen_ai.request.model": "echo",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": sent.ids["chat"],
        "gen_ai.response.model": "echo",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.output_tokens": 6,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "server.address": "127.0.0.1",
        "server.port": sent.port,
    }


def test_the_phases_of_each_answer_are_consecutive_children(sent):
    span = sent.span("chat")
    children = sent.children(span)
    assert {attributes(child)["lmx.choice.index"] for child in children} == {0, 1}
    for index in (0, 1):
        phases = [child for child in children if attributes(child)["lmx.choice.index"] == index]
        assert [phase.name for phase in phases][-1] == "decode"
        assert {phase.name for phase in phases} <= {"queued", "prefill", "decode"}
        assert attributes(phases[-1])["lmx.tokens"] == 3
        for before, phase in pairwise(phases):
            assert before.end_time_unix_nano == phase.start_time_unix_nano
        assert span.start_time_unix_nano <= phases[0].start_time_unix_nano
        assert phases[-1].end_time_unix_nano <= span.end_time_unix_nano


@pytest.mark.parametrize("name", ["stream", "messages", "responses", "ollama"])
def test_chats_in_every_api_format_are_exported(sent, name):
    span = sent.span(name)
    assert (span.name, span.parent_span_id) == ("chat echo", b"")
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["stop"]
    assert attributes(span)["gen_ai.usage.output_tokens"] > 0


def test_prompts_of_a_completion_are_one_span(sent):
    span = sent.span("texts")
    assert span.name == "text_completion echo"
    found = attributes(span)
    assert len(found["gen_ai.response.finish_reasons"]) == 2
    assert found["gen_ai.usage.input_tokens"] >= 3
    assert "gen_ai.request.choice.count" not in found


@pytest.mark.parametrize("name", ["embeddings", "rerank"])
def test_vectors_and_scores_are_exported_with_their_tokens(sent, name):
    span = sent.span(name)
    assert span.name == f"{name} echo"
    assert attributes(span)["gen_ai.usage.input_tokens"] > 0
    assert {child.name for child in sent.children(span)} <= {"queued", "compute"}


def test_a_refused_request_has_its_error_and_no_phases(sent):
    span = sent.span("unknown")
    assert (span.name, span.status.code) == ("chat gpt-4o", 2)
    found = attributes(span)
    assert (found["error.type"], found["http.response.status_code"]) == ("model-not-found", 404)
    assert sent.children(span) == []


def test_requests_without_a_generation_or_with_an_unsampled_caller_are_not_exported(sent):
    exported = {attributes(span).get("gen_ai.response.id") for span in sent.collector.spans}
    assert not exported & {sent.ids[name] for name in ("malformed", "tokens", "not sampled")}


def test_a_request_of_the_notebook_is_a_span_of_its_own(sent):
    (span,) = [
        span for span in sent.collector.spans if span.kind == Span.SPAN_KIND_INTERNAL and not span.parent_span_id
    ]
    assert span.name == "chat echo"
    assert "url.path" not in attributes(span)
    assert {child.name for child in sent.children(span)} >= {"decode"}


def test_spans_name_the_service_and_its_version(sent):
    resource = attributes(sent.collector.resources[0].resource)
    assert resource["service.name"] == "lmx-lab"
    assert resource["service.version"]


def test_texts_are_exported_only_on_request(sent):
    assert not any(b"sea" in body or b"three" in body for body in sent.collector.bodies)


def test_texts_are_exported_in_the_form_of_the_conventions(tmp_path):
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": TEXT}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    with collector() as target:
        with serving(tmp_path, "echo", otel="content") as lab:
            first = chat(lab, n=2, temperature=0)
            second = post(lab, "/v1/chat/completions", messages=history, tools=[CLOCK], tool_choice="required")
        sent = Sent(target, {"first": first, "second": second}, lab.server.port)
    found = attributes(sent.span("first"))
    assert json.loads(found["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": TEXT}]}
    ]
    answer = {"role": "assistant", "parts": [{"type": "text", "content": TEXT}], "finish_reason": "stop"}
    assert json.loads(found["gen_ai.output.messages"]) == [answer, answer]
    found = attributes(sent.span("second"))
    assert json.loads(found["gen_ai.input.messages"]) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": TEXT}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "call_1", "name": "clock", "arguments": {}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "noon"}]},
    ]
    (message,) = json.loads(found["gen_ai.output.messages"])
    assert message["finish_reason"] == "tool_calls"
    assert [(part["type"], part["name"]) for part in message["parts"]] == [("tool_call", "clock")]


def test_the_last_messages_of_a_long_chat_are_exported():
    messages = [{"role": "user", "content": str(number) * 1000} for number in range(10)] * 4
    end = request_end(
        finish_reason="cancelled",
        request=GenerationRequest(prompt=ChatPrompt(messages=tuple(messages))),
        deltas=[Delta(text="x" * 16_384 * 2, tokens=1)],
    )
    found = content_attributes([end])
    kept = json.loads(str(found["gen_ai.input.messages"]))
    texts = [message["parts"][0]["content"] for message in kept]
    assert texts[1:] == [message["content"] for message in messages[-len(texts) + 1 :]]
    assert texts[0].endswith("…")
    assert 16_384 * 0.9 < sum(map(len, texts)) <= 16_384 + 1
    (answer,) = json.loads(str(found["gen_ai.output.messages"]))
    assert len(answer["parts"][0]["content"]) == 16_384 + 1


def test_an_answer_whose_client_disconnects_is_exported_as_cancelled(sent):
    span = sent.span("cancelled")
    found = attributes(span)
    assert found["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert found["gen_ai.usage.output_tokens"] < 10_000
    assert "error.type" not in found
    *_, decode = sent.children(span)
    assert (decode.name, span.status.code) == ("decode", 0)
    assert decode.start_time_unix_nano < decode.end_time_unix_nano <= span.end_time_unix_nano


def test_a_cancelled_answer_has_the_tokens_that_were_delivered_and_no_time_to_first_token():
    end = request_end(model="/models/tiny", finish_reason="cancelled", prompt_tokens=3, completion_tokens=2)
    assert answer_attributes([end]) == {
        "gen_ai.response.id": "req_1",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["cancelled"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
    }


def only_warning(caplog):
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return warning.getMessage()


def test_a_collector_that_is_down_causes_one_warning(monkeypatch, caplog):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://user:s3cret@127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    spans = RequestSpans(content=False, retry_s=1e9)
    end = request_end(model="m")
    spans.observe(end)
    until(lambda: caplog.records)
    with collector(port) as target:
        spans.observe(end)
        spans.close()
        assert target.spans == []
    assert f"http://127.0.0.1:{port}/v1/traces does not accept spans" in only_warning(caplog)
    assert "s3cret" not in caplog.text


def test_a_collector_that_accepts_spans_again_gets_them(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with collector(status=400) as target:
        spans = RequestSpans(content=False, retry_s=0.0)
        for attempts in (1, 2):
            spans.observe(request_end(model=f"{attempts}"))
            until(lambda attempts=attempts: len(target.bodies) == attempts)
        target.status = 200
        spans.observe(request_end(model="3"))
        spans.close()
        assert [span.name for span in target.spans] == ["chat 1", "chat 2", "chat 3"]
    assert "does not accept spans" in only_warning(caplog)
    assert "accepts spans again" in caplog.text


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "OTEL_EXPORTER_OTLP_HEADERS"), (404, "OTEL_EXPORTER_OTLP_ENDPOINT")]
)
def test_the_warning_has_the_status_with_which_a_collector_refuses_spans(status, remedy, caplog):
    with collector(status=status):
        spans = RequestSpans(content=False)
        spans.observe(request_end(model="m"))
        spans.close()
    assert f"does not accept spans (HTTP status {status})" in only_warning(caplog)
    assert remedy in only_warning(caplog)


@pytest.mark.parametrize(
    ("name", "given", "shown"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318", "http://"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1", "http://"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:99999", "http://"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a b", "http://"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318?team=a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://", "http://"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "10", "max_queue_size"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x", "non-negative"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "4318"),
    ],
)
def test_variables_with_unsupported_values_are_named(name, given, shown, monkeypatch):
    monkeypatch.setenv(name, given)
    with pytest.raises(InvalidRequestError, match=shown) as caught:
        RequestSpans(content=False)
    assert name in caught.value.message
    assert not EXPORTER_LOG.filters


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"])
def test_a_header_that_cannot_be_read_is_refused_but_not_shown(name, monkeypatch, caplog):
    monkeypatch.setenv(name, "a=b, Bearer s3cret")
    with pytest.raises(InvalidRequestError, match=name) as caught:
        RequestSpans(content=False)
    assert "s3cret" not in caught.value.message + caplog.text


def test_headers_are_sent_to_the_collector(monkeypatch):
    with collector() as target:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f" {target.url} ")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b,authorization=Bearer s3cret,")
        spans = RequestSpans(content=False)
        spans.observe(request_end(model="m"))
        spans.close()
    assert [(each["x-key"], each["authorization"]) for each in target.headers] == [("a b", "Bearer s3cret")]


def test_a_collector_that_does_not_respond_does_not_delay_the_end_and_causes_one_warning(monkeypatch, caplog):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        spans = RequestSpans(content=False, close_s=0.01, last_attempt_s=0.01)
        spans.observe(request_end(model="m"))
        spans.close()
        (sending,) = [each for each in threading.enumerate() if each.name == "lmx-lab last spans"]
    sending.join()  # The connection ends with the socket.
    assert "does not accept spans" in only_warning(caplog)
    assert not EXPORTER_LOG.filters


def test_a_start_whose_port_is_taken_ends_the_exporter_and_another_start_exports_again(tmp_path):
    with collector() as target:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            settings = Settings(home=tmp_path, port=taken.getsockname()[1], otel="spans")
            lab = lmx_lab.Lab(settings, loop="thread")
            with pytest.raises(PortTakenError):
                lab.start()
        assert not EXPORTER_LOG.filters
        assert not [each for each in threading.enumerate() if each.name == "OtelBatchSpanRecordProcessor"]
        lab.start(bind("127.0.0.1", 0, explicit=True))
        with lab:
            lab.load("echo")
            chat(lab)
        assert "chat echo" in [span.name for span in target.spans]


def test_nothing_is_exported_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    lab = lmx_lab.Lab(Settings(home=tmp_path, port=0), loop="thread")
    assert not lab.server.services.spans

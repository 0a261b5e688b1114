"""Tests with at least one valid request to each route, since generated requests are seldom valid."""

import sys

import pytest

from tests.contract.openapi import OpenApiContract
from tests.support import daemons
from tests.support.labs import serving
from tests.support.mcp import COUNTING

pytestmark = pytest.mark.slow
HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": "echo", "messages": HELLO, "max_tokens": 8}
PLAIN = {"model": "echo", "prompt": ["the sea", "a house"], "max_tokens": 8}
TEXTS = ["a cat", "a dog"]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(autouse=True)
def _loaded(lab):
    lab.load("echo")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/healthz", None),
        ("GET", "/readyz", None),
        ("GET", "/metrics", None),
        ("GET", "/v1/models", None),
        ("GET", "/admin/models", None),
        ("GET", "/admin/events", None),
        ("GET", "/admin/timeline", None),
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
        ("POST", "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
        ("POST", "/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 2}),
        ("POST", "/v1/completions", PLAIN),
        ("POST", "/v1/completions", {**PLAIN, "echo": True, "logprobs": 2}),
        ("POST", "/v1/completions", {**PLAIN, "stream": True, "stream_options": {"include_usage": True}}),
        ("POST", "/completion", {"prompt": "the sea", "n_predict": 4, "n_probs": 2}),
        ("POST", "/completion", {"prompt": "the sea", "n_predict": 4, "stream": True}),
        ("POST", "/completion", {"prompt": "the sea", "n_predict": 4, "stream": True, "response_fields": ["model"]}),
        ("POST", "/v1/messages", {"model": "echo", "messages": HELLO, "max_tokens": 8}),
        ("POST", "/v1/messages", {"model": "echo", "messages": HELLO, "max_tokens": 8, "stream": True}),
        ("POST", "/v1/messages/count_tokens", {"model": "echo", "messages": HELLO}),
        ("POST", "/v1/responses", {"model": "echo", "input": "hello", "max_output_tokens": 8}),
        ("POST", "/v1/responses/compact", {"model": "echo", "input": HELLO}),
        ("POST", "/v1/responses/input_tokens", {"model": "echo", "input": HELLO}),
        ("POST", "/v1/responses", {"model": "echo", "input": HELLO, "tools": [{"type": "web_search"}], "stream": True}),
        ("GET", "/health", None),
        ("GET", "/props", None),
        ("GET", "/tokenizer_info", None),
        ("POST", "/tokenize", {"content": "the sea", "with_pieces": True}),
        ("POST", "/tokenize", {"messages": HELLO, "return_token_strs": True}),
        ("POST", "/detokenize", {"tokens": [300, 301]}),
        ("POST", "/apply-template", {"messages": HELLO}),
        ("GET", "/api/tags", None),
        ("GET", "/api/ps", None),
        ("GET", "/api/version", None),
        ("POST", "/api/show", {"model": "echo"}),
        ("POST", "/api/pull", {"model": "echo", "stream": False}),
        ("POST", "/api/chat", {"model": "echo", "messages": HELLO}),
        ("POST", "/api/chat", {"model": "echo", "messages": HELLO, "stream": False, "logprobs": True}),
        ("POST", "/api/generate", {"model": "echo", "prompt": "the sea", "suffix": "is blue", "stream": False}),
        ("POST", "/api/generate", {"model": "echo"}),
        ("POST", "/api/embed", {"model": "default", "input": TEXTS}),
        ("POST", "/api/embeddings", {"model": "default", "prompt": "a cat"}),
        ("POST", "/v1/embeddings", {"model": "default", "input": TEXTS}),
        ("POST", "/v1/embeddings", {"model": "default", "input": TEXTS, "encoding_format": "base64"}),
        ("POST", "/v2/embed", {"model": "default", "texts": TEXTS, "embedding_types": ["float", "binary"]}),
        ("POST", "/v1/rerank", {"model": "default", "query": "cats", "documents": TEXTS}),
        ("POST", "/v2/rerank", {"model": "default", "query": "cats", "documents": TEXTS, "top_n": 1}),
        ("POST", "/rerank", {"query": "cats", "texts": TEXTS, "return_text": True}),
        ("POST", "/rerank", {"model": "default", "query": "cats", "documents": TEXTS}),
        ("POST", "/admin/models/load", {"model": "echo"}),
        ("POST", "/admin/models/unload", {"model": "echo"}),
        ("POST", "/admin/models/unload", None),
    ],
)
def test_responses_of_the_inference_server_match_the_document(server, method, path, body):
    assert server.request(method, path, body=body).status_code == 200


def test_the_response_for_one_model_matches_the_document(server):
    assert server.request("GET", "/v1/models/{model}", at={"model": "echo"}).status_code == 200
    assert server.request("GET", "/admin/models/plan", query={"model": "echo"}).status_code == 200


def test_stored_responses_match_the_document(server):
    path = "/v1/responses/{response_id}"
    created = server.request("POST", "/v1/responses", body={"input": "hello", "background": True})
    at = {"response_id": created.json()["id"]}
    assert server.request("POST", f"{path}/cancel", at=at).status_code == 200
    assert server.request("GET", f"{path}/input_items", at=at).json()["data"][0]["role"] == "user"
    for method, status in (("GET", 200), ("DELETE", 200), ("GET", 404)):
        assert server.request(method, path, at=at).status_code == status


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_match_the_document(server, stream):
    body = {**CHAT, "model": "default", "tools": [WEATHER], "tool_choice": "required", "stream": stream}
    answer = server.request("POST", "/v1/chat/completions", body={**body, "max_tokens": 48})
    assert answer.status_code == 200
    assert '"name":"weather"' in answer.text


def test_the_error_at_the_end_of_an_interrupted_stream_matches_the_document(tmp_path):
    with serving(tmp_path, "echo", request_timeout_s=0.05, echo_tokens_per_s=1000) as lab:
        server = OpenApiContract(f"{lab.url}/openapi.json")
        body = {**CHAT, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 4}
        # The timeout happens before or after the status is sent; the document contains both.
        answer = server.request("POST", "/v1/chat/completions", body=body)
        assert "lmx-timeout" in answer.text
        assert "[DONE]" not in answer.text


def test_metrics_have_two_formats(server):
    newer = server.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
    assert newer.headers["content-type"][0].startswith("application/openmetrics-text")


def test_sessions_and_turns_match_the_document(api):
    mine = {"session_id": "mine"}
    both = {**mine, "turn_id": "first"}
    made = api.request("POST", "/v3/sessions", body={"session_id": "mine", "title": "One"})
    again = api.request("POST", "/v3/sessions", body={"session_id": "mine"})
    assert (made.status_code, again.status_code) == (201, 200)
    assert api.request("GET", "/v3/sessions").status_code == 200
    assert api.request("PATCH", "/v3/sessions/{session_id}", body={"revision": 1}, at=mine).status_code == 200
    turn = {"content": "hello", "turn_id": "first", "overrides": {"max_tokens": 4}}
    submitted = [api.request("POST", "/v3/sessions/{session_id}/turns", body=turn, at=mine) for _ in range(2)]
    assert [answer.status_code for answer in submitted] == [202, 200]
    record = {"ended_at": None}
    while record["ended_at"] is None:
        path = "/v3/sessions/{session_id}/turns/{turn_id}"
        record = api.request("GET", path, query={"wait": 0.1}, at=both).json()
    assert record["status"] == "done", record
    assert api.request("POST", "/v3/sessions/{session_id}/turns/{turn_id}/cancel", at=both).json()["cancelled"] == 0
    for method, path, status in (
        ("GET", "/v3/sessions/{session_id}", 200),
        ("POST", "/v3/sessions/{session_id}/cancel", 200),
        ("POST", "/v3/sessions/{session_id}/fork", 201),
        ("DELETE", "/v3/sessions/{session_id}", 204),
    ):
        assert api.request(method, path, at=mine).status_code == status, path


def test_events_match_the_document(api):
    api.request("POST", "/v3/sessions", body={"session_id": "watched"})
    page = api.request("GET", "/v3/events", query={"after": 0, "types": ["session.*,daemon.started"]})
    assert "session.created" in page.text
    own = api.request("GET", "/v3/sessions/{session_id}/events", query={"after": 0}, at={"session_id": "watched"})
    assert [event["event"] for event in own.json()["events"]] == ["session.created"]
    assert api.request("GET", "/v3/events", query={"after": 10**9}).status_code == 410


def test_permissions_match_the_document(api, daemon):

    @daemon.tool
    def remember() -> str:
        """Remember something."""
        return "remembered"

    api.request("POST", "/v3/sessions", body={"session_id": "asking", "tools": ["remember"]})
    turn = {"content": "hello", "overrides": {"tool_choice": "remember", "max_steps": 1, "max_tokens": 48}}
    asking = {"session_id": "asking"}
    assert api.request("POST", "/v3/sessions/{session_id}/turns", body=turn, at=asking).status_code == 202
    status = "queued"
    while status in ("queued", "running"):
        status = api.request("GET", "/v3/sessions/{session_id}", at=asking).json()["status"]
    assert status == "waiting"
    permission = api.request("GET", "/v3/permissions").json()["permissions"][0]
    at, path = {"permission_id": permission["permission_id"]}, "/v3/permissions/{permission_id}"
    assert api.request("POST", path, body={"decision": "allow"}, at=at).status_code == 200
    assert api.request("POST", path, body={"decision": "deny"}, at=at).status_code == 409


def test_mcp_servers_match_the_document(api, tmp_path):
    args = ["-I", str(COUNTING), str(tmp_path / "notes"), "0"]
    counting = {"name": "counting"}
    config = {**counting, "command": sys.executable, "args": args, "start_timeout_s": 60}
    assert api.request("POST", "/v3/mcp/test", body=config).json()["ok"] is True
    assert api.request("POST", "/v3/mcp/servers", body=config).status_code == 201
    assert api.request("POST", "/v3/mcp/servers", body=config).status_code == 409
    assert api.request("PATCH", "/v3/mcp/servers/{name}", body={"permission": "allow"}, at=counting).status_code == 200
    for method, path, status in (
        ("GET", "/v3/mcp/servers/{name}", 200),
        ("GET", "/v3/mcp/servers/{name}/tools", 200),
        ("POST", "/v3/mcp/servers/{name}/test", 200),
        ("POST", "/v3/mcp/servers/{name}/restart", 200),
        ("DELETE", "/v3/mcp/servers/{name}", 204),
    ):
        assert api.request(method, path, at=counting).status_code == status, path
    assert api.request("GET", "/v3/mcp/servers").status_code == 200


def test_health_state_and_shutdown_of_the_daemon_match_the_document(tmp_path):
    with daemons.serving(tmp_path) as daemon:
        api = OpenApiContract(f"{daemon.url}/v3/openapi.json", key=daemon.token)
        assert api.request("GET", "/v3/health", headers={}).status_code == 200
        assert api.request("GET", "/v3/daemon").status_code == 200
        # Sent without validation: the check for a missing key would send a second request, to a stopped daemon.
        answer = api.schema["/v3/daemon/shutdown"]["POST"].Case().call(headers=api.headers)
        assert (answer.status_code, answer.json()) == (202, {"status": "stopping"})
        assert daemon.wait(60)

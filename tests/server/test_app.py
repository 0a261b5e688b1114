"""Requests at other paths than those of the routes, and without a Content-Type, as many clients send them."""

import json
import socket

import pytest
from websockets.sync.client import connect

from lmx_lab.server.app import similar_paths
from tests.support.asking import echo_body

CHAT = [
    *("/chat/completions", "/openai/v1/chat/completions", "/openai/chat/completions", "/v1/v1/chat/completions"),
    *("/api/v0/chat/completions", "/v0/chat/completions"),
    *("/openai/deployments/echo/chat/completions?api-version=2024-10-21", "/v1/chat/completions/"),
    *("//v1//chat/completions", "/api/v1/chat/completions"),
]


@pytest.mark.parametrize("path", CHAT)
def test_a_chat_is_answered_at_other_paths(http, path):
    assert http.post(path, json=echo_body()).json()["object"] == "chat.completion"


@pytest.mark.parametrize("path", ["/models", "/v1/models/", "/v1/v1/models", "/openai/v1/models", "/models/"])
def test_models_are_listed_at_other_paths(http, path):
    assert http.get(path).json() == http.get("/v1/models").json()


@pytest.mark.parametrize("path", ["/v1/api/tags", "/api/tags/", "/v1/health", "/v1/props", "//healthz"])
def test_other_routes_are_found_too(http, path):
    assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((path, 200) for path in ("/v1/models", "/models", "/", "/healthz", "/api/tags", "/api/version", "/version")),
        ("/v1/models/none", 404),
        ("/v1/chat/completions", 405),
        ("/none", 404),
        # Its stream has no end.
        ("/admin/events", 200),
    ],
)
def test_head_is_answered_like_get_without_a_body(http, path, status):
    for _ in range(2):
        response = http.head(path)
        assert (response.status_code, response.content) == (status, b"")
    if status in (200, 404) and path != "/admin/events":
        assert response.headers["content-type"] == http.get(path).headers["content-type"]


def test_the_version_is_that_of_the_headers(http):
    response = http.get("/version")
    assert response.json() == {"version": response.headers["x-lmx-lab"]}


@pytest.mark.parametrize("path", ["/reranking", "/v1/reranking"])
def test_llama_cpps_other_name_of_rerank_is_found(http, path):
    body = {"model": "echo", "query": "sea", "documents": ["bread", "the sea"]}
    answer = http.post(path, json=body).json()
    assert answer["results"] == http.post(path.replace("reranking", "rerank"), json=body).json()["results"]


def test_an_error_has_the_form_of_the_route_that_answers(http):
    assert http.post("/messages", json={"max_tokens": 0}).json()["type"] == "error"
    assert http.get("/chat/completions").headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://{host}/v1/models", 200),
        ("https://{host}/v1/models?limit=1", 200),
        ("HTTP://{host}", 200),
        ("http://{host}/none", 404),
        # RFC 9112, 3.2.2: the host of the target counts, and not that of the header.
        ("http://other.example/v1/models", 421),
        ("http:///v1/models", 421),
    ],
)
def test_a_target_may_be_a_whole_url(lab, target, status):
    host = f"127.0.0.1:{lab.server.port}"
    with socket.create_connection(("127.0.0.1", lab.server.port)) as connection:
        connection.sendall(f"GET {target.format(host=host)} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        assert int(connection.recv(12).split()[1]) == status


@pytest.mark.parametrize("operation", ["chat/completions", "completions", "embeddings", "responses"])
def test_the_name_in_a_path_of_azures_service_is_the_model(http, operation):
    texts = {"prompt": "hi"} if operation == "completions" else {"input": "hi"}
    body = {"messages": [{"role": "user", "content": "hi"}]} if operation == "chat/completions" else texts
    for known in ({}, {"model": None}, {"model": "gpt-4o"}):
        path = f"/openai/deployments/echo/{operation}?api-version=2024-10-21"
        assert http.post(path, json=body | known).json()["model"] == "echo"
    response = http.post(f"/openai/deployments/a/model%2Fb/{operation}", json=body | {"model": "echo"})
    assert response.status_code == 404
    assert "'a/model/b'" in response.json()["error"]["message"]


def test_a_websocket_is_found_at_another_path(lab):
    with connect(f"{lab.url.replace('http', 'ws')}/chat/stream/") as socket:
        socket.send(json.dumps(echo_body()))
        assert "token" in json.loads(socket.recv())


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("/v1/chat/completion", "; did you mean '/v1/chat/completions'?"),
        ("/v1/modelz", "; did you mean '/v1/models'?"),
        ("/v1", ""),
        ("/v1/", ""),
    ],
)
def test_an_unknown_path_is_404_with_a_similar_one(http, path, suggestion):
    response = http.get(path)
    assert response.status_code == 404
    assert f"Not Found{suggestion}; see /openapi.json" in response.json()["error"]["message"]


def test_a_long_path_has_few_similar_ones():
    assert list(similar_paths("/v1//x/")) == ["/v1/x", "/v1/v1/x", "/x", "/v1/x"]
    assert len(list(similar_paths("/v1" * 20_000))) == 5


def test_programs_may_leave_out_the_content_type_and_pages_may_not(http):
    content = json.dumps(echo_body()).encode()
    request = http.build_request("POST", "/api/chat", content=content)
    assert "content-type" not in request.headers
    assert http.send(request).status_code == 200
    # As in the examples of Ollama's documentation.
    typed = {"content-type": "application/x-www-form-urlencoded"}
    assert http.post("/api/chat", content=content, headers=typed).status_code == 200
    for sent in ({"sec-fetch-mode": "cors"}, {"referer": "http://page.example/"}):
        assert http.post("/api/chat", content=content, headers={**typed, **sent}).status_code == 400
    refused = http.post("/api/chat", content=content, headers={"origin": str(http.base_url).rstrip("/")})
    assert refused.status_code == 400
    assert "Content-Type is missing" in refused.json()["error"]

"""Tests that all responses have the security headers, including errors before the application is reached."""

import socket

import pytest

from tests.support.labs import FRIEND, KEY
from tests.support.sockets import HANDSHAKE, RAW_WAIT_S, Answer, send

EXPECTED = {
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
}
PREFLIGHT = (("Origin", FRIEND), ("Access-Control-Request-Method", "POST"))
REFUSED = (("Origin", "http://evil.example"), *PREFLIGHT[1:])
WRONG_KEY = [(name, "x" if name == "Sec-WebSocket-Key" else value) for name, value in HANDSHAKE]
WRONG_VERSION = [(name, "12" if name == "Sec-WebSocket-Version" else value) for name, value in HANDSHAKE]


def check(answer, status):
    lines = [line.lower() for line in answer.head.split("\r\n")]
    assert answer.status == status
    for name, value in EXPECTED.items():
        assert [line for line in lines if line.startswith(f"{name}:")] == [f"{name}: {value}"]
    policy = answer.header("content-security-policy:")
    if "text/html" in (answer.header("content-type:") or ""):
        assert policy.startswith("default-src 'none'; base-uri 'none'; form-action 'none'; ")
        assert "; frame-ancestors 'self'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
    else:
        assert policy == "frame-ancestors 'self'"


RIGHT = ("Authorization", f"Bearer {KEY}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("GET /", [RIGHT], 200),
        ("GET /docs", [RIGHT], 200),
        ("HEAD /docs", [RIGHT], 200),
        ("GET /healthz", [], 200),
        ("GET /readyz", [], 503),
        ("GET /metrics", [RIGHT], 200),
        ("GET /openapi.json", [RIGHT], 200),
        ("GET /nothing", [RIGHT], 404),
        ("DELETE /docs", [RIGHT], 405),
        ("POST /v1/chat/completions", [RIGHT], 400),
        ("GET /v1/models", [], 401),
        ("GET /healthz", [("Host", "evil.example")], 400),
        ("OPTIONS /v1/models", PREFLIGHT, 200),
        ("OPTIONS /v1/models", REFUSED, 403),
        ("GET /v1/chat/stream", [*HANDSHAKE, RIGHT], 101),
        ("GET /v1/chat/stream", HANDSHAKE, 401),
        ("GET /v1/responses", [*HANDSHAKE, RIGHT], 101),
        ("GET /v1/responses", HANDSHAKE, 401),
        ("GET /v1/chat/stream", [*WRONG_KEY, RIGHT], 400),
        ("GET /v1/chat/stream", [*WRONG_VERSION, RIGHT], 400),
        ("GET /nothing", [*HANDSHAKE, RIGHT], 403),
        ("GET /healthz", [("Not a header", "x")], 400),
    ],
)
def test_headers_of_the_inference_server(keyed_lab, request_line, headers, status):
    check(send(keyed_lab.server.port, request_line, headers), status)


def test_headers_of_the_error_for_a_foreign_host(keyed_lab, daemon):
    for port in (keyed_lab.server.port, daemon.port):
        check(send(port, "GET /healthz", host="evil.example"), 421)
        check(send(port, "GET /v1/chat/stream", HANDSHAKE, host="evil.example"), 421)


def test_headers_of_a_stream(open_lab):
    with socket.create_connection(("127.0.0.1", open_lab.server.port), RAW_WAIT_S) as sock:
        sock.sendall(f"GET /admin/events HTTP/1.1\r\nHost: 127.0.0.1:{open_lab.server.port}\r\n\r\n".encode())
        data = b""
        while b"\r\n\r\n" not in data:
            data += sock.recv(65536)
    check(Answer(200, data.partition(b"\r\n\r\n")[0].decode(), b""), 200)
    assert b"text/event-stream" in data


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("GET /v3/health", [], 200),
        ("GET /v3/sessions", [], 401),
        ("GET /v3/sessions", [("Authorization", "Bearer {token}")], 200),
        ("GET /v3/nothing", [("Authorization", "Bearer {token}")], 404),
        ("OPTIONS /v3/sessions", PREFLIGHT, 200),
        ("GET /v3/events?token={token}", HANDSHAKE, 101),
        ("GET /v3/events", HANDSHAKE, 401),
    ],
)
def test_headers_of_the_daemon(daemon, request_line, headers, status):
    sent = [(name, value.format(token=daemon.token)) for name, value in headers]
    check(send(daemon.port, request_line.format(token=daemon.token), sent), status)

"""Tests of all combinations of Host, Origin and key, over HTTP and WebSocket, on both servers."""

import socket
from itertools import product

import pytest

from lmx_lab.notebook.addresses import lan_addresses
from tests.support.labs import FRIEND, KEY, manager_of
from tests.support.sockets import HANDSHAKE, RAW_WAIT_S, post, send

# For each kind: the value, with {port} for the server's port, and whether it is allowed.
HOSTS = {
    "the address": ("127.0.0.1:{port}", True),
    "localhost": ("LocalHost:{port}", True),
    "IPv6 loopback": ("[::1]:{port}", True),
    "a name that an attacker's DNS leads here": ("rebound.evil.example:{port}", False),
    "loopback as the beginning of a name": ("127.0.0.1.evil.example:{port}", False),
    "loopback in decimal": ("2130706433:{port}", False),
    "the wildcard": ("0.0.0.0:{port}", False),
    "another port": ("127.0.0.1:1", False),
    "no port": ("localhost", False),
    "a user before it": ("127.0.0.1:{port}@evil.example", False),
}
ORIGINS = {
    "no page": (None, True),
    "its own page": ("http://127.0.0.1:{port}", True),
    "an allowed page": (FRIEND, True),
    "another site": ("http://evil.example", False),
    "the rebound name": ("http://rebound.evil.example:{port}", False),
    "another program here": ("http://localhost:1", False),
    "a sandboxed page": ("null", False),
    "a file": ("file://", False),
    "an allowed page's name as the beginning": (f"{FRIEND}.evil.example", False),
}
KEYS = {"right": True, "wrong": False, "missing": False, "in the query": False}
CODES = {421: "host-forbidden", 403: "origin-forbidden", 401: "unauthorized"}


def expected(host, origin, key):
    """Return the status of the first check that fails."""
    return 421 if not HOSTS[host][1] else 403 if not ORIGINS[origin][1] else 200 if key else 401


def headers(origin, port, key):
    value = ORIGINS[origin][0]
    sent = [("Origin", value.format(port=port))] if value is not None else []
    return sent + ([("Authorization", f"Bearer {key}")] if key is not None else [])


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_every_combination_on_the_inference_server(keyed_lab, kind, key):
    given = {"right": KEY, "wrong": "x" + KEY}.get(key)
    path = "/v1/chat/stream" if kind == "websocket" else "/v1/models"
    path += f"?token={KEY}" if key == "in the query" else ""
    check_all(keyed_lab.server.port, path, kind, given, fits=KEYS[key])


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_every_combination_on_the_daemon(daemon, kind, key):
    given = {"right": daemon.token, "wrong": daemon.token[::-1]}.get(key)
    path = "/v3/events" if kind == "websocket" else "/v3/sessions"
    path += f"?token={daemon.token}" if key == "in the query" else ""
    # Browsers cannot set headers of WebSockets, so only there the token can be in the query.
    check_all(daemon.port, path, kind, given, fits=KEYS[key] or (kind, key) == ("websocket", "in the query"))


def check_all(port, path, kind, key, *, fits):
    wrong = []
    for host, origin in product(HOSTS, ORIGINS):
        more = [*HANDSHAKE, *headers(origin, port, key)] if kind == "websocket" else headers(origin, port, key)
        answer = send(port, f"GET {path}", more, host=HOSTS[host][0].format(port=port))
        opened = 101 if kind == "websocket" else 200
        wanted = {200: opened}.get(expected(host, origin, fits), expected(host, origin, fits))
        allowed = answer.header("access-control-allow-origin")
        is_expected = (answer.status, answer.code) == (wanted, CODES.get(wanted, ""))
        if not is_expected or (allowed is not None and allowed != FRIEND):
            wrong.append((host, origin, answer, wanted, allowed))
    assert not wrong


@pytest.mark.slow
def test_preflight_requests_are_subject_to_the_same_checks(keyed_lab, daemon):
    """A preflight needs no key, since browsers send none. An allowed page can also read the error response."""
    asked = [("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "authorization")]
    wrong = []
    for port, path in ((keyed_lab.server.port, "/v1/chat/completions"), (daemon.port, "/v3/sessions")):
        for host, origin in product(HOSTS, ORIGINS):
            more = [*headers(origin, port, None), *asked]
            answer = send(port, f"OPTIONS {path}", more, host=HOSTS[host][0].format(port=port))
            friend = origin == "an allowed page"
            # Without an Origin of another page it is not a preflight, and the route has no method OPTIONS.
            wanted = {200: 200 if friend else 405}.get(expected(host, origin, True), expected(host, origin, True))
            allowed = answer.header("access-control-allow-origin")
            if answer.status != wanted or allowed != (FRIEND if friend else None):
                wrong.append((path, host, origin, answer.status, wanted, allowed))
    assert not wrong


@pytest.mark.parametrize(
    ("host", "is_doubled", "status"), [(None, False, 400), (" ", False, 421), ("evil.example", True, 400)]
)
def test_a_request_must_have_exactly_one_host(open_lab, daemon, host, is_doubled, status):
    for port in (open_lab.server.port, daemon.port):
        doubled = [("Host", f"127.0.0.1:{port}")] if is_doubled else []
        assert send(port, "GET /healthz", doubled, host=host).status == status


SIMPLE = (
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
)
"""Content types that a page can send to other origins without a preflight."""


@pytest.mark.parametrize("kind", [*SIMPLE, None, "", "text/json", "application/json, text/plain"])
@pytest.mark.parametrize("path", ["/admin/models/unload", "/admin/models/load", "/v1/chat/completions"])
def test_posts_that_need_no_preflight_change_nothing(open_lab, path, kind):
    named = [] if kind is None else [("Content-Type", kind)]
    body = b'{"model": "echo", "messages": [{"role": "user", "content": "x"}]}'
    # A page whose browser sends no Origin is treated like a program, which must send the JSON content type.
    fetched = [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "no-cors")]
    answer = send(open_lab.server.port, f"POST {path}", [*named, *fetched], body)
    assert (answer.status, b"send application/json" in answer.body) == (400, True)
    for origin in ("http://evil.example", "null"):
        assert send(open_lab.server.port, f"POST {path}", [*named, ("Origin", origin), *fetched], body).status == 403
    assert manager_of(open_lab).snapshot.model == "echo"


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("http://127.0.0.1:{port}/v1/models", "evil.example"),
        ("http://evil.example/v1/models", "evil.example"),
        ("http://evil.example/v1/models", "127.0.0.1:{port}"),
        ("//evil.example/", "evil.example"),
    ],
)
def test_a_url_in_the_request_line_does_not_bypass_the_checks(open_lab, target, host):
    port = open_lab.server.port
    assert send(port, f"GET {target.format(port=port)}", host=host.format(port=port)).status == 421


@pytest.mark.parametrize("name", ["X-Forwarded-Host", "X-Forwarded-For", "Forwarded", "X-Real-IP", "X-Original-URL"])
def test_headers_that_proxies_add_are_not_trusted(keyed_lab, name):
    values = {"X-Forwarded-Host": f"127.0.0.1:{keyed_lab.server.port}", "Forwarded": "for=127.0.0.1;host=localhost"}
    added = [(name, values.get(name, "/healthz" if name == "X-Original-URL" else "127.0.0.1"))]
    assert send(keyed_lab.server.port, "GET /v1/models", added, host="evil.example").status == 421
    assert send(keyed_lab.server.port, "GET /v1/models", added).status == 401


def test_other_machines_cannot_connect_by_default(open_lab, daemon):
    # The last is an address that every Linux machine has, but only servers on all interfaces listen on it.
    for address, port in product([*lan_addresses(), "127.0.0.2"], (open_lab.server.port, daemon.port)):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), RAW_WAIT_S)


def test_a_valid_request_is_answered_after_all_of_these(open_lab):
    answer = post(
        open_lab.server.port,
        "/v1/chat/completions",
        {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    )
    assert answer.status == 200

"""Host, Origin and key, in every combination, by HTTP and by WebSocket, on both servers as they run."""

from __future__ import annotations

import socket
from itertools import product

import pytest

from lmx_lab.daemon.daemon import Daemon
from lmx_lab.notebook import Lab
from lmx_lab.notebook.addresses import lan_addresses
from tests.security.conftest import FRIEND, KEY
from tests.security.raw_http import HANDSHAKE, WAIT_S, post, send

# By what they are: a value, with {port} for the server's own, and whether it may pass.
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


def expected(host: str, origin: str, key: bool) -> int:
    """The first that is wrong decides."""
    return 421 if not HOSTS[host][1] else 403 if not ORIGINS[origin][1] else 200 if key else 401


def headers(origin: str, port: int, key: str | None) -> list[tuple[str, str]]:
    value = ORIGINS[origin][0]
    told = [("Origin", value.format(port=port))] if value is not None else []
    return told + ([("Authorization", f"Bearer {key}")] if key is not None else [])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_every_combination_on_the_inference_server(keyed_lab: Lab, kind: str, key: str) -> None:
    given = {"right": KEY, "wrong": "x" + KEY}.get(key)
    path = "/v1/chat/stream" if kind == "websocket" else "/v1/models"
    path += f"?token={KEY}" if key == "in the query" else ""
    check_all(keyed_lab.port, path, kind, given, fits=KEYS[key])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_every_combination_on_the_daemon(daemon: Daemon, kind: str, key: str) -> None:
    given = {"right": daemon.token, "wrong": daemon.token[::-1]}.get(key)
    path = "/v3/events" if kind == "websocket" else "/v3/sessions"
    path += f"?token={daemon.token}" if key == "in the query" else ""
    # A browser's WebSocket has no headers of its own, so there alone it may be in the query.
    check_all(daemon.port, path, kind, given, fits=KEYS[key] or (kind, key) == ("websocket", "in the query"))


def check_all(port: int, path: str, kind: str, key: str | None, *, fits: bool) -> None:
    wrong = []
    for host, origin in product(HOSTS, ORIGINS):
        more = [*HANDSHAKE, *headers(origin, port, key)] if kind == "websocket" else headers(origin, port, key)
        answer = send(port, f"GET {path}", more, host=HOSTS[host][0].format(port=port))
        opened = 101 if kind == "websocket" else 200
        wanted = {200: opened}.get(expected(host, origin, fits), expected(host, origin, fits))
        allowed = answer.header("access-control-allow-origin")
        if answer.status != wanted or (allowed is not None and allowed != FRIEND):
            wrong.append((host, origin, answer.status, wanted, allowed))
    assert not wrong


def test_what_a_page_asks_beforehand_passes_the_same_doors(keyed_lab: Lab, daemon: Daemon) -> None:
    """It needs no key, which a browser does not send with it; a refusal, too, an allowed page can read."""
    asked = [("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "authorization")]
    wrong = []
    for port, path in ((keyed_lab.port, "/v1/chat/completions"), (daemon.port, "/v3/sessions")):
        for host, origin in product(HOSTS, ORIGINS):
            more = [*headers(origin, port, None), *asked]
            answer = send(port, f"OPTIONS {path}", more, host=HOSTS[host][0].format(port=port))
            friend = origin == "an allowed page"
            # For who is no other page the question has no answer: the route has no such method.
            wanted = {200: 200 if friend else 405}.get(expected(host, origin, True), expected(host, origin, True))
            allowed = answer.header("access-control-allow-origin")
            if answer.status != wanted or allowed != (FRIEND if friend else None):
                wrong.append((path, host, origin, answer.status, wanted, allowed))
    assert not wrong


@pytest.mark.parametrize("host", [None, "", "two"])
def test_a_request_has_one_host(open_lab: Lab, daemon: Daemon, host: str | None) -> None:
    for port in (open_lab.port, daemon.port):
        doubled = [("Host", f"127.0.0.1:{port}")] if host == "two" else []
        named = {None: None, "": " ", "two": "evil.example"}[host]
        assert send(port, "GET /healthz", doubled, host=named).status in (400, 421)


SIMPLE = (
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
)
"""What a page may send anywhere without asking first."""


@pytest.mark.parametrize("kind", [*SIMPLE, None, "", "text/json", "application/json, text/plain"])
@pytest.mark.parametrize("path", ["/admin/models/unload", "/admin/models/load", "/v1/chat/completions"])
def test_what_a_page_can_post_without_asking_changes_nothing(open_lab: Lab, path: str, kind: str | None) -> None:
    named = [] if kind is None else [("Content-Type", kind)]
    body = b'{"model": "echo", "messages": [{"role": "user", "content": "x"}]}'
    # A page whose browser tells no origin is taken for a program, and a program calls JSON by its name.
    fetched = [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "no-cors")]
    answer = send(open_lab.port, f"POST {path}", [*named, *fetched], body)
    assert (answer.status, b"send application/json" in answer.body) == (400, True)
    for origin in ("http://evil.example", "null"):
        assert send(open_lab.port, f"POST {path}", [*named, ("Origin", origin), *fetched], body).status == 403
    assert open_lab.engine.snapshot.model == "echo"


def test_a_post_without_a_body_is_refused_too_where_a_page_sends_it(open_lab: Lab) -> None:
    for origin in ("http://evil.example", "null"):
        assert send(open_lab.port, "POST /admin/models/unload", [("Origin", origin)]).status == 403
    assert open_lab.engine.snapshot.model == "echo"


def test_a_page_that_asks_first_is_told_no(open_lab: Lab, daemon: Daemon) -> None:
    asked = [("Access-Control-Request-Method", "POST"), ("Access-Control-Request-Headers", "content-type")]
    for port, path in ((open_lab.port, "/admin/models/unload"), (daemon.port, "/v3/sessions")):
        for origin in ("http://evil.example", "null", f"http://rebound.evil.example:{port}"):
            answer = send(port, f"OPTIONS {path}", [("Origin", origin), *asked])
            assert (answer.status, answer.header("access-control-allow-origin")) == (403, None)


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:{port}/v1/models", "http://evil.example/v1/models", "//evil.example/"]
)
def test_an_address_in_the_request_line_goes_round_no_check(open_lab: Lab, target: str) -> None:
    target = target.format(port=open_lab.port)
    assert send(open_lab.port, f"GET {target}", host="evil.example").status in (400, 421)


@pytest.mark.parametrize("name", ["X-Forwarded-Host", "X-Forwarded-For", "Forwarded", "X-Real-IP", "X-Original-URL"])
def test_what_a_proxy_would_add_is_not_believed(keyed_lab: Lab, name: str) -> None:
    values = {"X-Forwarded-Host": f"127.0.0.1:{keyed_lab.port}", "Forwarded": "for=127.0.0.1;host=localhost"}
    added = [(name, values.get(name, "/healthz" if name == "X-Original-URL" else "127.0.0.1"))]
    assert send(keyed_lab.port, "GET /v1/models", added, host="evil.example").status == 421
    assert send(keyed_lab.port, "GET /v1/models", added).status == 401


def test_by_default_no_other_machine_reaches_it(open_lab: Lab, daemon: Daemon) -> None:
    # The last is an address of every Linux machine that only who listens on all interfaces has.
    for address, port in product([*lan_addresses(), "127.0.0.2"], (open_lab.port, daemon.port)):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), WAIT_S)


def test_a_right_request_passes_after_all_of_these(open_lab: Lab) -> None:
    answer = post(
        open_lab.port,
        "/v1/chat/completions",
        {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    )
    assert answer.status == 200

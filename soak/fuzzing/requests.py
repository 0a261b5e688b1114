"""Generate almost valid HTTP requests, as bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import quote

from soak.fuzzing.values import KEYS, WORDS, changed_body, to_json

HOST = "HOST"
"""Placeholder for the server's address, which is unknown when a case is drawn."""
Headers = list[tuple[str, str]]
Ending = Literal["stay", "shut", "reset"]
LEAVING: tuple[Ending, ...] = ("shut", "shut", "reset")


@dataclass(frozen=True, kw_only=True)
class ValidRequest:
    """A valid request."""

    method: str
    path: str
    body: Any = None
    """JSON body, or None if the request has no body."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request, and what is known about it from its generation."""

    wire: bytes
    method: str
    whole: bool = True
    """Whether the request is complete by the rules of HTTP, so that an answer is required."""
    last: bool = False
    """Whether no further request may follow on the connection, because its start would be ambiguous."""
    end: Ending = "stay"
    """What the client does after sending: wait for the answer, close its side, or reset the connection."""


CONTENT_TYPES = (
    *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp", ""),
    *("application/json; charset=utf-16", "application/json;charset=utf-8", "APPLICATION/JSON", "application/json,x"),
    *("application/json ; a=b", "text/json", "*/*", "json", "application/json\x00", "a" * 5000, "é"),
)
MORE_HEADERS = (
    *(
        ("content-encoding", "gzip"),
        ("content-encoding", "identity"),
        ("content-encoding", "br, gzip"),
        ("te", "trailers"),
    ),
    *(
        ("accept", "text/html"),
        ("accept", "text/event-stream"),
        ("accept-encoding", "gzip"),
        ("expect", "100-continue"),
    ),
    *(
        ("expect", "the-moon"),
        ("upgrade", "websocket"),
        ("upgrade", "h2c"),
        ("connection", "upgrade"),
        ("host", "evil"),
    ),
    *(("origin", "null"), ("origin", "http://evil.example"), ("origin", "http://localhost"), ("cookie", "a=b" * 500)),
    *(("authorization", "Bearer x"), ("authorization", "Basic !!"), ("authorization", ""), ("x-request-id", "\t")),
    *(
        ("x-forwarded-for", "8.8.8.8"),
        ("x-forwarded-host", "evil"),
        ("forwarded", "for=8.8.8.8"),
        ("range", "bytes=0-"),
    ),
    *(
        ("x", "y" * 70_000),
        ("x" * 70_000, "y"),
        ("bad header", "y"),
        ("x:y", "z"),
        ("", "empty"),
        ("x", "a\rb"),
        ("x", "\0"),
    ),
    *(("connection", "close"), ("connection", "keep-alive"), ("keep-alive", "timeout=0"), ("if-none-match", "*")),
)
METHODS = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "POST", "post", "FOO", "A" * 200)
TARGETS = (
    *("/", "", "*", "//", "/..", "/%00", "/%", "/%zz", "/%c0%af", "/v1", "/v1/", "/v1//models", "/v1/./models"),
    *("/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fetc", "/v1/models/%00", "/v1/models/" + "a" * 3000),
    *("/v1/models/%ed%a0%80", "/v1/models/\xff", "/v1/chat/completions?x=" + "y" * 3000, "/v1/chat/completions#x"),
    *("http://evil.example/v1/models", "http://localhost/v1/models", "/docs/../v1/models", "/v3/../v1/models"),
    *("/metrics?a[]=1", "/admin/models?x", "/healthz;a=b", "/openapi.json?%", "evil.example:443", "/v1/models\tx"),
)
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x5a" * 64,  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    *(b"GET /\r\n\r\n", b"GET / HTTP/0.9\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n", b"\0" * 100, b"\n"),
    *(b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\nHost: x\n\n", b"POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
    *(b"GET / HTTP/1.1\r\n Host: x\r\n\r\n", b"SSH-2.0-x\r\n", b"*1\r\n$4\r\nPING\r\n", b"A" * 70_000),
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
)
NO_UTF8 = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf")
AGAIN = (b'"model":5', b'"model":"tiny"', b'"messages":[]', b'"max_tokens":3', b'"":1')
IN_FRONT = (b"\xef\xbb\xbf", b" \r\n\t", b"\0", b")]}',\n")
BEHIND = (b" \n", b"\0", b"{}", b",", b"]", b"}", b"//x")
BODY_LIMIT_BYTES = 8 * 2**20
VALID, CHUNKED, INVALID = "right", "chunked", "broken"
FRAMINGS = (*(VALID,) * 16, *(CHUNKED,) * 2, *(INVALID,) * 2)


def http_case(chance: random.Random, valid_requests: Sequence[ValidRequest], more_headers: Headers) -> Case:
    """Return one of the valid requests with a changed body, head or framing."""
    valid_request = chance.choice(valid_requests)
    bodies = [each.body for each in valid_requests if each.body is not None]
    body = b""
    if valid_request.body is not None and chance.randint(0, 9):
        tree = changed_body(chance, valid_request.body, bodies) if chance.randint(0, 5) else valid_request.body
        body = _encode(chance, to_json(tree, escaped=chance.random() < 0.5))
    method, target = valid_request.method, valid_request.path
    if not chance.randint(0, 24):
        method = chance.choice(METHODS)
    if not chance.randint(0, 14):
        target = _other_target(chance, target)
    head: Headers = [("host", HOST), *more_headers]
    if body or chance.random() < 0.5:
        kind = chance.choice(CONTENT_TYPES) if not chance.randint(0, 19) else "application/json"
        head.append(("content-type", kind))
    if not chance.randint(0, 14):
        head += [chance.choice(MORE_HEADERS) for _ in range(chance.randint(1, 3))]
    return _frame(chance, method, target, head, body)


def endless_case(chance: random.Random, valid_requests: Sequence[ValidRequest]) -> Case:
    """Return a changed request for a stream without an end; the client resets the connection after sending it.

    To a client that only ends its own side, the stream would be sent for ever.
    """
    return replace(http_case(chance, valid_requests, []), whole=False, last=True, end="reset")


def _frame(chance: random.Random, method: str, target: str, head: Headers, body: bytes) -> Case:
    framing = chance.choice(FRAMINGS)
    if framing == CHUNKED:
        size = chance.choice((1, 7, 1000, 100_000))
        # One chunk for each byte of a long body would take too long for what it can find.
        pieces = [body[at : at + size] for at in range(0, len(body), size)] if len(body) < 400 * size else [body]
        sent = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        return Case(wire=_head(method, target, [*head, ("transfer-encoding", "chunked")]) + sent, method=method)
    if framing == VALID:
        head = [*head, ("content-length", str(len(body)))] if body or method != "GET" else head
        return Case(wire=_head(method, target, head) + body, method=method)
    return _invalid_framing(chance, method, target, head, body)


def _invalid_framing(chance: random.Random, method: str, target: str, head: Headers, body: bytes) -> Case:
    """Return a request with ambiguous framing, or one that is incomplete."""
    length = str(len(body))
    how = chance.randint(0, 8)
    end = chance.choice(LEAVING)
    chunked = ("transfer-encoding", "chunked")
    if how == 0:
        headers, sent = [("content-length", str(len(body) + chance.randint(1, 10_000)))], body
    elif how == 1:
        headers, sent = [("content-length", str(max(0, len(body) - chance.randint(1, 50))))], body
    elif how == 2:
        lengths = ("-1", "1e3", "0x10", "+5", "9" * 30, "", " ", "5, 5", "5, 6", "\u0665")
        headers, sent = [("content-length", chance.choice(lengths))], body
    elif how == 3:
        headers, sent = [("content-length", length), ("content-length", str(len(body) + 1))], body
    elif how == 4:
        headers, sent = [("content-length", length), chunked], body
    elif how == 5:
        headers, sent = [chunked], b"%x\r\n%s" % (len(body) + 5, body)
    elif how == 6:
        sizes = (b"-1", b"zz", b"", b"f" * 40, b"5;ext=" + b"a" * 20_000, b"5\n", b"0x5", b" 5")
        headers, sent = [chunked], chance.choice(sizes) + b"\r\n" + body
    elif how == 7:
        headers, sent = (
            [("transfer-encoding", chance.choice(("gzip", "chunked, chunked", "identity", "x")))],
            body,
        )
    else:
        whole = _head(method, target, [*head, ("content-length", length)]) + body
        cut = chance.randint(0, max(0, len(whole) - 1))
        return Case(wire=whole[:cut], method=method, whole=False, last=True, end=end)
    return Case(wire=_head(method, target, [*head, *headers]) + sent, method=method, whole=False, last=True, end=end)


def _head(method: str, target: str, headers: Headers) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass")


def _other_target(chance: random.Random, target: str) -> str:
    how = chance.randint(0, 3)
    if how == 0:
        return chance.choice(TARGETS)
    word = quote(chance.choice((*WORDS, *KEYS)), safe="", errors="surrogatepass")[:3000]
    if how == 1:
        return f"{target}{chance.choice(('?', '&', '?after=', '?wait=', '?limit=', '/'))}{word}"
    parts = target.split("/")
    parts[chance.randint(0, len(parts) - 1)] = word
    return "/".join(parts)


def _encode(chance: random.Random, text: str) -> bytes:
    """Encode the text of a body, mostly correctly."""
    whole = text.encode("utf-8", "surrogatepass")
    if chance.randint(0, 4):
        return whole
    at = chance.randint(0, len(whole))
    before, behind = whole[:at], whole[at:]
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: before,
        lambda: before + behind[1:],
        lambda: before + chance.randbytes(chance.randint(1, 4)) + behind,
        lambda: before + chance.randbytes(chance.randint(1, 2)) + behind[2:],
        lambda: before + chance.choice(NO_UTF8) + behind,
        lambda: whole.replace(b"{", b"{" + chance.choice(AGAIN) + b",", 1),
        lambda: chance.choice(IN_FRONT) + whole,
        lambda: whole + chance.choice((*BEHIND, whole[:2000])),
        lambda: text.encode("utf-16", "surrogatepass"),
        lambda: whole.replace(b'"', b"'"),
    )
    return chance.choice(changes)()


def raw_case(chance: random.Random) -> Case:
    """Return data that is hardly HTTP, or not at all."""
    wire = chance.choice(GARBAGE) if chance.random() < 0.5 else chance.randbytes(chance.randint(1, 300))
    if chance.random() < 0.5:
        wire = wire[: chance.randint(1, len(wire))]
    return Case(wire=wire, method="GET", whole=False, last=True, end=chance.choice(LEAVING))


def too_large(valid_request: ValidRequest, more_headers: Headers) -> Case:
    """Return a complete request above the default size limit."""
    body = b'{"model": "' + b"a" * BODY_LIMIT_BYTES + b'"}'
    head = [("host", HOST), *more_headers, ("content-type", "application/json"), ("content-length", str(len(body)))]
    return Case(wire=_head(valid_request.method, valid_request.path, head) + body, method=valid_request.method)

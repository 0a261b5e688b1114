"""Tests of the parts of a connection: addresses, keys, errors, and the decoder of server-sent events."""

import json
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmx_lab import errors
from lmx_lab.client import LabClient
from lmx_lab.client.connection import (
    EventDecoder,
    Remark,
    UnexpectedResponse,
    authorization_header,
    is_loopback,
    lab_server_error,
    normalize_address,
    parse_error,
    was_sent,
)
from lmx_lab.client.daemon_routes import DAEMON
from lmx_lab.http.errors import respond
from tests.support.asking import error_classes

TEXT = "a\u2028b\u0085c\x0bé\U0001f600"

# Addresses and keys


@pytest.mark.parametrize(
    ("pasted", "normalized"),
    [
        ("http://127.0.0.1:8400", "http://127.0.0.1:8400"),
        ("http://127.0.0.1:8400/", "http://127.0.0.1:8400"),
        (" http://127.0.0.1:8400/v1/ \n", "http://127.0.0.1:8400"),
        ("localhost:8400", "http://localhost:8400"),
        ("studio.local:8400/v1", "http://studio.local:8400"),
        ("http://[::1]:8400/v1", "http://[::1]:8400"),
        ("http://hub/user/x/proxy/8400/", "http://hub/user/x/proxy/8400"),
        ("https://hub/user/x/proxy/8400/v1", "https://hub/user/x/proxy/8400"),
        ("https://hub/user/v1/proxy/8400", "https://hub/user/v1/proxy/8400"),
        ("HTTP://Hub:80/", "http://hub"),
    ],
)
def test_an_address_is_normalized(pasted, normalized):
    assert normalize_address(pasted) == normalized
    assert normalize_address(normalized) == normalized


@pytest.mark.parametrize(
    "pasted",
    [
        *("", "/", "//hub", "ftp://hub", "ws://hub", "http://", "http://a:b", "http://[::1", "http://h:0"),
        *("http://h:70000", "\ud800", "http://\x00", f"http://{'a' * 5000}"),
    ],
)
def test_an_invalid_address_is_refused(pasted):
    with pytest.raises(errors.InvalidRequestError) as caught:
        normalize_address(pasted)
    assert caught.value.param == "url"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "pasted", ["http://me:hidden@host", "http://host/?token=hidden", "host#hidden", "http://hidden@host:99999/"]
)
def test_a_secret_in_an_address_is_refused_without_showing_it(pasted):
    with pytest.raises(errors.InvalidRequestError) as caught:
        normalize_address(pasted)
    assert "api_key" in str(caught.value)
    assert "hidden" not in f"{caught.value!r} {caught.value.__context__!r}"


@pytest.mark.parametrize("key", ["", " hidden", "hid den", "hidden\n", "hiddén"])
def test_a_key_that_is_not_valid_in_a_header_is_refused_without_showing_it(key):
    with pytest.raises(errors.InvalidRequestError) as caught:
        authorization_header(key)
    assert caught.value.param == "api_key"
    assert "hid" not in str(caught.value)


def test_without_a_key_there_is_no_header():
    assert authorization_header(None) == {}


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("http://localhost:1", True),
        ("http://127.1.2.3", True),
        ("http://[::1]:1", True),
        ("http://10.0.0.1", False),
        ("http://studio.local", False),
    ],
)
def test_loopback_addresses_are_recognized(address, loopback):
    assert is_loopback(address) is loopback


# Errors


def answer(body, status=500, kind="application/json", retry_after=None):
    return UnexpectedResponse(url="http://h", status=status, content_type=kind, retry_after=retry_after, body=body)


def test_the_table_has_every_code():
    assert set(errors.ERROR_CLASSES) == {kind.code for kind in error_classes()}
    assert all(kind.code == code for code, kind in errors.ERROR_CLASSES.items())


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_a_servers_error_is_the_same_error_in_the_client(kind):
    scope = {"path": "/", "lmx_lab.request_id": "req_1"}
    response = respond(scope, kind("why, and what to do", param="messages.0", retry_after_s=1.5))
    retry_after = response.headers["retry-after"]
    error = lab_server_error(answer(bytes(response.body), response.status_code, retry_after=retry_after))
    assert error.code == kind.code
    assert issubclass(kind, type(error)) or issubclass(type(error), kind)
    assert (error.message[:19], error.param, error.retry_after_s) == ("why, and what to do", "messages.0", 2.0)


def test_the_traceback_of_a_failed_connection_has_no_frames_of_the_http_library():
    with (
        LabClient("http://127.0.0.1:9") as client,
        pytest.raises(errors.UnreachableError, match="start the server") as caught,
    ):
        client.models()
    assert "httpcore" not in "".join(traceback.format_exception(caught.value))
    assert not was_sent(caught.value)


@pytest.mark.parametrize(
    ("error", "server", "kind", "text"),
    [
        ({"code": "moon-full", "message": "wait", "new": 1}, {}, errors.LabError, "wait (moon-full)"),
        ({"code": None, "message": "no", "type": "x", "param": None}, {}, errors.LabError, "no"),
        ({"code": "unauthorized", "message": "it needs its key"}, {}, errors.UnauthorizedError, "api_key="),
        ({"code": "unauthorized", "message": "no token"}, {"server": DAEMON}, errors.UnauthorizedError, " token="),
    ],
    ids=["unknown code", "another chat server", "missing key", "missing token"],
)
def test_errors_are_parsed_and_a_missing_key_names_its_argument(error, server, kind, text):
    found = parse_error(json.dumps({"error": error}), **server)
    assert (type(found), text in str(found)) == (kind, True)


@pytest.mark.parametrize(("reason", "read"), [("ahead", "ahead"), ("other-stream", "other-stream"), ("moon", "pruned")])
def test_an_expired_cursor_keeps_its_reason(reason, read):
    error = parse_error(f'{{"error": {{"code": "cursor-expired", "message": "m", "reason": "{reason}"}}}}')
    assert isinstance(error, errors.CursorExpiredError)
    assert error.reason == read


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b'{"error": "no"}', b'{"error": {"code": "queue-full"}}', b'{"detail": "Not Found"}', b"\xff"]
)
def test_an_error_of_another_program_names_the_address_and_the_response(body):
    error = lab_server_error(answer(body, 404, "text/html; charset=utf-8"))
    assert isinstance(error, errors.UnreachableError)
    assert all(part in str(error) for part in ("http://h", "404", "text/html"))


@pytest.mark.parametrize(("status", "hint"), [(302, "login"), (403, "login"), (500, "behind it"), (200, "address")])
def test_the_message_guesses_what_is_in_front_of_the_server(status, hint):
    assert hint in str(lab_server_error(answer(b"<html>", status, "text/html")))


@pytest.mark.parametrize("retry_after", [None, "", "soon", "-1", "Wed, 21 Oct 2026 07:28:00 GMT", "٣"])
def test_an_advised_delay_that_is_not_a_number_is_ignored(retry_after):
    error = parse_error('{"error": {"code": "queue-full", "message": "m"}}', retry_after=retry_after)
    assert error.retry_after_s is None


# Server-sent events


def test_data_and_comments_are_returned_in_order():
    stream = b': queued\n\ndata: {"a": 1}\n\n:prompt 1/2\ndata:x\n\n'
    assert EventDecoder().feed(stream) == [Remark(text="queued"), '{"a": 1}', Remark(text="prompt 1/2"), "x"]


def test_the_lines_of_an_event_are_joined_and_other_fields_are_skipped():
    stream = b"event: e\r\nid: 1\r\nretry: 5\r\ndata: a\r\ndata:  b\r\ndata\r\n\r\nid: 2\r\n\r\n"
    assert EventDecoder().feed(stream) == ["a\n b\n"]


@pytest.mark.slow
@given(st.lists(st.text(max_size=5).map(json.dumps) | st.just(json.dumps(TEXT, ensure_ascii=False))), st.data())
def test_bytes_may_be_split_anywhere(texts, data):
    stream = "".join(f"data: {text}\n\n" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder = EventDecoder()
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [event for piece in pieces for event in decoder.feed(piece)] == texts


def test_an_incomplete_event_is_not_returned():
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\n") == []
    assert decoder.feed(b"\n") == ["a"]


def test_empty_lines_count_towards_the_limit():
    decoder = EventDecoder(max_event_bytes=1000)
    assert decoder.feed(b"data:\n" * 1000) == []
    with pytest.raises(ValueError, match="more than"):
        decoder.feed(b"data:\n")


@pytest.mark.parametrize("line_end", [b"", b"\n"])
def test_the_size_of_an_event_is_limited(line_end):
    decoder = EventDecoder()
    piece = b"data: " + b"x" * 2_000_000 + line_end
    assert decoder.feed(piece) == []
    with pytest.raises(ValueError, match="more than"):
        decoder.feed(piece + piece)

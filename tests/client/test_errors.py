"""Tests of the translation of error responses to error classes."""

import traceback

import pytest

from lmx_lab.client import LabClient
from lmx_lab.client.errors import DAEMON, UnexpectedResponse, lab_server_error, parse_error, was_sent
from lmx_lab.errors import ERROR_CLASSES, CursorExpiredError, LabError, UnreachableError
from lmx_lab.http.errors import respond
from tests.support.asking import error_classes


def answer(body, status=500, kind="application/json", retry_after=None):
    return UnexpectedResponse(url="http://h", status=status, content_type=kind, retry_after=retry_after, body=body)


def test_the_table_has_every_code():
    assert set(ERROR_CLASSES) == {kind.code for kind in error_classes()}
    assert all(kind.code == code for code, kind in ERROR_CLASSES.items())


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
    with LabClient("http://127.0.0.1:9") as client, pytest.raises(UnreachableError, match="start the server") as caught:
        client.models()
    assert "httpcore" not in "".join(traceback.format_exception(caught.value))
    assert not was_sent(caught.value)


def test_an_unknown_code_is_kept_in_the_message():
    error = parse_error('{"error": {"code": "moon-full", "message": "wait", "new": 1}}')
    assert (type(error), str(error)) == (LabError, "wait (moon-full)")


def test_an_error_of_another_chat_server_is_parsed():
    error = parse_error('{"error": {"code": null, "message": "no", "type": "x", "param": null}}')
    assert (type(error), str(error)) == (LabError, "no")


def test_a_missing_key_names_the_argument():
    error = parse_error('{"error": {"code": "unauthorized", "message": "this server needs its key"}}')
    assert "api_key=" in str(error)


@pytest.mark.parametrize(("reason", "read"), [("ahead", "ahead"), ("other-stream", "other-stream"), ("moon", "pruned")])
def test_an_expired_cursor_keeps_its_reason(reason, read):
    error = parse_error(f'{{"error": {{"code": "cursor-expired", "message": "m", "reason": "{reason}"}}}}')
    assert isinstance(error, CursorExpiredError)
    assert error.reason == read


def test_a_missing_token_of_the_daemon_names_its_argument():
    error = parse_error('{"error": {"code": "unauthorized", "message": "no token"}}', server=DAEMON)
    assert "token=" in str(error)
    assert "api_key" not in str(error)


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b'{"error": "no"}', b'{"error": {"code": "queue-full"}}', b'{"detail": "Not Found"}', b"\xff"]
)
def test_an_error_of_another_program_names_the_address_and_the_response(body):
    error = lab_server_error(answer(body, 404, "text/html; charset=utf-8"))
    assert isinstance(error, UnreachableError)
    assert all(part in str(error) for part in ("http://h", "404", "text/html"))


@pytest.mark.parametrize(("status", "hint"), [(302, "login"), (403, "login"), (500, "behind it"), (200, "address")])
def test_the_message_guesses_what_is_in_front_of_the_server(status, hint):
    assert hint in str(lab_server_error(answer(b"<html>", status, "text/html")))


@pytest.mark.parametrize("retry_after", [None, "", "soon", "-1", "Wed, 21 Oct 2026 07:28:00 GMT", "٣"])
def test_an_advised_delay_that_is_not_a_number_is_ignored(retry_after):
    error = parse_error('{"error": {"code": "queue-full", "message": "m"}}', retry_after=retry_after)
    assert error.retry_after_s is None

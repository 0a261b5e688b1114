"""Check answers against the rules that hold for every request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load

from soak.fuzzing.exchange import Outcome
from soak.fuzzing.frames import SocketCase
from soak.fuzzing.requests import Case

ENVELOPE = frozenset({"code", "message", "type", "param", "retryable", "request_id"})
MESSAGES_ENVELOPE = frozenset({"code", "message", "type", "request_id"})
"""Fields of an error of the Messages format, in which the id is beside the error."""
ERROR_BYTES = 16_384
"""Largest error body; an error must not repeat the whole request."""
NOT_HTTP = b"Invalid HTTP request received."
"""Body of uvicorn's answer 400 to invalid HTTP."""
NO_UPGRADE = b"Unsupported upgrade request."
DATA = re.compile(r"\A(?:event: \S+\n)?data: ")
"""Beginning of an event, with its name if it has one."""
LAST_EVENTS = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
"""Types of the events with which streams of the formats Messages and Responses end."""
CLOSE_CODES = frozenset({1000, 1001, 1002, 1005, 1006, 1007, 1008, 1009, 1011, 1012, 1013, 1003, *range(3000, 5000)})


def answer_problems(case: Case, outcome: Outcome, refusals: frozenset[tuple[int, str]]) -> Iterator[str]:
    """Yield what is wrong with the answer to a request.

    Args:
        refusals: Statuses and error codes that the route declares in addition to 4xx.
    """
    if outcome.ended == "hung":
        yield f"no answer within {outcome.seconds:.0f} s"
    elif outcome.ended == "refused":
        yield f"no connection: {outcome.detail}"
    elif outcome.ended == "broken":
        yield f"the answer is not HTTP: {outcome.detail}"
    elif outcome.ended == "closed":
        if case.whole and case.end == "stay":
            yield f"closed {'in the middle of' if outcome.status else 'without'} an answer {outcome.detail}".rstrip()
    else:
        yield from _content_problems(case.method, outcome, refusals)


def _content_problems(method: str, outcome: Outcome, refusals: frozenset[tuple[int, str]]) -> Iterator[str]:
    status, body = outcome.status or 0, outcome.body
    if method == "HEAD" or status in (204, 304):
        if body:
            yield f"a body with {method} and status {status}"
        return
    if status >= 400:
        yield from _error_problems(status, body, refusals)
        return
    kind = outcome.headers.get("content-type", "").partition(";")[0]
    if kind == "application/json":
        yield from _json_problems(body)
    elif kind == "text/event-stream":
        yield from _stream_problems(body, refusals)
    elif kind == "application/x-ndjson":
        yield from _lines_problems(body, refusals)
    elif kind == "application/x-safetensors":
        try:
            load(body)
        except SafetensorError as exc:
            yield f"not a safetensors document: {exc}"
    elif kind not in ("text/html", "text/plain", "text/javascript", "text/css") or not 200 <= status < 400:
        yield f"status {status} with content type {kind!r}"


def _error_problems(status: int, body: bytes, refusals: frozenset[tuple[int, str]]) -> Iterator[str]:
    if (status, body) in ((400, NOT_HTTP), (400, NO_UPGRADE)):
        return
    try:
        document = json.loads(body)
        error = document["error"]
        # Ollama's format has the message as the error, and the code beside it.
        is_flat = isinstance(error, str)
        code, message = (document["code"], error) if is_flat else (error["code"], error["message"])
    except (ValueError, TypeError, KeyError):
        yield f"status {status} without the fields of an error: {body[:300]!r}"
        return
    if status >= 500 and (status, code) not in refusals:
        yield f"status {status}, {code}: {message[:300]}"
    if document.get("type") == "error":
        yield from _envelope_problems({**error, "request_id": document.get("request_id")}, MESSAGES_ENVELOPE)
    elif not is_flat:
        yield from _envelope_problems(error)
    if len(body) > ERROR_BYTES:
        yield f"an error has {len(body)} bytes"


def _envelope_problems(error: dict[str, Any], envelope: frozenset[str] = ENVELOPE) -> Iterator[str]:
    if set(error) - {"reason"} != envelope:
        yield f"an error has the fields {sorted(error)}"
    elif not isinstance(error["code"], str) or not isinstance(error["message"], str) or not error["message"]:
        yield f"an error has no code or message: {error}"


def _json_problems(body: bytes) -> Iterator[str]:
    def reject_constant(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    try:
        json.dumps(json.loads(body, parse_constant=reject_constant), ensure_ascii=False).encode()
    except ValueError as exc:
        yield f"an answer is not JSON: {exc}"


def _stream_problems(body: bytes, refusals: frozenset[tuple[int, str]]) -> Iterator[str]:
    try:
        blocks = [block for block in body.decode().split("\n\n") if block and not block.startswith(":")]
    except UnicodeDecodeError as exc:
        yield f"a stream is not UTF-8: {exc}"
        return
    lines = [DATA.sub("", block) for block in blocks]
    if not body.endswith(b"\n\n") or not lines:
        yield "a stream ends in the middle of a line"
        return
    for line in lines[:-1]:
        yield from _json_problems(line.encode())
    if lines[-1] != "[DONE]":
        last = json.loads(lines[-1])
        if last.get("type") in LAST_EVENTS:
            return
        error = last.get("error") or {}
        if not any(code == error.get("code") for _, code in refusals):
            yield f"a stream ends with {lines[-1][:300]}"


def _lines_problems(body: bytes, refusals: frozenset[tuple[int, str]]) -> Iterator[str]:
    *lines, rest = body.split(b"\n")
    if rest or not lines:
        yield "a stream ends in the middle of a line"
        return
    for line in lines:
        yield from _json_problems(line)
    last = json.loads(lines[-1])
    is_end = last.get("done") is True or last.get("status") == "success"
    if not is_end and not any(code == last.get("code") for _, code in refusals):
        yield f"a stream ends with {lines[-1][:300]!r}"


def socket_problems(case: SocketCase, outcome: Outcome, refusals: frozenset[tuple[int, str]]) -> Iterator[str]:
    """Yield what is wrong with the course of a WebSocket."""
    if outcome.ended == "hung":
        yield f"no end within {outcome.seconds:.0f} s; messages: {str(outcome.messages)[:300]}"
    elif outcome.ended == "refused":
        yield f"no connection: {outcome.detail}"
    elif outcome.ended == "broken":
        yield outcome.detail
    elif outcome.status is not None and outcome.status != 101:
        if case.valid:
            yield f"a valid handshake is refused with {outcome.status}: {outcome.body[:300]!r}"
        elif not case.upgrades:
            yield from _content_problems("GET", outcome, refusals)
        elif outcome.status < 400:
            yield f"a handshake is answered with {outcome.status}"
        elif outcome.status == 426 or outcome.headers.get("content-type", "").startswith("text/plain"):
            # The WebSocket library refuses the handshake itself, with its own message.
            if outcome.status >= 500:
                yield f"status {outcome.status}: {outcome.body[:300]!r}"
        else:
            yield from _error_problems(outcome.status, outcome.body, refusals)
    elif outcome.status is None and case.valid:
        yield "a valid handshake gets no answer"
    elif outcome.status == 101:
        yield from _message_problems(case, outcome)


def _message_problems(case: SocketCase, outcome: Outcome) -> Iterator[str]:
    messages = outcome.messages
    errors = [message["error"] for message in messages if "error" in message]
    ends = [message for message in messages if "done" in message]
    if len(ends) > 1:
        yield f"one answer has {len(ends)} ends"
    for error in errors:
        yield from _envelope_problems(error)
        if error.get("code") == "internal-error":
            yield f"an internal error: {error.get('message')}"
    if outcome.close_code == 1011 and not errors:
        yield "closed with 1011 without an error message"
    if outcome.close_code is not None and outcome.close_code not in CLOSE_CODES:
        yield f"closed with the code {outcome.close_code}"
    is_answered = ends or errors or any("event" in message for message in messages)
    if case.answered and not is_answered:
        yield f"a complete message has no answer; close code {outcome.close_code}, messages {str(messages)[:200]}"

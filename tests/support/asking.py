"""Send requests to a lab, and read its answers and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from lmx_lab.errors import InvalidRequestError, LabError
from lmx_lab.values.outputs import FinishReason, GenerationReport
from lmx_lab.wire.chat import ChatRequest

HELLO = [{"role": "user", "content": "hello"}]
SEA = [{"role": "user", "content": "The sea is wide and deep, and what it says it says again and again."}]
"""A message with more tokens than ``echo_body`` requests, so that the echo engine always has enough to repeat."""
ENDLESS: dict[str, Any] = {"max_tokens": 30_000, "ignore_eos": True}
"""An answer of half a minute at ``PACE``, which the tests cancel."""
ENDLESS_TEXT = "a " * 10_000
"""A message whose repetition takes ten seconds at ``PACE``, for formats without ``ignore_eos``."""


def echo_body(**changes: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": SEA, "temperature": 0, "max_tokens": 8, **changes}


def echo_request(**changes: Any) -> ChatRequest:
    return ChatRequest.model_validate(echo_body(**changes))


def chat_body(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 8, **changes}


def each_value(**fields: Sequence[Any]) -> list[tuple[dict[str, Any], str]]:
    """Return for each value of each field a body with only that field, and the name of the field."""
    return [({name: value}, name) for name, values in fields.items() for value in values]


def events(text: str) -> list[str]:
    """Return the data of server-sent events, in order and without comments."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith(("data: ", ": ")) and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]


CHAT = "/v1/chat/completions"
CHAT_WAIT_S = 60


def refused(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """Check that an answer is this error and return it."""
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert error["request_id"] == answer.headers["x-request-id"]
    return error


def error_of(response: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """Check that an answer is this error, after which the same request can never succeed, and return it."""
    error = refused(response, status, code)
    assert error["message"]
    assert set(error) == {"code", "message", "type", "param", "retryable", "request_id"}
    assert not error["retryable"], "the same request can never succeed"
    return error


@contextmanager
def invalid(param: str, match: str | None = None, error: type[LabError] = InvalidRequestError) -> Iterator[None]:
    """Check that the block raises this error, which names this parameter of a request."""
    with pytest.raises(error, match=match) as caught:
        yield
    assert caught.value.param == param


def chat(**changes: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **changes})


def report(
    *,
    prompt: int = 10,
    cached: int = 0,
    from_disk: int = 0,
    output: int = 5,
    decode_s: float = 2.0,
    reasoning: int = 0,
    finish: FinishReason = "stop",
) -> GenerationReport:
    return GenerationReport(
        model="tiny",
        finish_reason=finish,
        reasoning_tokens=reasoning,
        prompt_tokens=prompt,
        cached_tokens=cached,
        disk_cached_tokens=from_disk,
        output_tokens=output,
        queue_s=0.0,
        prefill_s=1.0,
        ttft_s=1.1,
        decode_s=decode_s,
        peak_memory_bytes=0,
    )


def error_classes(root: type[LabError] = LabError) -> list[type[LabError]]:
    return [root, *(found for child in root.__subclasses__() for found in error_classes(child))]

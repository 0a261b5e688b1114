"""Checks of answers that the tests of the routes share."""

from __future__ import annotations

from typing import Any

import httpx2


def refused(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """Check that an answer is this error and return it."""
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert error["request_id"] == answer.headers["x-request-id"]
    return error

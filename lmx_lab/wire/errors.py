"""The error body: ``code`` and ``message`` are the specification's, the rest is what chat-format clients expect."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Expiry = Literal["pruned", "ahead", "other-stream"]


class ErrorDetail(BaseModel):
    code: str
    message: str
    type: str
    param: str | None = None
    retryable: bool = False
    """Whether the same request can succeed at another time, without anybody doing anything about it."""
    request_id: str | None = None
    reason: Expiry | None = Field(None, exclude_if=lambda reason: reason is None)
    """Of ``cursor-expired``, and there alone."""


class ErrorBody(BaseModel):
    error: ErrorDetail

"""The error body: ``code`` and ``message`` are the specification's, the rest is what chat-format clients expect."""

from __future__ import annotations

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    code: str
    message: str
    type: str
    param: str | None = None
    retryable: bool = False
    """Whether the same request can succeed at another time, without anybody doing anything about it."""
    request_id: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail

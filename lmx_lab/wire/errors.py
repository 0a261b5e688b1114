"""The body of error responses: ``code``, ``message``, and the other fields that chat clients expect."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Expiry = Literal["pruned", "ahead", "other-stream"]


class ErrorDetail(BaseModel):
    """An error."""

    code: str
    message: str
    type: str
    param: str | None = None
    retryable: bool = False
    """Whether the same request can succeed later without any change."""
    request_id: str | None = None
    reason: Expiry | None = Field(None, exclude_if=lambda reason: reason is None)
    """Only for ``cursor-expired``: why the cursor is not valid."""


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: ErrorDetail

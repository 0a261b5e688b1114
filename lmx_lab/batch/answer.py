"""Define the answer to a row, which is stored in a cache and shown in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RowAnswer:
    """The answer to a row, or the error that prevented it."""

    text: str | None = None
    reasoning: str = ""
    finish_reason: str | None = None
    error: str | None = None
    """The reason why there is no answer, or why its values do not match the schema."""
    code: str = ""
    """The code of the error (``LabError.code``)."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    """Time from sending the request to the end of the answer, including the wait in the queue."""
    request_id: str | None = None
    """Id of the request: ``lab.requests[request_id]`` returns its record. None for an attached lab."""
    logprobs: Sequence[float] | None = None
    """Log-probability of each choice after the prompt; None if the row has no choices."""

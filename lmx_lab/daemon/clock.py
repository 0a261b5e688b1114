"""Times as the API writes them: UTC in ISO 8601 with milliseconds, which sort as text."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def iso(at_s: float | None = None) -> str:
    """Unix seconds, by default now, as ``2026-11-21T10:00:00.123Z``."""
    at = datetime.fromtimestamp(time.time() if at_s is None else at_s, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"


def unix_s(at: str) -> float:
    """The Unix seconds of such a time."""
    return datetime.fromisoformat(at).timestamp()

"""Encode timestamps, values and events as the JSON that the daemon's API sends."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from lmx_lab.http.streaming import escape_line_ends
from lmx_lab.sanitize import finite, replace_surrogates


def timestamp(at_s: float | None = None) -> str:
    """Format a time in UTC with milliseconds, such as ``2026-11-21T10:00:00.123Z``. The texts sort by time.

    Args:
        at_s: Unix time in seconds; the current time by default.
    """
    at = datetime.fromtimestamp(time.time() if at_s is None else at_s, UTC)
    return f"{at.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def parse_timestamp(text: str) -> float:
    """Return the Unix time in seconds of a text that ``timestamp`` has made."""
    return datetime.fromisoformat(text).timestamp()


def to_json(data: BaseModel) -> str:
    """Serialize a model as JSON in valid UTF-8.

    A tool can return lone surrogates, which UTF-8 cannot encode. They are replaced by question marks.
    """
    try:
        return data.model_dump_json()
    except PydanticSerializationError:
        text = json.dumps(finite(data.model_dump(mode="python", warnings=False)), ensure_ascii=False, default=str)
        return replace_surrogates(text)


def encode_event(
    *,
    event: str,
    data: str,
    seq: int | None,
    at: str,
    stream_id: str,
    session_id: str | None = None,
    turn_id: str | None = None,
    stats: str | None = None,
) -> str:
    """Build the envelope of an event as JSON.

    Args:
        data: The event's data as JSON.
        seq: The event's number in the log, or None for a control frame.
        stats: The turn's statistics as JSON. If None, the envelope has no such field.
    """
    ending = "" if stats is None else f',"stats":{stats}'
    return escape_line_ends(
        f'{{"event":"{event}","seq":{"null" if seq is None else seq},"at":"{at}","stream_id":"{stream_id}",'
        f'"session_id":{_quote(session_id)},"turn_id":{_quote(turn_id)},"data":{data}{ending}}}'
    )


def _quote(identifier: str | None) -> str:
    # Identifiers contain no characters that JSON would have to escape.
    return "null" if identifier is None else f'"{identifier}"'

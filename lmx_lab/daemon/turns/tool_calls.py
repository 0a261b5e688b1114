"""Normalize tool calls of a model and their results: ids, names, arguments, and the length of a result. Does no I/O."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from lmx_lab.client.chat_chunks import CompleteToolCall
from lmx_lab.sanitize import replace_surrogates
from lmx_lab.wire.base import new_id
from lmx_lab.wire.sessions import ToolCall

PLAIN_ID = re.compile(r"[!-~]{1,64}")
"""Ids of a model that are used unchanged."""
NAME_CHARACTERS = 200
EXCERPT_CHARACTERS = 200
"""Maximum length of the model's text that an error message quotes."""


def normalize_calls(calls: Iterable[CompleteToolCall], used_ids: set[str]) -> tuple[ToolCall, ...]:
    """Return the calls with unique ids: the model's id if it is short and was not used before, otherwise a new one.

    Args:
        used_ids: Ids of the earlier calls. The new ids are added.
    """
    normalized = []
    for call in calls:
        own_id = call.id or ""
        call_id = own_id if PLAIN_ID.fullmatch(own_id) and own_id not in used_ids else new_id("call")
        used_ids.add(call_id)
        name = replace_surrogates(call.name)[:NAME_CHARACTERS] or "unnamed"
        normalized.append(ToolCall(call_id=call_id, name=name, arguments=replace_surrogates(call.arguments)))
    return tuple(normalized)


def call_ids(messages: Sequence[object]) -> set[str]:
    """Return the ids of all calls in a history."""
    return {call.call_id for message in messages for call in getattr(message, "tool_calls", ())}


def parse_arguments(text: str) -> dict[str, Any] | str:
    """Parse the arguments of a call. An empty text stands for no arguments.

    Returns:
        The arguments, or a description of what is wrong with them.
    """
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_parse_finite, parse_float=_parse_finite)
        if "\\u" in text:
            # An escape can be a lone surrogate, which neither the log nor a tool accepts.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as exc:
        return f"the arguments are not valid JSON ({exc!s:.{EXCERPT_CHARACTERS}}): {text[:EXCERPT_CHARACTERS]}"
    return value if isinstance(value, dict) else f"the arguments are not a JSON object: {text[:EXCERPT_CHARACTERS]}"


def _parse_finite(text: str) -> float:
    # JSON has no infinity: the log would show null, so a client would allow a call other than the one that runs.
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:EXCERPT_CHARACTERS]} is not a number in JSON, or is too large")
    return value


def truncate_result(text: str, limit_bytes: int) -> tuple[str, bool]:
    """Cut off a result that is too long and append a note about it.

    Returns:
        The text, and whether it was cut off.
    """
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit_bytes:
        return encoded.decode(), False
    kept = encoded[:limit_bytes].decode(errors="ignore")
    note = f"[cut off after {limit_bytes} of {len(encoded)} bytes; request less, or a part]"
    return f"{kept}\n{note}", True

"""Calls as the model made them, and results as it is told them, within what ids and messages may be. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lmx_lab.client.chat_chunks import CompleteToolCall
from lmx_lab.daemon.turns.turn import Call
from lmx_lab.wire.identifiers import new_id

PLAIN_ID = re.compile(r"[!-~]{1,64}")
NAME_CHARACTERS = 200


def named_apart(calls: Iterable[CompleteToolCall], taken: set[str]) -> tuple[Call, ...]:
    """The calls, each under an id of its own, which is taken then: the model's where it is there, short and new."""
    named = []
    for call in calls:
        given = call.id or ""
        call_id = given if PLAIN_ID.fullmatch(given) and given not in taken else new_id("call")
        taken.add(call_id)
        name = whole_characters(call.name)[:NAME_CHARACTERS] or "unnamed"
        named.append(Call(call_id=call_id, name=name, arguments=whole_characters(call.arguments)))
    return tuple(named)


def cut(text: str, limit_bytes: int) -> tuple[str, bool]:
    """The beginning of a text that is too long, with a word about it; and whether it was."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit_bytes:
        return encoded.decode(), False
    kept = encoded[:limit_bytes].decode(errors="ignore")
    return f"{kept}\n[cut here: {limit_bytes} of {len(encoded)} bytes are shown; ask for less, or for a part]", True


def whole_characters(text: str) -> str:
    """Without half characters, which no UTF-8 has."""
    return text.encode("utf-8", "replace").decode()


def ids_in(messages: Sequence[object]) -> set[str]:
    """Of all calls of a history."""
    return {call.call_id for message in messages for call in getattr(message, "tool_calls", ())}

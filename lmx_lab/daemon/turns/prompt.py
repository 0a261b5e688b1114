"""Build the chat request of a model call, and normalize tool calls and their results. Does no I/O.

The request is built from a session's history and a turn's overrides. The history keeps the user's message and the
partial answer of a turn that was cancelled or has failed. Calls and their results stay together: a call without a
result, which no chat template accepts, receives a placeholder.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from lmx_lab.errors import InvalidRequestError, first_names
from lmx_lab.sanitize import replace_surrogates
from lmx_lab.values.outputs import ToolCallDelta
from lmx_lab.wire.base import new_id
from lmx_lab.wire.mcp import ToolRecord
from lmx_lab.wire.sessions import SessionMessage, ToolCall, TurnOverrides

TOOL_CHOICES = ("auto", "none", "required")
"""Values of ``tool_choice`` that are not the name of a tool."""
SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed", "max_tokens")
"""Overrides that are sent to the server unchanged."""
LISTED_TOOLS = 30
"""Maximum number of tools that an error message lists."""


def chat_request(
    *,
    system_prompt: str | None,
    history: Sequence[SessionMessage],
    tools: Sequence[ToolRecord],
    overrides: TurnOverrides,
    is_first_step: bool,
    absence: str | None = None,
) -> dict[str, Any]:
    """Return the body of a chat request, without the model.

    Args:
        is_first_step: Whether ``tool_choice`` applies. Later steps use ``auto``.
        absence: Why the tool that ``tool_choice`` names is not available, if it is not among ``tools``.

    Raises:
        InvalidRequestError: The tool that ``tool_choice`` names is not among ``tools``.
    """
    sampling = {name: value for name in SAMPLING if (value := getattr(overrides, name)) is not None}
    body = {**(overrides.extra or {}), **sampling, "messages": chat_messages(system_prompt, history)}
    choice, names = overrides.tool_choice if is_first_step else None, [tool.name for tool in tools]
    is_mode = choice in TOOL_CHOICES and (names or choice != "required")
    if choice is not None and not is_mode and choice not in names:
        available, remedy = "this turn has no tools", "omit it"
        if names:
            available = f"the tools of this turn are {first_names(names, LISTED_TOOLS)}"
            remedy = "use one of them, or omit it"
        reason = f"{absence}; {available}" if absence else available
        raise InvalidRequestError(
            f"tool_choice is {choice!r:.80}, but {reason}; {remedy}", param="overrides.tool_choice"
        )
    if tools:
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools
        ]
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        if choice is not None:
            body["tool_choice"] = choice if is_mode else {"type": "function", "function": {"name": choice}}
    return body


def select_tools(tools: Iterable[ToolRecord], names: Sequence[str] | None) -> list[ToolRecord]:
    """Return the tools that a session or a turn may use.

    Args:
        names: Names of tools. ``time__*`` stands for all tools of the server ``time``. None stands for all tools.
    """
    if names is None:
        return list(tools)
    exact, prefixes = set(names), tuple(name[:-1] for name in names if name.endswith("*"))
    # No name begins with a null character, and startswith needs at least one prefix.
    return [tool for tool in tools if tool.name in exact or tool.name.startswith(prefixes or ("\0",))]


def chat_messages(system_prompt: str | None, history: Sequence[SessionMessage]) -> list[dict[str, Any]]:
    """Convert a history to the messages of the chat format.

    After a call of the last turn, a model continues its reasoning, so it gets the reasoning before the call. It was
    also a part of the prompt that is cached. Chat templates drop that of earlier turns.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    position, newest = 0, max((at for at, message in enumerate(history) if message.role == "user"), default=-1)
    while position < len(history):
        message = history[position]
        position += 1
        if message.role == "assistant" and message.tool_calls:
            results: dict[str | None, str] = {}
            while position < len(history) and history[position].role == "tool":
                results[history[position].call_id] = history[position].content
                position += 1
            calls = []
            for call in message.tool_calls:
                # Servers refuse a history with arguments that are not objects. The result of the call has the error.
                is_object = call.arguments.strip() and isinstance(parse_arguments(call.arguments), dict)
                function = {"name": call.name, "arguments": call.arguments if is_object else "{}"}
                calls.append({"id": call.call_id, "type": "function", "function": function})
            messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
            if position > newest and message.reasoning_content:
                messages[-1]["reasoning_content"] = message.reasoning_content
            # The results have the order of the calls, not that in which the calls ended.
            messages += [
                _chat_result(call.call_id, results.get(call.call_id, "there is no result"))
                for call in message.tool_calls
            ]
        elif message.role == "tool":
            messages.append(_chat_result(message.call_id or "", message.content))
        elif message.role == "user" and messages and messages[-1]["role"] == "user":
            # Two user messages in a row, as after a turn without an answer, are merged: some templates refuse them.
            messages[-1]["content"] += f"\n\n{message.content}"
        elif message.role != "assistant" or message.content:
            messages.append({"role": message.role, "content": message.content})
    return messages


def _chat_result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


PLAIN_ID = re.compile(r"[!-~]{1,64}")
"""Ids of a model that are used unchanged."""
EXCERPT_CHARACTERS = 200
"""Maximum length of the model's text that an error message quotes."""


def normalize_calls(calls: Iterable[ToolCallDelta], used_ids: set[str]) -> tuple[ToolCall, ...]:
    """Return the calls with unique ids: the model's id if it is short and was not used before, otherwise a new one.

    Args:
        used_ids: Ids of the earlier calls. The new ids are added.
    """
    normalized = []
    for call in calls:
        own_id = call.id or ""
        call_id = own_id if PLAIN_ID.fullmatch(own_id) and own_id not in used_ids else new_id("call")
        used_ids.add(call_id)
        name = replace_surrogates(call.name or "")[:200] or "unnamed"
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

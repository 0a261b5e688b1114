"""What the model is sent: a session's history and a turn's wishes as a chat request. Pure.

Of a turn that was cancelled or failed the history keeps the user's message and what there was of the answer. Calls and
their results stay together: a call without a result, which no template takes, gets one that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lmx_lab.daemon.tools.tool import DaemonTool
from lmx_lab.daemon.turns.arguments import arguments_in
from lmx_lab.errors import InvalidRequestError
from lmx_lab.wire.sessions import SessionMessage, ToolCall, TurnOverrides

WORDS = ("auto", "none", "required")
STEERING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed", "max_tokens")


def chat_request(
    *,
    system_prompt: str | None,
    history: Sequence[SessionMessage],
    tools: Sequence[DaemonTool],
    overrides: TurnOverrides,
    first: bool,
    absence: str | None = None,
) -> dict[str, Any]:
    """The body of a chat request, but for its model.

    Args:
        absence: What keeps the tool away that is to be called, if it is not among the tools.

    Raises:
        InvalidRequestError: the tool that is to be called is not among the tools.
    """
    steering = {name: value for name in STEERING if (value := getattr(overrides, name)) is not None}
    body = {**(overrides.extra or {}), **steering, "messages": chat_messages(system_prompt, history)}
    choice = _choice(overrides.tool_choice, tools, absence) if first else None
    if tools:
        body["tools"] = [_tool(tool) for tool in tools]
        if choice is not None:
            body["tool_choice"] = choice
    return body


def chosen(tools: Iterable[DaemonTool], names: Sequence[str] | None) -> list[DaemonTool]:
    """The tools that a session or a turn may use; ``time__*`` names all of a server, None all there are."""
    if names is None:
        return list(tools)
    exact, beginnings = set(names), tuple(name[:-1] for name in names if name.endswith("*"))
    return [tool for tool in tools if tool.name in exact or tool.name.startswith(beginnings or ("\0",))]


def _tool(tool: DaemonTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _choice(wanted: str | None, tools: Sequence[DaemonTool], absence: str | None) -> Any:
    names = [tool.name for tool in tools]
    if wanted is None or (wanted in WORDS and (names or wanted != "required")):
        return wanted
    if wanted not in names:
        there, way = "there are no tools", "leave it out"
        if names:
            there, way = f"there are {', '.join(names[:30])}", "choose one of them, or leave it out"
        why = f"{absence}. In this turn {there}" if absence else f"{there} in this turn"
        raise InvalidRequestError(
            f"tool_choice is {wanted!r:.80}, and {why}; {way}",
            param="overrides.tool_choice",
        )
    return {"type": "function", "function": {"name": wanted}}


def chat_messages(system_prompt: str | None, history: Sequence[SessionMessage]) -> list[dict[str, Any]]:
    """The history as the chat format has it."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    position = 0
    while position < len(history):
        message = history[position]
        position += 1
        if message.role == "assistant" and message.tool_calls:
            results = _results(history, position)
            position += len(results)
            messages += _called(message, results)
        elif message.role == "tool":
            messages.append(_result(message.call_id or "", message.content))
        elif message.role != "assistant" or message.content:
            _say(messages, message.role, message.content)
    return messages


def _say(messages: list[dict[str, Any]], role: str, content: str) -> None:
    # After a turn without an answer; templates of some models take no two messages of the user in a row.
    if role == "user" and messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += f"\n\n{content}"
    else:
        messages.append({"role": role, "content": content})


def _results(history: Sequence[SessionMessage], position: int) -> list[SessionMessage]:
    end = next((at for at in range(position, len(history)) if history[at].role != "tool"), len(history))
    return list(history[position:end])


def _called(message: SessionMessage, results: list[SessionMessage]) -> list[dict[str, Any]]:
    """Calls, and their results in the order of the calls, whichever ended first."""
    by_id = {result.call_id: result.content for result in results}
    told = [_result(call.call_id, by_id.get(call.call_id, "there is no result")) for call in message.tool_calls]
    calls = [_call(call) for call in message.tool_calls]
    return [{"role": "assistant", "content": message.content, "tool_calls": calls}, *told]


def _call(call: ToolCall) -> dict[str, Any]:
    # Servers refuse a history with arguments that are no object; the result says what was wrong with them.
    arguments = call.arguments if isinstance(arguments_in(call.arguments), dict) and call.arguments.strip() else "{}"
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}

"""Describe tools to models whose chat templates have no known way to do so.

The generic format is that of the Hermes models (and of Qwen, whose templates write it themselves), which small models
have often seen in training. The system message lists the tools as JSON. The answer contains calls between
``<tool_call>`` and ``</tool_call>``. A user message contains the results, between ``<tool_response>`` and
``</tool_response>``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic_core import from_json

from lmx_lab.engine.requests import ToolUse

START, END = "<tool_call>", "</tool_call>"
INSTRUCTIONS = """# Tools

You can call functions. Each line between <tools> and </tools> describes one as JSON:
<tools>
{tools}
</tools>

To call a function, write its name and an object of its arguments as JSON, in this form:
<tool_call>
{{"name": ..., "arguments": {{...}}}}
</tool_call>
The results come in the next message, between <tool_response> and </tool_response>."""


def template_tools(tools: ToolUse) -> list[dict[str, Any]]:
    """Return the tools in the form of the chat-completions format, which chat templates expect."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                **({} if tool.description is None else {"description": tool.description}),
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools.tools
    ]


def write_tools_as_text(
    messages: Iterable[Mapping[str, Any]], tools: ToolUse | None, *, system: bool = True
) -> list[dict[str, Any]]:
    """Return the conversation with tools, calls and results written as text.

    Args:
        system: Whether the template supports a system message. If not, the first user message describes the tools.
    """
    written: list[dict[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            written.append(_results_message(results))
            results = []
        rest = dict(message)
        if calls := rest.pop("tool_calls", None):
            texts = [rest["content"]] if rest["content"] else []
            for call in calls:
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
                if isinstance(arguments, str):
                    # The call was cut off. It is shown as the model wrote it.
                    text = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}'
                texts.append(f"{START}\n{text}\n{END}")
            rest["content"] = "\n".join(texts)
        written.append(rest)
    if results:
        written.append(_results_message(results))
    if tools is None:
        return written
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in template_tools(tools))
    instructions = INSTRUCTIONS.format(tools=described)
    first = written[0] if written else {"role": "", "content": ""}
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{instructions}".lstrip("\n")}, *written[1:]]
    if not system and first["role"] == "user":
        return [{**first, "content": f"{instructions}\n\n{first['content']}"}, *written[1:]]
    return [{"role": "system", "content": instructions}, *written]


def unmatched_results(messages: Iterable[Mapping[str, Any]]) -> Iterator[int]:
    """Yield the indices of tool results that have no call, as in a shortened conversation, or whose call already has
    a result.
    """
    waiting = Counter[str | None]()
    for at, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            waiting[call["id"]] += 1
        if message["role"] == "tool":
            id_ = message.get("tool_call_id")
            if waiting[id_]:
                waiting[id_] -= 1
            else:
                yield at


def write_unmatched_results(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the conversation with each unmatched result as a message of the user that names the tool."""
    written = list(messages)
    for at in unmatched_results(messages):
        tool = f"the tool {written[at]['name']}" if written[at].get("name") else "a tool"
        written[at] = {"role": "user", "content": f"Result of {tool}:\n{written[at]['content']}"}
    return written


def alternate(messages: Iterable[Mapping[str, Any]], *, system: bool) -> list[dict[str, Any]]:
    """Return a conversation in the form that the strictest chat templates accept.

    Messages of the user and the assistant alternate, and the first one is from the user. For this, consecutive messages
    of a role are joined, and empty messages are added. A conversation that is not empty has a message of the user. A
    system message is the first one or a part of the user's message after it. Arguments of calls are objects.

    Args:
        system: Whether the template supports a system message.
    """
    written: list[dict[str, Any]] = []
    for message in messages:
        role, calls = message["role"], message.get("tool_calls") or ()
        before = written[-1]["role"] if written else ""
        if role == "system" and not (system and before in ("", "system")):
            role = "user"
        objects = []
        for call in calls:
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                # If the call was cut off, the part that is valid JSON is kept.
                with suppress(ValueError):
                    arguments = from_json(arguments, allow_partial="trailing-strings")
                arguments = arguments if isinstance(arguments, dict) else {"arguments": arguments}
            objects.append({**call, "function": {**call["function"], "arguments": arguments}})
        added = {**message, "role": role, **({"tool_calls": objects} if objects else {})}
        if role == before != "tool":
            last = written[-1]
            last |= {name: value for name, value in added.items() if name not in last}
            last["content"] = "\n\n".join([text for text in (last["content"], message["content"]) if text])
            continue
        if role == "user" and before == "tool":
            written.append({"role": "assistant", "content": ""})
        if role == "assistant" and before in ("", "system"):
            written.append({"role": "user", "content": ""})
        written.append(added)
    if written and not any(message["role"] == "user" for message in written):
        written.append({"role": "user", "content": ""})
    return written


def _results_message(results: list[str]) -> dict[str, Any]:
    return {"role": "user", "content": "\n".join(results)}

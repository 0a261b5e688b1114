"""The generic way to tell a model of tools, for models whose templates have none that is known.

It is that of the Hermes models (and of Qwen's, whose templates write it themselves), which small models, too, have
often seen: the tools as JSON in the system message, a call between ``<tool_call>`` and ``</tool_call>`` in the answer,
its result between ``<tool_response>`` and ``</tool_response>`` in the name of the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

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
    """The tools as the chat format has them, which is what chat templates know."""
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


def written_out(
    messages: Iterable[Mapping[str, Any]], tools: ToolUse | None, *, system: bool = True
) -> list[dict[str, Any]]:
    """The same conversation with tools, calls and results as text.

    Args:
        system: The template has a place for the system's message; else the first of the user tells of the tools.
    """
    written: list[dict[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            written.append(_user(results))
            results = []
        written.append(_called(message))
    if results:
        written.append(_user(results))
    return _instructed(written, tools, system) if tools is not None else written


def _user(results: list[str]) -> dict[str, Any]:
    return {"role": "user", "content": "\n".join(results)}


def _called(message: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = [f"{START}\n{_call(call['function'])}\n{END}" for call in message.get("tool_calls") or ()]
    return {**rest, "content": "\n".join(filter(None, [rest["content"], *calls]))} if calls else rest


def _call(function: Mapping[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)


def _instructed(messages: list[dict[str, Any]], tools: ToolUse, system: bool) -> list[dict[str, Any]]:
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in template_tools(tools))
    instructions = INSTRUCTIONS.format(tools=described)
    first = messages[0] if messages else {"role": "", "content": ""}
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{instructions}".lstrip("\n")}, *messages[1:]]
    if not system and first["role"] == "user":
        return [{**first, "content": f"{instructions}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]

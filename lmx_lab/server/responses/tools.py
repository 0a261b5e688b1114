"""Convert the tools of the Responses format to functions of the chat format, and their names back.

The chat format has neither custom tools nor namespaces. A custom tool becomes a function with one argument, ``input``.
The name of a tool in a namespace becomes a part of the function's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from lmx_lab.errors import InvalidRequestError
from lmx_lab.server.chat_history import function_tool
from lmx_lab.wire.formats import NAME_CHARACTERS
from lmx_lab.wire.responses import (
    CustomTool,
    FlatFunction,
    HostedTool,
    InputGrammar,
    ResponseTool,
    ToolNamespace,
    ToolReference,
)
from lmx_lab.wire.tools import FunctionTool

INPUT = "input"
"""Name of the argument of a custom tool."""
SEPARATOR = "__"
HASH_CHARACTERS = 8


@dataclass(frozen=True, kw_only=True)
class CallableTool:
    """A tool of the request that the model can call."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None
    definition: FlatFunction | CustomTool

    @property
    def chat_name(self) -> str:
        """Name of the function in the chat format."""
        return chat_name(self.name, self.namespace)

    @property
    def grammar(self) -> InputGrammar | None:
        """The grammar of a custom tool's input, if it has one."""
        given = self.definition.format if isinstance(self.definition, CustomTool) else None
        return given if isinstance(given, InputGrammar) else None

    def function(self) -> FunctionTool:
        """Return the function of the chat format."""
        if isinstance(self.definition, FlatFunction):
            return function_tool(self.chat_name, self.definition.description, self.definition.parameters)
        return function_tool(self.chat_name, self._custom_description(), self._custom_parameters())

    def _custom_description(self) -> str | None:
        grammar = self.grammar
        if grammar is None:
            return self.definition.description
        form = "regular expression" if grammar.syntax == "regex" else "grammar (Lark)"
        text = f"The argument {INPUT!r} must match this {form}:\n{grammar.definition}"
        return f"{self.definition.description}\n\n{text}" if self.definition.description else text

    def _custom_parameters(self) -> dict[str, Any]:
        grammar, text = self.grammar, {"type": "string"}
        if grammar is not None and grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def chat_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool in the chat format. A name that would be too long is shortened, and stays unique."""
    joined = name if not namespace else f"{namespace.removesuffix(SEPARATOR)}{SEPARATOR}{name}"
    if len(joined) <= NAME_CHARACTERS:
        return joined
    digest = hashlib.sha256(joined.encode()).hexdigest()[:HASH_CHARACTERS]
    return f"{joined[: NAME_CHARACTERS - HASH_CHARACTERS - 1]}_{digest}"


class CallableTools:
    """The tools of a request that the model can call."""

    def __init__(self, tools: Sequence[ResponseTool]) -> None:
        self.tools = list(_offered(tools))
        self._by_chat_name = {tool.chat_name: tool for tool in self.tools}

    def called(self, name: str) -> CallableTool | None:
        """Return the tool that is called by this name in the chat format; None if there is none."""
        return self._by_chat_name.get(name)

    def find(self, reference: ToolReference) -> CallableTool:
        """Return the tool that a tool choice names.

        Raises:
            InvalidRequestError: the request has no such tool.
        """
        for tool in self.tools:
            if tool.kind == reference.type and (tool.name, tool.namespace) == (reference.name, reference.namespace):
                return tool
        what = f"{reference.type[:80]} {reference.name or ''}"[:160].rstrip()
        raise InvalidRequestError(
            f"tool_choice: names {what!r}, which is not a function or custom tool in tools; name one of them, or send "
            "'auto'",
            param="tool_choice",
        )

    def only(self, references: Sequence[ToolReference]) -> CallableTools:
        """Return the tools that are named; tools of other types, which are ignored, are skipped."""
        named = {self.find(each).chat_name for each in references if each.type in ("function", "custom")}
        remaining = CallableTools(())
        remaining.tools = [tool for tool in self.tools if tool.chat_name in named]
        remaining._by_chat_name = {tool.chat_name: tool for tool in remaining.tools}
        return remaining


def _offered(tools: Sequence[ResponseTool], namespace: str | None = None) -> Iterator[CallableTool]:
    for tool in tools:
        match tool:
            case FlatFunction():
                yield CallableTool(kind="function", name=tool.name, namespace=namespace, definition=tool)
            case CustomTool():
                yield CallableTool(kind="custom", name=tool.name, namespace=namespace, definition=tool)
            case ToolNamespace():
                yield from _offered(tool.tools, tool.name)
            case HostedTool():
                continue


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of the function, which are incomplete if the answer was cut
    off.
    """
    try:
        given = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = given.get(INPUT, "") if isinstance(given, dict) else arguments
    return text if isinstance(text, str) else arguments

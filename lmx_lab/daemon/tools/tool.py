"""What a turn can call: tools of MCP servers and Python functions, under one kind of name and one kind of result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmx_lab.wire.mcp import Permission
from lmx_lab.wire.sessions import ToolStatus


@dataclass(frozen=True, kw_only=True)
class DaemonTool:
    """A tool as the model is told of it, and how it may be called."""

    name: str
    """Of letters, digits, ``_`` and ``-``, at most 64; of an MCP server ``server__tool``."""
    description: str
    parameters: dict[str, Any] = field(repr=False)
    """JSON schema of the object of its arguments."""
    read_only: bool = False
    """By its own word."""
    permission: Permission = "ask"

    @property
    def asks(self) -> bool:
        """Whether a call needs somebody's yes."""
        return self.permission == "ask" and not self.read_only


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    status: ToolStatus
    """``ok``, ``error`` or ``timeout``; the others are for whoever calls to give."""
    text: str
    """For the model: the result, or what went wrong and what can be done."""


class Toolbox(Protocol):
    """All tools there are at this moment. On the daemon's loop."""

    def tools(self) -> list[DaemonTool]:
        """By name. A tool with the permission ``deny`` is not among them."""
        ...

    @property
    def starting(self) -> bool:
        """Whether tools are about to come: an MCP server is on its first way up."""
        ...

    async def settled(self) -> None:
        """Return when none are about to come."""
        ...

    async def absence(self, name: str) -> str | None:
        """What keeps a tool of this name away, such as an MCP server that has failed; None if nothing is known."""
        ...

    async def call(self, name: str, arguments: dict[str, Any], *, note: Callable[[str], None]) -> ToolResult:
        """Call a tool once, within its time limit. Never raises but when cancelled, which ends the call within 2 s.

        Args:
            note: Is told what the tool says before its end.
        """
        ...

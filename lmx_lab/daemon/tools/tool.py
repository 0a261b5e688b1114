"""The interface between turns and tools: a tool, its result, a toolbox, and the names of MCP tools."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmx_lab.wire.mcp import Permission
from lmx_lab.wire.sessions import ToolStatus

NAME_CHARACTERS = 64
"""Maximum length of a tool's name that all model servers accept."""
SEPARATOR = "__"
"""Separates the server from the tool in ``server__tool``. Neither the name of a server nor that of a Python function
contains it, so the first one in a name is the separator."""
_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, kw_only=True)
class DaemonTool:
    """A tool: its description for the model, and whether a call needs a permission."""

    name: str
    """Up to 64 letters, digits, ``_`` and ``-``. The name of an MCP tool is ``server__tool``."""
    description: str
    parameters: dict[str, Any] = field(repr=False)
    """JSON schema of the arguments, which are one object."""
    read_only: bool = False
    """Whether the tool declares that it changes nothing."""
    permission: Permission = "ask"

    @property
    def needs_permission(self) -> bool:
        """Whether a client has to allow each call."""
        return self.permission == "ask" and not self.read_only


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The result of one call."""

    status: ToolStatus
    """``ok``, ``error`` or ``timeout``. Only the runner of the turn uses the other values."""
    text: str
    """For the model: the result, or what failed and what the model can do about it."""


class Toolbox(Protocol):
    """All tools that are available at the moment. Used on the daemon's event loop."""

    def list_tools(self) -> list[DaemonTool]:
        """Return the tools, sorted by name, except those with the permission ``deny``."""
        ...

    @property
    def is_starting(self) -> bool:
        """Whether an MCP server is being started for the first time, so that more tools are expected."""
        ...

    async def wait_started(self) -> None:
        """Wait until no MCP server is being started for the first time."""
        ...

    async def explain_absence(self, name: str) -> str | None:
        """Return why a tool is not available, for instance because its MCP server has failed; None if unknown."""
        ...

    async def call(self, name: str, arguments: dict[str, Any], *, on_progress: Callable[[str], None]) -> ToolResult:
        """Call a tool once, within its time limit.

        Errors become results; only ``CancelledError`` is raised. A cancelled call ends within 2 s.

        Args:
            on_progress: Called with each message that the tool reports before its end.
        """
        ...


def mcp_tool_names(server: str, own_names: Iterable[str]) -> dict[str, str]:
    """Map the names under which models call a server's tools to the server's own names, in order.

    A name that is too long or has other characters is changed, and ends in a hash of the server's own name, so that it
    does not depend on which other tools the server has.
    """
    names: dict[str, str] = {}
    for own_name in own_names:
        names.setdefault(_mcp_tool_name(server, own_name), own_name)
    return names


def _mcp_tool_name(server: str, own_name: str) -> str:
    prefix = f"{server}{SEPARATOR}"
    cleaned = _INVALID_CHARACTER.sub("_", own_name)
    if cleaned == own_name and len(prefix) + len(own_name) <= NAME_CHARACTERS:
        return prefix + own_name
    digest = hashlib.sha256(own_name.encode("utf-8", "replace")).hexdigest()[:6]
    return f"{prefix}{cleaned[: NAME_CHARACTERS - len(prefix) - 7]}_{digest}"

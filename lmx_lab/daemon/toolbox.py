"""Combine the Python functions and the MCP servers of a daemon into one toolbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmx_lab.daemon.mcp.servers import McpServers
from lmx_lab.daemon.tools import SEPARATOR, PythonTools, ToolResult
from lmx_lab.errors import McpServerNotFoundError
from lmx_lab.wire.mcp import ServerState, ToolRecord

STATE_TEXTS: dict[ServerState, str] = {
    "starting": "is still starting{reason}",
    "restarting": "has stopped{reason} and is being restarted",
    "failed": "has failed{reason}; fix the cause, then restart the server",
    "stopping": "is being stopped{reason}",
    "disabled": "is disabled; enable it first",
}


class Toolbox:
    """All tools that are available at the moment. Used on the daemon's event loop.

    No name can be of both kinds, because only the names of MCP tools contain ``__``.
    """

    def __init__(self, python: PythonTools, servers: McpServers) -> None:
        self._python = python
        self._servers = servers

    def list_tools(self) -> list[ToolRecord]:
        """Return the tools, sorted by name, except those with the permission ``deny``."""
        functions = [tool for tool in self._python.list_tools() if tool.permission != "deny"]
        return sorted([*functions, *self._servers.offered_tools()], key=lambda tool: tool.name)

    @property
    def is_starting(self) -> bool:
        """Whether an MCP server is being started for the first time, so that more tools are expected."""
        return self._servers.is_starting

    async def wait_started(self) -> None:
        """Wait until no MCP server is being started for the first time."""
        await self._servers.wait_started()

    async def explain_absence(self, name: str) -> str | None:
        """Return why a tool is not available, for instance because its MCP server has failed; None if unknown."""
        server_name, separator, _ = name.partition(SEPARATOR)
        try:
            server = await self._servers.read(server_name if separator else "")
        except McpServerNotFoundError:
            return None
        if server.permission == "deny" and server.state == "ready":
            return f"the tools of the MCP server {server.name!r} are denied; change its permission first"
        if server.state == "ready":
            return None
        reason = f" ({server.error})" if server.error else ""
        return f"the MCP server {server.name!r} {STATE_TEXTS[server.state].format(reason=reason)}"

    async def call(self, name: str, arguments: dict[str, Any], *, on_progress: Callable[[str], None]) -> ToolResult:
        """Call a tool once, within its time limit.

        Errors become results; only ``CancelledError`` is raised. A cancelled call ends within 2 s.

        Args:
            on_progress: Called with each message that the tool reports before its end.
        """
        result = await self._python.call(name, arguments)
        if result is None:
            result = await self._servers.call(name, arguments, on_progress)
        if result is None:
            absence = await self.explain_absence(name)
            reason = f": {absence}" if absence else ""
            result = ToolResult(status="error", text=f"The tool {name!r:.100} no longer exists{reason}.")
        return result

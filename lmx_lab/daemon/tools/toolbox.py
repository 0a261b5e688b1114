"""Combine the Python functions and the MCP servers of a daemon into one toolbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmx_lab.daemon.mcp.servers import McpServers
from lmx_lab.daemon.tools.python_tools import PythonTools
from lmx_lab.daemon.tools.tool import SEPARATOR, DaemonTool, Toolbox, ToolResult
from lmx_lab.errors import McpServerNotFoundError
from lmx_lab.wire.mcp import ServerState

STATE_TEXTS: dict[ServerState, str] = {
    "starting": "is still starting{reason}",
    "restarting": "has stopped{reason} and is being restarted",
    "failed": "has failed{reason}; fix the cause, then restart the server",
    "stopping": "is being stopped{reason}",
    "disabled": "is disabled; enable it first",
}


class CombinedToolbox(Toolbox):
    """The tools of both kinds. No name can be of both, because only the names of MCP tools contain ``__``."""

    def __init__(self, python: PythonTools, servers: McpServers) -> None:
        self._python = python
        self._servers = servers

    def list_tools(self) -> list[DaemonTool]:
        functions = [tool for tool in self._python.list_tools() if tool.permission != "deny"]
        return sorted([*functions, *self._servers.offered_tools()], key=lambda tool: tool.name)

    @property
    def is_starting(self) -> bool:
        return self._servers.is_starting

    async def wait_started(self) -> None:
        await self._servers.wait_started()

    async def explain_absence(self, name: str) -> str | None:
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
        result = await self._python.call(name, arguments)
        if result is None:
            result = await self._servers.call(name, arguments, on_progress)
        if result is None:
            absence = await self.explain_absence(name)
            reason = f": {absence}" if absence else ""
            result = ToolResult(status="error", text=f"The tool {name!r:.100} no longer exists{reason}.")
        return result

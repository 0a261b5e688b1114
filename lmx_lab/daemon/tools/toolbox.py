"""The tools of a daemon: those of its MCP servers and its Python functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmx_lab.daemon.limits import Limits
from lmx_lab.daemon.mcp.servers import McpServers
from lmx_lab.daemon.tools.python_tools import PythonTools
from lmx_lab.daemon.tools.tool import DaemonTool, Toolbox, ToolResult
from lmx_lab.errors import McpServerNotFoundError
from lmx_lab.wire.mcp import ServerState

BEING: dict[ServerState, str] = {
    "starting": "is only starting{why}",
    "restarting": "does not run{why}, and is being started again",
    "failed": "has failed{why}; mend that, and restart it",
    "stopping": "is being ended{why}",
    "disabled": "is disabled; enable it first",
}


class CombinedToolbox(Toolbox):
    """Both under one kind of name; no name can be of both."""

    def __init__(self, python: PythonTools, servers: McpServers, limits: Limits) -> None:
        self._python = python
        self._servers = servers
        self._limits = limits

    def tools(self) -> list[DaemonTool]:
        found = [tool for tool in self._python.tools() if tool.permission != "deny"] + self._servers.offered()
        return sorted(found, key=lambda tool: tool.name)

    @property
    def starting(self) -> bool:
        return self._servers.starting

    async def settled(self) -> None:
        await self._servers.settled()

    async def absence(self, name: str) -> str | None:
        named, separator, _ = name.partition("__")
        try:
            server = await self._servers.read(named if separator else "")
        except McpServerNotFoundError:
            return None
        if server.permission == "deny" and server.state == "ready":
            return f"the tools of the MCP server {server.name!r} are denied; change its permission first"
        if server.state == "ready":
            return None
        why = f" ({server.error})" if server.error else ""
        return f"the MCP server {server.name!r} {BEING[server.state].format(why=why)}"

    async def call(self, name: str, arguments: dict[str, Any], *, note: Callable[[str], None]) -> ToolResult:
        result = await self._python.call(name, arguments)
        if result is None:
            result = await self._servers.call(name, arguments, note)
        if result is None:
            absence = await self.absence(name)
            why = f": {absence}" if absence else ""
            result = ToolResult(status="error", text=f"There is no tool {name!r:.100} any more{why}.")
        return result

"""Routes of MCP servers."""

from __future__ import annotations

from fastapi import APIRouter

from lmx_lab.daemon.routes.queries import StrictQueryRoute
from lmx_lab.daemon.routes.responses import SERVER_LINKS, read_failures, write_failures
from lmx_lab.daemon.services import Services
from lmx_lab.errors import McpServerExistsError, McpServerNotFoundError, QueueFullError
from lmx_lab.wire.mcp import (
    ChangeMcpServer,
    McpServerConfig,
    McpServerList,
    McpServerRecord,
    McpTestFailed,
    McpTestPassed,
    ToolList,
)


def mcp_routes(services: Services) -> APIRouter:
    """Return the routes of MCP servers."""
    router = APIRouter(prefix="/v3/mcp", tags=["mcp"], route_class=StrictQueryRoute)
    servers = services.servers

    @router.get("/servers", responses=read_failures())
    async def listed() -> McpServerList:
        """All servers and their states. The values of `env` and `headers` are redacted."""
        return await servers.list_servers()

    @router.post(
        "/servers", status_code=201, responses={201: {"links": SERVER_LINKS}, **write_failures(McpServerExistsError)}
    )
    async def add(body: McpServerConfig) -> McpServerRecord:
        """Add a server and start it. Events `mcp.status` report the progress."""
        return await servers.add(body)

    @router.get("/servers/{name}", responses=read_failures(McpServerNotFoundError, in_path=True))
    async def read(name: str) -> McpServerRecord:
        """One server, with the last lines of its stderr."""
        return await servers.read(name)

    @router.patch("/servers/{name}", responses=write_failures(McpServerNotFoundError, in_path=True))
    async def change(name: str, body: ChangeMcpServer) -> McpServerRecord:
        """Set the fields that the body contains and restart the server. The value `***` keeps a secret."""
        return await servers.change(name, body)

    @router.delete("/servers/{name}", status_code=204, responses=write_failures(in_path=True))
    async def remove(name: str) -> None:
        """Stop a server and remove it; 204 even if it does not exist."""
        await servers.remove(name)

    @router.post("/servers/{name}/test", responses=write_failures(McpServerNotFoundError, QueueFullError, in_path=True))
    async def test_named(name: str) -> McpTestPassed | McpTestFailed:
        """Start a second process of a server, list its tools and stop it. The running server is not affected."""
        return await servers.test_named(name)

    @router.post("/test", responses=write_failures(QueueFullError))
    async def test(body: McpServerConfig) -> McpTestPassed | McpTestFailed:
        """Test a configuration that is not stored."""
        return await servers.test(body)

    @router.post("/servers/{name}/restart", responses=write_failures(McpServerNotFoundError, in_path=True))
    async def restart(name: str) -> McpServerRecord:
        """Stop a server and start it again, even if it has failed."""
        return await servers.restart(name)

    @router.get("/servers/{name}/tools", responses=read_failures(McpServerNotFoundError, in_path=True))
    async def tools(name: str) -> ToolList:
        """The tools of a server, under the names that models use."""
        return await servers.list_tools(name)

    return router

"""MCP servers: configured, tested, restarted, removed."""

from __future__ import annotations

from fastapi import APIRouter

from lmx_lab.daemon.routes.queries import StrictQueryRoute
from lmx_lab.daemon.routes.responses import SERVER, reading, writing
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
    router = APIRouter(prefix="/v3/mcp", tags=["mcp"], route_class=StrictQueryRoute)
    servers = services.servers

    @router.get("/servers", responses=reading())
    async def listed() -> McpServerList:
        """All servers, and how they are. Values of `env` and `headers` are never shown again."""
        return await servers.listed()

    @router.post("/servers", status_code=201, responses={201: {"links": SERVER}, **writing(McpServerExistsError)})
    async def add(body: McpServerConfig) -> McpServerRecord:
        """Configure a server and start it; `mcp.status` events tell how that goes."""
        return await servers.add(body)

    @router.get("/servers/{name}", responses=reading(McpServerNotFoundError, in_path=True))
    async def read(name: str) -> McpServerRecord:
        """One server, with the last lines of its stderr."""
        return await servers.read(name)

    @router.patch("/servers/{name}", responses=writing(McpServerNotFoundError, in_path=True))
    async def change(name: str, body: ChangeMcpServer) -> McpServerRecord:
        """Set what the body names, and start it anew with that. A value `***` leaves a secret as it is."""
        return await servers.change(name, body)

    @router.delete("/servers/{name}", status_code=204, responses=writing(in_path=True))
    async def remove(name: str) -> None:
        """Stop it and forget it. One that is not there is removed already: 204."""
        await servers.remove(name)

    @router.post("/servers/{name}/test", responses=writing(McpServerNotFoundError, QueueFullError, in_path=True))
    async def test_named(name: str) -> McpTestPassed | McpTestFailed:
        """Start it a second time, list its tools, stop that again; the running one is left alone."""
        return await servers.test_named(name)

    @router.post("/test", responses=writing(QueueFullError))
    async def test(body: McpServerConfig) -> McpTestPassed | McpTestFailed:
        """The same with a configuration, which is not kept."""
        return await servers.test(body)

    @router.post("/servers/{name}/restart", responses=writing(McpServerNotFoundError, in_path=True))
    async def restart(name: str) -> McpServerRecord:
        """Stop it and start it, also after it was given up."""
        return await servers.restart(name)

    @router.get("/servers/{name}/tools", responses=reading(McpServerNotFoundError, in_path=True))
    async def tools(name: str) -> ToolList:
        """Its tools, as the model is told of them."""
        return await servers.tools(name)

    return router

"""An MCP server over HTTP that requires a token. It prints its port: ``python http_mcp.py PORT``, 0 for a free one."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer

TOKEN = "token-0123456789"
server = MCPServer("http-test")


@server.tool()
async def greet(name: str, context: Context) -> str:
    """Greets."""
    await context.report_progress(1, 2, "thinking")
    return f"Hello {name}"


@server.tool()
def big() -> str:
    return "x" * 20_000_000


@server.tool()
async def sleep() -> str:
    print("sleeping", flush=True)
    await asyncio.sleep(600)
    return ""


def guarded(app: Any) -> Any:
    async def guard(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and dict(scope["headers"]).get(b"authorization") != f"Bearer {TOKEN}".encode():
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
        if scope["type"] == "http" and scope["path"] == "/elsewhere":
            headers = [(b"location", b"http://127.0.0.2/mcp")]
            await send({"type": "http.response.start", "status": 307, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    return guard


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    print(listener.getsockname()[1], flush=True)
    app = guarded(server.streamable_http_app())
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listener])

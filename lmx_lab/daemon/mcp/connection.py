"""One session with an MCP server: the only file that knows the package ``mcp``.

A session lives in the task that opened it, since the package's cancel scopes are bound to it; calls come from any task.
Import this module in a thread: the package takes a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from httpx2 import HTTPError
from mcp import types
from mcp.client.session import ClientSession, IncomingMessage
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp.types.jsonrpc import CONNECTION_CLOSED, REQUEST_TIMEOUT, jsonrpc_message_adapter
from pydantic import TypeAdapter, ValidationError

from lmx_lab.daemon.mcp.failure import McpFailure
from lmx_lab.daemon.mcp.http import ResponseMonitor, http_client, raise_first, unreachable
from lmx_lab.daemon.mcp.lines import LINE_BYTES, one_line
from lmx_lab.daemon.mcp.process import McpProcess
from lmx_lab.daemon.mcp.redaction import SecretRedactor
from lmx_lab.daemon.mcp.results import described
from lmx_lab.daemon.mcp.stdio import MessageReader, MessageWriter, StopSignal
from lmx_lab.daemon.tools.tool import ToolResult
from lmx_lab.wire.mcp import McpServerConfig

PAGES = 100
TOOLS = 256
"""Of one server; later ones are left out."""
SCHEMA_CHARACTERS = 65_536
DESCRIPTION_CHARACTERS = 8192
NOTE_GAP_S = 0.1
"""Progress that comes faster is left out."""
NOTE_CHARACTERS = 1000
CANCEL_S = 1.5
"""How long a cancelled call may take to tell its server."""
ENDING_S = 0.5
"""How long a server that is lost may take to end, before that is said of it."""
LATE_S = 1.0
"""How long a call may take above its limit before nobody waits for it any more."""

# Its warnings would reach notebooks on stderr, and they hold what servers have sent.
for _name in ("mcp", "client"):
    logging.getLogger(_name).addHandler(logging.NullHandler())

_Result = TypeAdapter(types.CallToolResult | types.InputRequiredResult)


@dataclass(frozen=True, kw_only=True)
class OfferedTool:
    """A tool by its server's own word."""

    name: str
    description: str
    parameters: dict[str, Any] = field(repr=False)
    read_only: bool


class McpConnection:
    """A session that has been opened, and its calls."""

    def __init__(
        self,
        session: ClientSession,
        config: McpServerConfig,
        patience: StopSignal,
        ended: Callable[[], Awaitable[McpFailure]],
    ) -> None:
        self._session = session
        self._patience = patience
        self._config = config
        self.ended = ended
        """Says why the session has ended."""
        self._hide = SecretRedactor.of(config)
        self._calls: set[asyncio.Task[ToolResult]] = set()
        self._overlong: weakref.WeakSet[asyncio.Task[ToolResult]] = weakref.WeakSet()

    async def greet(self) -> None:
        """Open the session: in the way that every server knows, and if that is refused in the way of 2026.

        Raises:
            TimeoutError, MCPError, ValidationError, RuntimeError: it cannot be opened.
            McpFailure: it is to be stopped.
        """
        with self._patience.waiting(self._config.start_timeout_s):
            try:
                await self._session.initialize()
            except MCPError as exc:
                if exc.code in (REQUEST_TIMEOUT, CONNECTION_CLOSED):
                    raise
                try:
                    await self._session.discover()
                except MCPError:
                    raise exc from None

    async def tools(self) -> list[OfferedTool]:
        """What the server offers now; at most 256 tools.

        Raises:
            McpFailure: it does not say, or not within ``start_timeout_s``.
        """
        try:
            with self._patience.waiting(self._config.start_timeout_s):
                return await self._listed()
        except (TimeoutError, MCPError, ValidationError, RuntimeError) as exc:
            raise await self.failure(exc, "the list of its tools") from exc

    async def _listed(self) -> list[OfferedTool]:
        found: dict[str, OfferedTool] = {}
        cursor: str | None = None
        for _ in range(PAGES):
            params = types.PaginatedRequestParams(cursor=cursor) if cursor is not None else None
            page = await self._session.list_tools(params=params)
            for tool in filter(None, map(_offered, page.tools)):
                if len(found) < TOOLS:
                    found.setdefault(tool.name, tool)
            cursor = page.next_cursor
            if cursor is None or len(found) >= TOOLS:
                break
        return list(found.values())

    async def call(self, name: str, arguments: dict[str, Any], note: Callable[[str], None]) -> ToolResult:
        """Call a tool once, whatever happens; ends at the configured limit, and 2 s after a cancel.

        A cancelled call, and one that took too long, is told to the server.
        """
        task = asyncio.create_task(self._called(name, arguments, note))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        limit = self._config.tool_timeout_s
        try:
            await asyncio.wait({task}, timeout=limit + LATE_S)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
            raise
        if not task.done():
            task.cancel()
            return _late(limit)
        if task in self._overlong:
            text = f"The tool's server answered a call with more than {LINE_BYTES:,} bytes, which are not read."
            return ToolResult(status="error", text=text)
        return _lost("the connection was closed") if task.cancelled() else task.result()

    def give_up_calls(self) -> None:
        """End the calls that run: the answer of one of them was too long, and nobody can say which."""
        self._overlong.update(self._calls)
        for task in self._calls:
            task.cancel()

    async def close(self) -> None:
        """After the session's end, which ends its calls: end those that it did not. Idempotent."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=LATE_S)
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=CANCEL_S)

    async def _called(self, name: str, arguments: dict[str, Any], note: Callable[[str], None]) -> ToolResult:
        limit = self._config.tool_timeout_s
        # Not the session's call_tool: it checks results against schemas of the server's, on this loop, for any time.
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=name, arguments=arguments))
        try:
            result = await self._session.send_request(
                request, _Result, request_read_timeout_seconds=limit, progress_callback=_Progress(note, self._hide)
            )
        except Exception as exc:
            return await self._unsuccessful(exc)
        if isinstance(result, types.InputRequiredResult):
            return ToolResult(status="error", text="The tool asks its user for input, which cannot be given here.")
        return described(result.content, result.structured_content, is_error=result.is_error)

    async def _unsuccessful(self, exc: Exception) -> ToolResult:
        if isinstance(exc, ValidationError):
            return ToolResult(status="error", text="The tool's server answered in a form that is not the protocol's.")
        if not isinstance(exc, MCPError):
            return _lost(self._clean(f"{type(exc).__name__}: {exc}"))
        if exc.code == REQUEST_TIMEOUT:
            return _late(self._config.tool_timeout_s)
        if exc.code == CONNECTION_CLOSED:
            return _lost((await self.ended()).message)
        return ToolResult(status="error", text=f"The tool failed: {self._clean(exc.message)}")

    async def failure(self, exc: Exception, what: str) -> McpFailure:
        """Why something could not be had from the server."""
        if isinstance(exc, MCPError) and exc.code == CONNECTION_CLOSED:
            return await self.ended()
        if isinstance(exc, TimeoutError) or (isinstance(exc, MCPError) and exc.code == REQUEST_TIMEOUT):
            return McpFailure("start-timeout", f"no answer with {what} within {self._config.start_timeout_s:g} s")
        if isinstance(exc, MCPError):
            return McpFailure("protocol", f"it refused {what}: {self._clean(exc.message)}")
        return McpFailure("protocol", f"its answer with {what} is not the protocol's: {self._clean(str(exc))}")

    def _clean(self, text: str) -> str:
        return one_line(self._hide.hidden(text), 1000)


class _Progress:
    """Hands a call's progress on, not faster than anybody reads."""

    def __init__(self, note: Callable[[str], None], hide: SecretRedactor) -> None:
        self._note = note
        self._hide = hide
        self._next = 0.0

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + NOTE_GAP_S
        share = f"{progress:g}/{total:g}" if total else f"{progress:g}"
        said = one_line(self._hide.hidden(message), NOTE_CHARACTERS) if message else ""
        self._note(f"{share} {said}".strip())


@contextlib.asynccontextmanager
async def over_stdio(
    config: McpServerConfig,
    process: McpProcess,
    patience: StopSignal,
    *,
    changed: Callable[[], None],
    lost: Callable[[], None],
) -> AsyncIterator[McpConnection]:
    """A session with a process that runs; within it the process is spoken to by nobody else.

    Args:
        changed: Is told that the list of tools has changed.
        lost: Is told, once, that no more will come.

    Raises:
        McpFailure: no session within ``start_timeout_s``.
    """

    async def ended() -> McpFailure:
        if incoming.flooded:
            return McpFailure("protocol", "the server wrote thousands of lines to stdout that are no messages")
        if not patience.at_end:
            # A failed write, and the end of its output, are often seen before the end of the process.
            await asyncio.wait({process.gone}, timeout=ENDING_S)
        if not incoming.at_end and process.returncode is None:
            return McpFailure("exited", "the server was stopped")
        return McpFailure("exited", f"the server {process.said()}")

    incoming = MessageReader(process, _message, lost)
    session = _session(config, changed, incoming, MessageWriter(process, _line))
    connection = McpConnection(session, config, patience, ended)
    incoming.overlong = connection.give_up_calls
    try:
        async with session:
            await _greeted_by(config, connection, incoming)
            yield connection
    except BaseExceptionGroup as group:
        raise_first(group, SecretRedactor.of(config))
    finally:
        await connection.close()


async def _greeted_by(
    config: McpServerConfig, connection: McpConnection, incoming: MessageReader[SessionMessage]
) -> None:
    try:
        await connection.greet()
    except (TimeoutError, MCPError, ValidationError, RuntimeError) as exc:
        if incoming.at_end or (isinstance(exc, MCPError) and exc.code == CONNECTION_CLOSED):
            failure = await connection.ended()
            raise McpFailure(failure.kind, f"{failure.message}, before it had answered initialize") from exc
        failure = await connection.failure(exc, "the session")
        if failure.kind == "start-timeout":
            failure = McpFailure("start-timeout", _unanswered(config, incoming))
        raise failure from exc


@contextlib.asynccontextmanager
async def over_http(
    config: McpServerConfig, patience: StopSignal, *, changed: Callable[[], None], lost: Callable[[], None]
) -> AsyncIterator[McpConnection]:
    """A session with a server at an address; as ``over_stdio``."""
    watch = ResponseMonitor(lost)
    try:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(http_client(config, watch))
            streams = await stack.enter_async_context(
                streamable_http_client(
                    config.url or "", http_client=client, max_sse_event_size=LINE_BYTES, terminate_on_close=False
                )
            )
            session = _session(config, changed, *streams)
            connection = McpConnection(session, config, patience, watch.ended)
            # Before the session is entered, so that it is closed after it.
            stack.push_async_callback(connection.close)
            await stack.enter_async_context(session)
            await _greeted_at(connection, watch)
            yield connection
    except BaseExceptionGroup as group:
        raise_first(group, SecretRedactor.of(config))
    except HTTPError as exc:
        raise unreachable(exc, SecretRedactor.of(config)) from exc


async def _greeted_at(connection: McpConnection, watch: ResponseMonitor) -> None:
    try:
        await connection.greet()
    except (TimeoutError, MCPError, ValidationError, RuntimeError) as exc:
        if watch.refused:
            raise McpFailure("protocol", f"the server answered {watch.refused}; check url and headers") from exc
        raise await connection.failure(exc, "the session") from exc
    watch.greeted = True


def _session(config: McpServerConfig, changed: Callable[[], None], incoming: Any, outgoing: Any) -> ClientSession:
    async def told(message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            changed()

    return ClientSession(
        incoming,
        outgoing,
        read_timeout_seconds=config.start_timeout_s,
        message_handler=told,
        client_info=types.Implementation(name="lmx-lab", version=version("lmx-lab")),
    )


def _offered(tool: types.Tool) -> OfferedTool | None:
    """None where no model could be told of it."""
    schema = tool.input_schema
    if schema.get("type", "object") != "object" or len(repr(schema)) > SCHEMA_CHARACTERS or not tool.name:
        return None
    title = tool.title or (tool.annotations.title if tool.annotations else None) or tool.name
    return OfferedTool(
        name=tool.name,
        description=(tool.description or title)[:DESCRIPTION_CHARACTERS],
        parameters=schema,
        read_only=tool.annotations is not None and tool.annotations.read_only_hint is True,
    )


def _late(limit: float) -> ToolResult:
    return ToolResult(status="timeout", text=f"The tool did not answer within {limit:g} s, and was cancelled.")


def _lost(why: str) -> ToolResult:
    return ToolResult(
        status="error",
        text=f"The tool's server was lost during the call: {why}. Whether the call had an effect is not known.",
    )


def _unanswered(config: McpServerConfig, incoming: MessageReader[SessionMessage]) -> str:
    wrote = ", though it wrote lines that are no messages" if incoming.strays else ""
    return f"no answer to initialize within {config.start_timeout_s:g} s{wrote}; is {config.command!r} an MCP server?"


def _message(line: bytes) -> SessionMessage:
    return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))


def _line(item: SessionMessage) -> tuple[bytes, bool]:
    line = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode()
    # A notification does not wait: a cancel must not be held up by a server that does not read.
    return line, not isinstance(item.message, types.JSONRPCNotification)

"""Sessions with MCP servers over stdio and HTTP. This is the only module that imports the package ``mcp``.

A session must be closed in the task that opened it, because the package's cancel scopes are bound to a task. Calls can
come from any task. Import this module in a thread: importing the package takes a second. The servers are not trusted:
the size of answers over HTTP is limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, Self

import anyio
from httpx2 import (
    AsyncBaseTransport,
    AsyncByteStream,
    AsyncClient,
    AsyncHTTPTransport,
    HTTPError,
    ReadError,
    Request,
    Response,
    Timeout,
)
from mcp import types
from mcp.client.session import ClientSession, IncomingMessage
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp.types.jsonrpc import CONNECTION_CLOSED, REQUEST_TIMEOUT, jsonrpc_message_adapter
from pydantic import TypeAdapter, ValidationError

from lmx_lab.daemon.mcp.config import McpFailure, SecretRedactor, one_line
from lmx_lab.daemon.mcp.process import MESSAGE_BYTES, LineTooLongError, McpProcess
from lmx_lab.daemon.tools import ToolResult, mcp_tool_name
from lmx_lab.sanitize import finite
from lmx_lab.wire.mcp import McpServerConfig, ToolRecord

TOOLS = 256
"""Maximum number of tools of one server. Further tools are ignored."""
CANCEL_S = 1.5
"""Time in which a cancelled call can notify its server."""
GRACE_S = 1.0
"""Time beyond its limit after which a call is abandoned."""

# Without a handler the package's warnings would appear in notebooks on stderr, and they contain what servers sent.
for _name in ("mcp", "client"):
    logging.getLogger(_name).addHandler(logging.NullHandler())

_Result = TypeAdapter(types.CallToolResult | types.InputRequiredResult)
_OPEN_ERRORS = (TimeoutError, MCPError, ValidationError, RuntimeError)
"""Exceptions that the package raises if a server does not answer, or not according to the protocol."""


class McpConnection:
    """An open session with a server, and the calls in it."""

    def __init__(
        self,
        session: ClientSession,
        config: McpServerConfig,
        end_failure: Callable[[], Awaitable[McpFailure]],
        is_denied: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            end_failure: Returns why the session has ended.
            is_denied: Returns whether the server has refused the authorization.
        """
        self._session = session
        self._config = config
        self.end_failure = end_failure
        self._is_denied = is_denied
        self.is_closing = False
        """Whether the session is being closed by its owner."""
        self._redactor = SecretRedactor.of(config)
        self._calls: set[asyncio.Task[ToolResult]] = set()
        self._too_long: weakref.WeakSet[asyncio.Task[ToolResult]] = weakref.WeakSet()
        """Calls that were cancelled because an answer was too long."""

    async def initialize(self) -> None:
        """Open the session with ``initialize``. If the server refuses it or answers with a version of 2026, open the
        session with the request of that protocol.

        Raises:
            TimeoutError, MCPError, ValidationError, RuntimeError: The session could not be opened.
        """
        with anyio.fail_after(self._config.start_timeout_s):
            try:
                await self._session.initialize()
            except (MCPError, RuntimeError) as exc:
                is_lost = isinstance(exc, MCPError) and exc.code in (REQUEST_TIMEOUT, CONNECTION_CLOSED)
                if is_lost or self._is_denied():
                    raise
                try:
                    await self._session.discover()
                except (MCPError, RuntimeError):
                    raise exc from None

    async def list_tools(self) -> dict[str, ToolRecord]:
        """Return the tools that the server offers at the moment, at most 256, by the server's own names for them.

        Tools that models cannot use are omitted: those without a name, and those whose schema is too long or not that
        of an object.

        Raises:
            McpFailure: The server does not answer within ``start_timeout_s``, or refuses.
        """
        found: dict[str, ToolRecord] = {}
        names: set[str] = set()
        try:
            with anyio.fail_after(self._config.start_timeout_s):
                cursor: str | None = None
                for _ in range(100):
                    params = types.PaginatedRequestParams(cursor=cursor) if cursor is not None else None
                    page = await self._session.list_tools(params=params)
                    for tool in page.tools:
                        schema, hints = tool.input_schema, tool.annotations
                        name = mcp_tool_name(self._config.name, tool.name)
                        is_object = schema.get("type", "object") == "object" and len(repr(schema)) <= 65_536
                        if not (is_object and tool.name and len(found) < TOOLS) or name in names:
                            continue
                        names.add(name)
                        text = tool.description or tool.title or (hints.title if hints else None) or tool.name
                        found[tool.name] = ToolRecord(
                            name=name,
                            description=text[:8192],
                            parameters=finite(schema),
                            read_only=hints is not None and hints.read_only_hint is True,
                            permission=self._config.permission,
                        )
                    cursor = page.next_cursor
                    if cursor is None or len(found) >= TOOLS:
                        break
                return found
        except _OPEN_ERRORS as exc:
            raise await self.failure(exc, "the list of its tools") from exc

    async def call(self, name: str, arguments: dict[str, Any], on_progress: Callable[[str], None]) -> ToolResult:
        """Call a tool once; a call is never repeated.

        The call ends at the configured time limit, or within 2 s after it is cancelled. In both cases the server is
        notified.
        """
        task = asyncio.create_task(self._call(name, arguments, on_progress))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        timeout_s = self._config.tool_timeout_s
        try:
            await asyncio.wait({task}, timeout=timeout_s + GRACE_S)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
            raise
        if not task.done():
            task.cancel()
            return _timeout_result(timeout_s)
        if task in self._too_long:
            text = f"The server answered a call with more than {MESSAGE_BYTES:,} bytes, which is not supported."
            return ToolResult(status="error", text=text)
        return _lost_result("the connection was closed") if task.cancelled() else task.result()

    def fail_calls_too_long(self) -> None:
        """End all running calls, since the answer of one of them was too long and it is not known which."""
        self._too_long.update(self._calls)
        for task in self._calls:
            task.cancel()

    async def close(self) -> None:
        """End the calls that the end of the session did not end. Idempotent."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=GRACE_S)
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=CANCEL_S)

    async def _call(  # noqa: PLR0911 (one for each way in which a call ends)
        self, name: str, arguments: dict[str, Any], on_progress: Callable[[str], None]
    ) -> ToolResult:
        next_at = 0.0

        async def report(progress: float, total: float | None, message: str | None) -> None:
            """Report progress, at most every 0.1 s. Reports in between are ignored."""
            nonlocal next_at
            if (now := time.monotonic()) >= next_at:
                next_at = now + 0.1
                share = f"{progress:g}/{total:g}" if total else f"{progress:g}"
                on_progress(f"{share} {self._clean(message or '')}".strip())

        # Not the session's call_tool: it validates results against schemas of the server on this event loop, which can
        # take any time.
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=name, arguments=arguments))
        timeout_s = self._config.tool_timeout_s
        try:
            result = await self._session.send_request(
                request, _Result, request_read_timeout_seconds=timeout_s, progress_callback=report
            )
        except MCPError as exc:
            if exc.code == REQUEST_TIMEOUT:
                return _timeout_result(timeout_s)
            if exc.code == CONNECTION_CLOSED:
                return _lost_result((await self.end_failure()).message)
            return ToolResult(status="error", text=f"The tool failed: {self._clean(exc.message)}")
        except ValidationError:
            return ToolResult(status="error", text="The server's answer does not conform to the protocol.")
        except Exception as exc:
            return _lost_result(self._clean(f"{type(exc).__name__}: {exc}"))
        if isinstance(result, types.InputRequiredResult):
            return ToolResult(status="error", text="The tool requests input from its user, which is not supported.")
        return tool_result(result.content, result.structured_content, is_error=result.is_error)

    async def failure(self, exc: Exception, requested: str) -> McpFailure:
        """Describe why a request to the server failed.

        Args:
            requested: Description of the request, for the message.
        """
        if isinstance(exc, MCPError) and exc.code == CONNECTION_CLOSED:
            return await self.end_failure()
        if isinstance(exc, TimeoutError) or (isinstance(exc, MCPError) and exc.code == REQUEST_TIMEOUT):
            timeout_s = self._config.start_timeout_s
            return McpFailure("start-timeout", f"the server did not answer with {requested} within {timeout_s:g} s")
        if isinstance(exc, MCPError):
            return McpFailure("protocol", f"the server refused {requested}: {self._clean(exc.message)}")
        return McpFailure(
            "protocol", f"the answer with {requested} does not conform to the protocol: {self._clean(str(exc))}"
        )

    def _clean(self, text: str) -> str:
        return one_line(self._redactor.redact(text), 1000)


class MessageStream:
    """The messages of a process, as the streams that a session reads and writes. The number of other lines is limited.

    Closing it does nothing: the process is stopped by its owner.
    """

    def __init__(self, process: McpProcess, on_end: Callable[[], None]) -> None:
        """
        Args:
            on_end: Called once, when there are no more messages.
        """
        self._process = process
        self._on_end = on_end
        self.invalid_lines = 0
        """Number of lines that were not messages."""
        self.is_flooded = False
        """Whether reading has ended because there were too many lines that are not messages."""
        self._window = (0.0, 0)
        """Start of the current interval, and the number of invalid lines at that time."""
        self.at_end = False
        self.on_long_line: Callable[[], None] = lambda: None
        """Called for each line that exceeds the limit. The line was discarded."""

    async def aclose(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage:
        while not self.is_flooded:
            try:
                line = await self._process.read_line()
            except LineTooLongError:
                self.on_long_line()
                continue
            if line is None:
                break
            if not line.strip():
                continue
            try:
                return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError:
                self._process.keep_invalid_line(line)
                self.invalid_lines += 1
            now, (started, count) = time.monotonic(), self._window
            if now - started > 10.0:
                started, count = now, self.invalid_lines
            self._window = (started, count)
            # More than 10,000 within 10 s would block the loop.
            self.is_flooded = self.invalid_lines - count > 10_000
        if not self.at_end:
            self.at_end = True
            self._on_end()
        raise StopAsyncIteration

    async def receive(self) -> SessionMessage:
        """Return the next message.

        Raises:
            anyio.EndOfStream: There are no more messages.
        """
        try:
            return await anext(self)
        except StopAsyncIteration:
            raise anyio.EndOfStream from None

    async def send(self, item: SessionMessage, /) -> None:
        """Send a message.

        Raises:
            anyio.BrokenResourceError: The process no longer reads its input.
        """
        line = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode()
        # Notifications do not wait, so that a server that does not read cannot delay the cancelling of a call.
        wait = not isinstance(item.message, types.JSONRPCNotification)
        try:
            await self._process.write_line(line, wait=wait)
        except (ConnectionError, OSError) as exc:
            raise anyio.BrokenResourceError from exc


@contextlib.asynccontextmanager
async def connect_stdio(
    config: McpServerConfig,
    process: McpProcess,
    *,
    on_tools_changed: Callable[[], None],
    on_lost: Callable[[], None],
) -> AsyncIterator[McpConnection]:
    """Open a session with a running process, which nothing else may read or write within the block.

    Args:
        on_tools_changed: Called when the server's list of tools has changed.
        on_lost: Called once, when the server will not answer any more.

    Raises:
        McpFailure: The session could not be opened within ``start_timeout_s``.
    """

    async def end_failure() -> McpFailure:
        if stream.is_flooded:
            return McpFailure("protocol", "the server wrote thousands of lines to stdout that are not messages")
        if not connection.is_closing:
            # A failed write, and the end of the output, are often noticed before the process has exited.
            await asyncio.wait({process.closed}, timeout=0.5)
        if not stream.at_end and process.returncode is None:
            return McpFailure("exited", "the server was stopped")
        return McpFailure("exited", f"the server {process.describe_end()}")

    stream = MessageStream(process, on_lost)
    session = _session(config, on_tools_changed, stream, stream)
    connection = McpConnection(session, config, end_failure)
    stream.on_long_line = connection.fail_calls_too_long
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(translate_errors(config))
        # Pushed before the session is entered, so that the connection is closed after it.
        stack.push_async_callback(connection.close)
        await stack.enter_async_context(session)
        try:
            await connection.initialize()
        except _OPEN_ERRORS as exc:
            if stream.at_end or (isinstance(exc, MCPError) and exc.code == CONNECTION_CLOSED):
                failure = await end_failure()
                raise McpFailure(failure.kind, f"{failure.message}, before it answered initialize") from exc
            failure = await connection.failure(exc, "the session")
            if failure.kind == "start-timeout":
                wrote = ", but wrote lines that are not messages" if stream.invalid_lines else ""
                failure = McpFailure(
                    "start-timeout",
                    f"the server did not answer initialize within {config.start_timeout_s:g} s{wrote}; check that "
                    f"{config.command!r} is an MCP server",
                )
            raise failure from exc
        try:
            yield connection
        finally:
            connection.is_closing = True


@contextlib.asynccontextmanager
async def connect_http(
    config: McpServerConfig, *, on_tools_changed: Callable[[], None], on_lost: Callable[[], None]
) -> AsyncIterator[McpConnection]:
    """Open a session with a server over HTTP. Arguments and exceptions are those of ``connect_stdio``."""
    transport = HttpTransport(on_lost)
    # The requests have their own read timeouts, because a stream of events can be silent for long.
    timeout = Timeout(config.start_timeout_s, read=None)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(translate_errors(config))
        client = await stack.enter_async_context(
            AsyncClient(headers=config.headers, timeout=timeout, transport=transport)
        )
        streams = await stack.enter_async_context(
            streamable_http_client(
                config.url or "", http_client=client, max_sse_event_size=MESSAGE_BYTES, terminate_on_close=False
            )
        )
        session = _session(config, on_tools_changed, *streams)
        connection = McpConnection(session, config, transport.end_failure, lambda: transport.is_denied)
        stack.push_async_callback(connection.close)
        await stack.enter_async_context(session)
        try:
            await connection.initialize()
        except _OPEN_ERRORS as exc:
            if transport.is_denied:
                message = (
                    f"the server answered {transport.refusal}: set a header with a valid token, such as Authorization; "
                    "a login in the browser (OAuth) is not supported"
                )
                raise McpFailure("protocol", message, is_final=True) from exc
            if transport.refusal:
                raise McpFailure("protocol", f"the server answered {transport.refusal}; check url and headers") from exc
            raise await connection.failure(exc, "the session") from exc
        transport.is_initialized = True
        yield connection


def _session(config: McpServerConfig, on_tools_changed: Callable[[], None], reader: Any, writer: Any) -> ClientSession:
    async def handle(message: IncomingMessage) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            on_tools_changed()

    return ClientSession(
        reader,
        writer,
        read_timeout_seconds=config.start_timeout_s,
        message_handler=handle,
        client_info=types.Implementation(name="lmx-lab", version=version("lmx-lab")),
    )


def _timeout_result(timeout_s: float) -> ToolResult:
    return ToolResult(status="timeout", text=f"The tool did not answer within {timeout_s:g} s and was cancelled.")


def _lost_result(reason: str) -> ToolResult:
    return ToolResult(
        status="error",
        text=f"The connection to the server was lost during the call: {reason}. It is unknown whether the call had an "
        "effect.",
    )


class HttpTransport(AsyncBaseTransport):
    """The transport of httpx2 with a limit: an answer of more than 8 MiB fails, unless it is a stream of events.

    It notes the statuses with which a server refuses requests, because the errors of the package ``mcp`` omit them.
    """

    def __init__(self, on_lost: Callable[[], None]) -> None:
        """
        Args:
            on_lost: Called when the server no longer accepts the session.
        """
        self._on_lost = on_lost
        self._inner = AsyncHTTPTransport()
        self.is_initialized = False
        """Whether the session was opened."""
        self.refusal = ""
        """Status and reason of the last refusal, such as ``401 Unauthorized``."""
        self.is_denied = False
        """Whether the server refused the authorization of the last request that it refused."""

    async def handle_async_request(self, request: Request) -> Response:
        # Without compression, because a few compressed bytes can expand to any size.
        request.headers["Accept-Encoding"] = "identity"
        response = await self._inner.handle_async_request(request)
        is_event_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        if not is_event_stream and isinstance(response.stream, AsyncByteStream):
            response.stream = _LimitedStream(response.stream)
        # A GET requests the stream of notifications, which a server need not support.
        if response.status_code >= 400 and request.method == "POST":
            self.refusal = f"{response.status_code} {response.reason_phrase}".strip()
            self.is_denied = response.status_code in (401, 403)
            if self.is_initialized and (self.is_denied or response.status_code == 404):
                # The session, or the authorization for it, has expired: all further calls would be refused.
                self._on_lost()
        return response

    async def end_failure(self) -> McpFailure:
        """Return why the session has ended."""
        reason = f"the server answered {self.refusal}" if self.refusal else "the server could not be reached"
        return McpFailure("unreachable", reason)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _LimitedStream(AsyncByteStream):
    def __init__(self, stream: AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read_bytes = 0
        async for piece in self._stream:
            read_bytes += len(piece)
            if read_bytes > MESSAGE_BYTES:
                raise ReadError(f"an answer of more than {MESSAGE_BYTES:,} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


@contextlib.contextmanager
def translate_errors(config: McpServerConfig) -> Iterator[None]:
    """Translate errors of HTTP, and the groups that task groups of the package ``mcp`` raise, to ``McpFailure``."""
    try:
        yield
    except (BaseExceptionGroup, HTTPError) as exc:
        first: BaseException = exc
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, McpFailure):
            raise first from None
        reason = one_line(SecretRedactor.of(config).redact(str(first)))
        if isinstance(first, HTTPError):
            reason = f"the server cannot be reached: {reason or type(first).__name__}"
            raise McpFailure("unreachable", f"{reason}; check url, and that the server runs") from exc
        raise McpFailure("protocol", f"{type(first).__name__}: {reason}") from exc


def tool_result(
    content: Sequence[Any], structured: Any, *, is_error: bool, limit_characters: int = 2**20
) -> ToolResult:
    """Convert a result to text: the text parts, and descriptions in place of images and other parts.

    Args:
        content: Parts of the result, which have a ``type`` as defined by MCP.
        structured: Structured part of the result. It comes first, as JSON, if there is no text part.
        is_error: Whether the tool reports an error.
        limit_characters: Maximum length of the text. The runner of the turn applies a lower limit.
    """

    def join(texts: Iterable[str]) -> str:
        kept, size = [], 0
        for text in texts:
            kept.append(text[: limit_characters - size])
            size += len(kept[-1]) + 1
            if size >= limit_characters:
                break
        return "\n".join(kept)

    text = join(filter(None, map(_block_text, content)))
    if structured is not None and not any(block.type == "text" and block.text for block in content):
        text = join([json.dumps(finite(structured), ensure_ascii=False), *([text] if text else [])])
    if is_error:
        return ToolResult(status="error", text=text or "The tool failed without a message.")
    return ToolResult(status="ok", text=text or "(no result)")


def _block_text(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"[{block.type} of type {one_line(block.mime_type)}, {_size(block.data)}; it cannot be shown here]"
        case "resource_link":
            return f"[link to the resource {one_line(block.uri)} {one_line(block.title or block.name)}]"
        case "resource":
            resource = block.resource
            if (text := getattr(resource, "text", None)) is not None:
                return f"[resource {one_line(resource.uri)}]\n{text}"
            kind = f" of type {one_line(resource.mime_type)}" if resource.mime_type else ""
            return f"[resource {one_line(resource.uri)}{kind}, {_size(resource.blob)}; it cannot be shown here]"
        case other:
            return f"[content of type {one_line(str(other))}; it cannot be shown here]"


def _size(base64: str) -> str:
    return f"{len(base64) * 3 // 4:,} bytes"

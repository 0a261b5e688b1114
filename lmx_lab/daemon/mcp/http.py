"""HTTP connections to MCP servers: limit the size of answers, note refusals and describe failures.

The servers are not trusted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import NoReturn

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

from lmx_lab.daemon.mcp.failure import McpFailure
from lmx_lab.daemon.mcp.redaction import SecretRedactor, one_line
from lmx_lab.daemon.mcp.stdio import MESSAGE_BYTES
from lmx_lab.wire.mcp import McpServerConfig


def http_client(config: McpServerConfig, monitor: ResponseMonitor) -> AsyncClient:
    """Return a client that sends the headers of the configuration and reads answers of at most 8 MiB."""
    return AsyncClient(
        headers=config.headers,
        # The requests have their own read timeouts, because a stream of events can be silent for long.
        timeout=Timeout(config.start_timeout_s, read=None),
        transport=LimitedTransport(MESSAGE_BYTES),
        event_hooks={"response": [monitor.on_response]},
    )


class LimitedTransport(AsyncBaseTransport):
    """The transport of httpx2 with a limit: an answer that is larger fails, unless it is a stream of events."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._inner = AsyncHTTPTransport()

    async def handle_async_request(self, request: Request) -> Response:
        # Without compression, because a few compressed bytes can expand to any size.
        request.headers["Accept-Encoding"] = "identity"
        response = await self._inner.handle_async_request(request)
        is_event_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        if not is_event_stream and isinstance(response.stream, AsyncByteStream):
            response.stream = _LimitedStream(response.stream, self._limit_bytes)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _LimitedStream(AsyncByteStream):
    def __init__(self, stream: AsyncByteStream, limit_bytes: int) -> None:
        self._stream = stream
        self._limit_bytes = limit_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read_bytes = 0
        async for piece in self._stream:
            read_bytes += len(piece)
            if read_bytes > self._limit_bytes:
                raise ReadError(f"an answer of more than {self._limit_bytes:,} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


class ResponseMonitor:
    """Notes the statuses with which a server refuses requests, because the errors of the package ``mcp`` omit them."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        """
        Args:
            on_lost: Called when the server no longer accepts the session.
        """
        self._on_lost = on_lost
        self.is_initialized = False
        """Whether the session was opened."""
        self.refusal = ""
        """Status and reason of the last refusal, such as ``401 Unauthorized``."""

    async def on_response(self, response: Response) -> None:
        """Handle a response; a hook of the client."""
        # A GET requests the stream of notifications, which a server need not support.
        if response.status_code < 400 or response.request.method != "POST":
            return
        self.refusal = f"{response.status_code} {response.reason_phrase}".strip()
        if self.is_initialized and response.status_code in (401, 403, 404):
            # The session, or the authorization for it, has expired: all further calls would be refused.
            self._on_lost()

    async def end_failure(self) -> McpFailure:
        """Return why the session has ended."""
        reason = f"the server answered {self.refusal}" if self.refusal else "the server could not be reached"
        return McpFailure("unreachable", reason)


def raise_first(group: BaseExceptionGroup[BaseException], redactor: SecretRedactor) -> NoReturn:
    """Raise the first exception of a group, which the task groups of the package ``mcp`` raise, as ``McpFailure``."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, McpFailure):
        raise first from None
    if isinstance(first, HTTPError):
        raise unreachable(first, redactor) from group
    raise McpFailure("protocol", f"{type(first).__name__}: {one_line(redactor.redact(str(first)))}") from group


def unreachable(exc: HTTPError, redactor: SecretRedactor) -> McpFailure:
    """Return the failure that an error of HTTP means."""
    reason = one_line(redactor.redact(str(exc))) or type(exc).__name__
    return McpFailure("unreachable", f"the server cannot be reached: {reason}; check url, and that the server runs")

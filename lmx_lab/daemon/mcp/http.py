"""HTTP to MCP servers that nobody trusts: answers have a limit, refusals are noted, failures put in words."""

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
from lmx_lab.daemon.mcp.lines import LINE_BYTES, one_line
from lmx_lab.daemon.mcp.redaction import SecretRedactor
from lmx_lab.wire.mcp import McpServerConfig


def http_client(config: McpServerConfig, watch: ResponseMonitor) -> AsyncClient:
    """A client with the headers of the configuration, whose answers end at 8 MiB."""
    return AsyncClient(
        headers=config.headers,
        # Read timeouts are those of the requests: a stream of events may be silent for long.
        timeout=Timeout(config.start_timeout_s, read=None),
        transport=LimitedTransport(LINE_BYTES),
        event_hooks={"response": [watch.saw]},
    )


class LimitedTransport(AsyncBaseTransport):
    """As httpx2's own; an answer that is no stream of events ends with an error after so many bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._inner = AsyncHTTPTransport()

    async def handle_async_request(self, request: Request) -> Response:
        # Without compression: a few bytes could become any number.
        request.headers["Accept-Encoding"] = "identity"
        response = await self._inner.handle_async_request(request)
        streams = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        if not streams and isinstance(response.stream, AsyncByteStream):
            response.stream = _Bounded(response.stream, self._limit)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Bounded(AsyncByteStream):
    def __init__(self, stream: AsyncByteStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for piece in self._stream:
            read += len(piece)
            if read > self._limit:
                raise ReadError(f"an answer of more than {self._limit:,} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


class ResponseMonitor:
    """What an HTTP server has refused, which the package tells in fewer words."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self.greeted = False
        self.refused = ""

    async def saw(self, response: Response) -> None:
        # A GET is the stream of notifications, which a server need not have.
        if response.status_code < 400 or response.request.method != "POST":
            return
        self.refused = f"{response.status_code} {response.reason_phrase}".strip()
        if self.greeted and response.status_code in (401, 403, 404):
            # The session is gone, or the right to it: calls would be refused from now on.
            self._lost()

    async def ended(self) -> McpFailure:
        why = f"the server answered {self.refused}" if self.refused else "it could not be reached"
        return McpFailure("unreachable", why)


def raise_first(group: BaseExceptionGroup[BaseException], hide: SecretRedactor) -> NoReturn:
    """Raise what a group of the package's task groups is about."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, McpFailure):
        raise first from None
    if isinstance(first, HTTPError):
        raise unreachable(first, hide) from group
    raise McpFailure("protocol", f"{type(first).__name__}: {one_line(hide.hidden(str(first)))}") from group


def unreachable(exc: HTTPError, hide: SecretRedactor) -> McpFailure:
    reason = one_line(hide.hidden(str(exc))) or type(exc).__name__
    return McpFailure("unreachable", f"the server cannot be reached: {reason}; check url, and whether it runs")

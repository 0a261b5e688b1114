"""Provide a client of any chat-format server: strict in what it sends, lenient in what it reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import httpx2
import pydantic_core

from lmx_lab.client.address import is_loopback, normalize_address
from lmx_lab.client.chat_chunks import ChunkReader, Piece
from lmx_lab.client.connection import KEEPALIVE_S, LONG_BYTES, QUICK_S, AsyncClientBase, HttpConnection
from lmx_lab.client.errors import CHAT_SERVER, chat_server_error
from lmx_lab.client.plain_http import PlainTransport
from lmx_lab.client.sse import Remark
from lmx_lab.errors import ConnectionLostError, InvalidRequestError, UnreachableError

T = TypeVar("T")
DONE = "[DONE]"
"""The last event of a stream."""
LAB_HEADER = "x-lmx-lab"
"""Response header of LMX Lab servers."""
MAX_OPEN_S = 2.0
"""Time for which a stream may stay open after the finish reason; then the answer counts as complete."""
MAX_OPEN_AFTER_DONE_S = 0.05
MAX_MODELS = 1000
"""Maximum number of models that are read from a server's list."""


class ChatFormatClient(AsyncClientBase):
    """Streams chats from one server, on one event loop. Closing or cancelling a call closes its connection.

    Args:
        base_url: The address, optionally with ``/v1``.
        api_key: It is never displayed.
        headers: Additional headers of each request.
        transport: Replaces the network, for tests.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        address = normalize_address(base_url)
        if transport is None and address.startswith("http:") and is_loopback(address):
            # Faster than the transport of httpx2, for servers on this machine.
            transport = PlainTransport(keepalive_s=KEEPALIVE_S)
        self._connection = HttpConnection(
            base_url,
            api_key=api_key,
            headers=headers,
            transport=transport,
            server=CHAT_SERVER,
            read_error=chat_server_error,
        )
        self.is_lab: bool | None = None
        """Whether the server is an LMX Lab server; None before it has answered ``models``."""

    @property
    def url(self) -> str:
        """The server's address."""
        return self._connection.url

    async def aclose(self) -> None:
        """Close all connections; the server stops its work for them. Idempotent."""
        await self._connection.aclose()

    async def models(self) -> list[str]:
        """List the ids of the server's models, in its order.

        Raises:
            LabError: no server answers, or the response is not a list of models.
        """
        response, body = await self._connection.request("GET", "/v1/models", limit=LONG_BYTES, within_s=QUICK_S)
        self.is_lab = LAB_HEADER in response.headers
        if not response.is_success:
            raise self._connection.error_for(response, body)
        try:
            document = pydantic_core.from_json(body)
            # Ollama's list is null if it has no models.
            entries = (document["data"] if isinstance(document, Mapping) else document) or []
            ids = [str(entry["id"]) for entry in entries[:MAX_MODELS]]
        except (ValueError, TypeError, KeyError) as exc:
            raise self._connection.error_for(response, body) from exc
        return ids

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Request a streamed chat with usage, and yield its pieces as they arrive.

        Raises:
            ConnectionLostError: the stream ended before the answer was complete.
            LabError: the server's error, before the first piece or after any piece.
        """
        sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            content = json.dumps(sent, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        except (TypeError, ValueError) as exc:
            raise InvalidRequestError(
                f"the request cannot be written as JSON: {exc!s:.200}; give plain Python values"
            ) from None
        reader = ChunkReader(self.url)
        source = self._connection.events("POST", "/v1/chat/completions", content=content, document_bytes=LONG_BYTES)
        loop, until_s = asyncio.get_running_loop(), None
        async with aclosing(source) as events:
            while (event := await next_until(events, until_s)) is not None:
                if isinstance(event, Remark):
                    yield Piece(remark=event.text)
                elif event.strip() == DONE:
                    # The connection can be used again only if the response was read to its end.
                    await next_until(events, loop.time() + MAX_OPEN_AFTER_DONE_S)
                    return
                elif (piece := reader.read(event)) is not None:
                    if reader.finished and until_s is None:
                        until_s = loop.time() + MAX_OPEN_S
                    yield piece
        if not reader.finished:
            raise ConnectionLostError(f"{self.url} ended the stream before the answer was complete; try again")


async def next_until(items: AsyncGenerator[T, None], until_s: float | None) -> T | None:
    """Return the next item of a stream.

    Args:
        until_s: Deadline on the loop's clock, if the answer is complete; None while it is not, because a timer for each
            token would be too slow.

    Returns:
        None after the last item, and if the stream of a complete answer is not closed before the deadline.
    """
    if until_s is None:
        return await anext(items, None)
    try:
        async with asyncio.timeout_at(until_s):
            return await anext(items, None)
    except (TimeoutError, UnreachableError):
        return None

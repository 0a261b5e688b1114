"""A client of chat-completions servers of any make: strict in what it sends, lenient in what it reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import httpx2
import pydantic_core

from lmx_lab.client.chat_chunks import ChunkReader, Piece
from lmx_lab.client.connection import LONG_BYTES, HttpConnection
from lmx_lab.client.errors import CHAT_SERVER, chat_server_error
from lmx_lab.client.sse import Remark
from lmx_lab.client.streams import next_until
from lmx_lab.errors import ConnectionLostError, InvalidRequestError

DONE = "[DONE]"
NAME = "x-lmx-lab"
END_S = 2.0
"""Time after the finish reason in which a stream may stay open; then the answer counts as complete."""
TAIL_S = 0.05
"""The same after ``[DONE]``."""
MODELS = 1000
"""Maximum number of models read from a server's list."""


class ChatFormatClient:
    """Streams chats from one server, on one event loop; closing or cancelling a call closes its connection.

    Args:
        base_url: The address, optionally with ``/v1``.
        api_key: It is never displayed.
        transport: Replaces the network, for tests.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self._connection = HttpConnection(
            base_url, api_key=api_key, transport=transport, server=CHAT_SERVER, read_error=chat_server_error
        )
        self.url = self._connection.url
        self.is_lab: bool | None = None
        """Whether it is an LMX Lab server; None before ``models`` has returned."""

    def __repr__(self) -> str:
        return f"<ChatFormatClient of {self.url}>"

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def models(self) -> list[str]:
        """List the ids of the server's models, in its order.

        Raises:
            LabError: no server answers, or the answer is not a list of models.
        """
        response, text = await self._connection.get("/v1/models", limit=LONG_BYTES)
        if not response.is_success:
            raise self._connection.refused(response, text)
        try:
            document = pydantic_core.from_json(text)
            # Ollama's list is null where it has no models.
            cards = (document["data"] if isinstance(document, Mapping) else document) or []
            ids = [str(card["id"]) for card in cards[:MODELS]]
        except (ValueError, TypeError, KeyError) as exc:
            raise self._connection.refused(response, text) from exc
        self.is_lab = NAME in response.headers
        return ids

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Request a streamed chat with usage, and return its pieces as they arrive.

        Raises:
            ConnectionLostError: the stream ended before the answer did.
            LabError: the server's own, before the first piece or after any piece.
        """
        content = _json({**body, "stream": True, "stream_options": {"include_usage": True}})
        reader = ChunkReader(self.url)
        source = self._connection.events("POST", "/v1/chat/completions", content=content, whole_bytes=LONG_BYTES)
        loop, until_s = asyncio.get_running_loop(), None
        async with aclosing(source) as events:
            while (event := await next_until(events, until_s)) is not None:
                if isinstance(event, Remark):
                    yield Piece(remark=event.text)
                elif event.strip() == DONE:
                    # Only a connection that was read to its end can be used again.
                    await next_until(events, loop.time() + TAIL_S)
                    return
                elif (piece := reader.read(event)) is not None:
                    if reader.finished and until_s is None:
                        until_s = loop.time() + END_S
                    yield piece
        if not reader.finished:
            raise ConnectionLostError(f"{self.url} ended the stream before the answer's end; ask again")


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    except (TypeError, ValueError) as exc:
        raise InvalidRequestError(f"the request cannot be written as JSON: {exc!s:.200}; give plain values") from exc

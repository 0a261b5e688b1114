"""The server of the model: calls, which model is meant, and whether anybody is there."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import httpx2

from lmx_lab.client.chat_chunks import Piece
from lmx_lab.client.chat_format import ChatFormatClient
from lmx_lab.errors import (
    ConnectionLostError,
    LabError,
    ModelBusyError,
    ModelNotFoundError,
    NotLoadedError,
    OutOfMemoryError,
    UnreachableError,
    UpstreamUnreachableError,
)
from lmx_lab.wire.daemon import Upstream as UpstreamRecord
from lmx_lab.wire.events import ModelStatus

LOADED = "default"
"""The lab's own word for whatever is loaded."""
LISTED_S = 30.0
"""So long the first model of another server's list is taken for the one that is meant."""
WITHOUT_MODEL = (NotLoadedError, ModelBusyError, OutOfMemoryError)


class Upstream:
    """One chat-format server, on one loop; whoever makes it closes it.

    Raises:
        InvalidRequestError: an address or a key that could never do.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self._client = ChatFormatClient(url, api_key=api_key, transport=transport)
        self.url = self._client.url
        self._state = UpstreamRecord(url=self.url, reachable=None, model=None, error=None)
        self._told = self._state
        self._meant: tuple[str, float] | None = None

    def __repr__(self) -> str:
        return f"<Upstream {self.url}>"

    async def aclose(self) -> None:
        await self._client.aclose()

    def state(self) -> UpstreamRecord:
        """As of the last call or look."""
        return self._state

    def news(self) -> ModelStatus | None:
        """The state, if it is another than the one that was ``told`` last."""
        if self._state == self._told:
            return None
        return ModelStatus(**self._state.model_dump())

    def told(self, news: ModelStatus) -> None:
        """It is in the log."""
        self._told = UpstreamRecord(**news.model_dump())

    async def look(self) -> UpstreamRecord:
        """Ask whether it is there; never raises ``LabError``."""
        try:
            await self._client.models()
            self._note(reachable=True)
        except LabError as exc:
            self._failed(exc)
        return self._state

    async def call(self, body: Mapping[str, Any], *, model: str | None) -> AsyncGenerator[Piece, None]:
        """A chat, streamed; closing this closes the server's stream.

        Args:
            model: None is whatever the server has: what is loaded there if it is the lab's, else the first it lists.

        Raises:
            UpstreamUnreachableError: nobody answers, or not in the words of such a server.
            ConnectionLostError: it went away in the middle of its answer.
            LabError: the server's own.
        """
        try:
            name = model or await self._model()
            async with aclosing(self._client.stream({**body, "model": name})) as pieces:
                async for piece in pieces:
                    if piece.remark is None:
                        self._note(reachable=True, model=piece.model or name)
                    yield piece
        except LabError as exc:
            self._failed(exc)
            if isinstance(exc, UnreachableError) and not isinstance(exc, ConnectionLostError):
                raise UpstreamUnreachableError(f"the model's server: {exc.message}") from exc
            raise

    async def _model(self) -> str:
        if self._meant is None or self._meant[1] < time.monotonic():
            name = await self._look_up()
            self._meant = (name, time.monotonic() + LISTED_S if name != LOADED else math.inf)
        return self._meant[0]

    async def _look_up(self) -> str:
        try:
            listed = await self._client.models()
        except UnreachableError:
            raise
        except LabError:
            # It lists none, and most servers of one model take any name.
            return LOADED
        if self._client.is_lab:
            return LOADED
        if not listed:
            raise NotLoadedError(f"{self.url} lists no models; give it one, or name a model in the session")
        return listed[0]

    def _failed(self, exc: LabError) -> None:
        if isinstance(exc, ModelNotFoundError | UnreachableError):
            self._meant = None
        if isinstance(exc, ConnectionLostError):
            return  # The next call will know whether it is gone.
        if isinstance(exc, UnreachableError):
            self._note(reachable=False, error=exc.message)
        elif isinstance(exc, WITHOUT_MODEL):
            self._note(reachable=True, error=exc.message)
        else:
            self._note(reachable=True, model=self._state.model)

    def _note(self, *, reachable: bool, model: str | None = None, error: str | None = None) -> None:
        state = self._state
        if (reachable, model, error) != (state.reachable, state.model, state.error):
            self._state = UpstreamRecord(url=self.url, reachable=reachable, model=model, error=error)

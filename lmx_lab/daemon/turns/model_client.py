"""The model server: calls, the choice of the model, and whether the server is reachable."""

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
from lmx_lab.wire.daemon import Upstream
from lmx_lab.wire.events import ModelStatus

LOADED = "default"
"""LMX Lab's name for the loaded model."""
LISTED_S = 30.0
"""Time for which the first model of another server's list is remembered."""
WITHOUT_MODEL = (NotLoadedError, ModelBusyError, OutOfMemoryError)


class ModelClient:
    """One chat-format server, on one event loop. The creator has to close it.

    Raises:
        InvalidRequestError: the address or the key is not valid.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        self._client = ChatFormatClient(url, api_key=api_key, transport=transport)
        self.url = self._client.url
        self._state = Upstream(url=self.url, reachable=None, model=None, error=None)
        self._reported = self._state
        self._chosen: tuple[str, float] | None = None

    def __repr__(self) -> str:
        return f"<Upstream {self.url}>"

    async def aclose(self) -> None:
        await self._client.aclose()

    def state(self) -> Upstream:
        """The state as of the last call or check."""
        return self._state

    def news(self) -> ModelStatus | None:
        """The state, if it differs from the one that was reported last."""
        if self._state == self._reported:
            return None
        return ModelStatus(**self._state.model_dump())

    def reported(self, news: ModelStatus) -> None:
        """Note that this state was written to the log."""
        self._reported = Upstream(**news.model_dump())

    async def look(self) -> Upstream:
        """Check whether the server is reachable; never raises ``LabError``."""
        try:
            await self._client.models()
            self._note(reachable=True)
        except LabError as exc:
            self._failed(exc)
        return self._state

    async def call(self, body: Mapping[str, Any], *, model: str | None) -> AsyncGenerator[Piece, None]:
        """Stream a chat; closing the generator closes the server's stream.

        Args:
            model: None is the loaded model of an LMX Lab server, or the first model that another server lists.

        Raises:
            UpstreamUnreachableError: no server answers, or it is not a chat-format server.
            ConnectionLostError: the connection ended before the answer did.
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
        if self._chosen is None or self._chosen[1] < time.monotonic():
            name = await self._look_up()
            self._chosen = (name, time.monotonic() + LISTED_S if name != LOADED else math.inf)
        return self._chosen[0]

    async def _look_up(self) -> str:
        try:
            listed = await self._client.models()
        except UnreachableError:
            raise
        except LabError:
            # The server lists no models; most servers with one model accept any name.
            return LOADED
        if self._client.is_lab:
            return LOADED
        if not listed:
            raise NotLoadedError(f"{self.url} lists no models; give it one, or name a model in the session")
        return listed[0]

    def _failed(self, exc: LabError) -> None:
        if isinstance(exc, ModelNotFoundError | UnreachableError):
            self._chosen = None
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
            self._state = Upstream(url=self.url, reachable=reachable, model=model, error=error)

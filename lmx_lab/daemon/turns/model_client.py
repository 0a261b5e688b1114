"""Call the model server of a daemon, choose the model, and track whether the server is reachable."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from lmx_lab.client.chat_format import ChatFormatClient, Piece
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
WITHOUT_MODEL = (NotLoadedError, ModelBusyError, OutOfMemoryError)
"""Errors of a server that is reachable but cannot answer with a model at the moment."""


class ModelClient:
    """Client of one chat-format server, used on one event loop. Close it with ``aclose``.

    Args:
        headers: Additional headers of each request.

    Raises:
        InvalidRequestError: The address or the key is not valid.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._client = ChatFormatClient(url, api_key=api_key, headers=headers)
        self.url = self._client.url
        self._state = Upstream(url=self.url, reachable=None, model=None, error=None)
        self._reported: Upstream = self._state
        self._choice: tuple[str, float] | None = None
        """The chosen model, and the monotonic time until which the choice is valid."""

    def __repr__(self) -> str:
        return f"<ModelClient {self.url}>"

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def state(self) -> Upstream:
        """Return the state as of the last call."""
        return self._state

    def unreported_status(self) -> ModelStatus | None:
        """Return the state as an event's data if it differs from the one that was reported last."""
        state = self._state
        return state if isinstance(state, ModelStatus) and state != self._reported else None

    def mark_reported(self, status: ModelStatus) -> None:
        """Note that this state was written to the log."""
        self._reported = status

    async def call(self, body: Mapping[str, Any], *, model: str | None) -> AsyncGenerator[Piece, None]:
        """Stream a chat. Closing the generator closes the server's stream.

        Args:
            model: Name of the model. None selects the loaded model of an LMX Lab server, and the first listed model of
                another server.

        Raises:
            UpstreamUnreachableError: No server answers, or it is not a chat-format server.
            ConnectionLostError: The connection ended before the answer did.
            LabError: An error of the server.
        """
        try:
            name = model or await self._choose_model()
            async with aclosing(self._client.stream({**body, "model": name})) as pieces:
                async for piece in pieces:
                    if piece.remark is None:
                        self._set_state(reachable=True, model=piece.model or name)
                    yield piece
        except LabError as exc:
            if isinstance(exc, ModelNotFoundError | UnreachableError):
                self._choice = None
            if isinstance(exc, ConnectionLostError):
                raise  # The next call finds out whether the server is still reachable.
            if isinstance(exc, UnreachableError):
                self._set_state(reachable=False, error=exc.message)
                raise UpstreamUnreachableError(f"the model server: {exc.message}") from exc
            if isinstance(exc, WITHOUT_MODEL):
                self._set_state(reachable=True, error=exc.message)
            else:
                self._set_state(reachable=True, model=self._state.model)
            raise

    async def _choose_model(self) -> str:
        if self._choice is not None and self._choice[1] >= time.monotonic():
            return self._choice[0]
        try:
            models = await self._client.models()
        except UnreachableError:
            raise
        except LabError:
            # The server does not list its models. Most servers with one model accept any name.
            models = [LOADED]
        else:
            models = [LOADED] if self._client.is_lab else models
        if not models:
            raise NotLoadedError(f"{self.url} lists no models; load a model there, or set the session's model")
        name = models[0]
        # The list of another server is read again after 30 s.
        self._choice = (name, time.monotonic() + 30.0 if name != LOADED else math.inf)
        return name

    def _set_state(self, *, reachable: bool, model: str | None = None, error: str | None = None) -> None:
        state = self._state
        if (reachable, model, error) != (state.reachable, state.model, state.error):
            self._state = ModelStatus(url=self.url, reachable=reachable, model=model, error=error)

"""Attach to a lab's server in another kernel or process, or on another machine."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lmx_lab.client import AsyncLabClient
from lmx_lab.errors import HostingError, InvalidRequestError, LabError
from lmx_lab.notebook.discovery import find_address, is_name
from lmx_lab.notebook.lab import Lab
from lmx_lab.notebook.lab_server import LabServer
from lmx_lab.notebook.remote import RemoteBackend
from lmx_lab.notebook.verbs import LoopPortal, in_thread, on_loop
from lmx_lab.portal import LoopThread
from lmx_lab.values.models import LoadSpec
from lmx_lab.wire.admin import NotReady, Ready

if TYPE_CHECKING:
    from lmx_lab.client import LabClient

REPR_TIMEOUT_S = 2.0
"""Maximum time that the lab's ``repr`` waits for the server."""
CLOSE_S = 2.0
"""Maximum time to close a connection."""
MAX_PANEL_CONNECTIONS = 8
"""Maximum number of connections that are kept for panels."""
_PANEL_CONNECTIONS: dict[str, RemoteServer] = {}
"""The last connection with panels, by address. Without it, nothing would refer to the connection of
``attach(url).panel()``."""


def attach(url: str | AsyncLabClient | LabClient, *, api_key: str | None = None) -> Lab:
    """Return a lab for the server at this address, with the methods of a launched lab: ``with attach(url) as lab``.

    Blocking methods work in scripts, in cells and beside running event loops, because the connection has its own loop.
    ``stop()``, or deleting the lab, closes the connection; the server keeps running. ``panel()`` keeps the connection
    open until panels of another connection to the same address are shown.

    Args:
        url: The address that the server prints, or one through a proxy, with or without ``/v1`` or a slash at its end;
            or the name of a lab that is announced on the local network (see ``discover()``); or a client, whose address
            and key the lab uses for its own connection.
        api_key: The server's key, or Jupyter's token if Jupyter is in front of it.

    Raises:
        UnreachableError: no LMX Lab server answers at the address, or none is announced under the name.
        UnauthorizedError: the server needs a key, or another one.
    """
    if not isinstance(url, str):
        url, api_key = _address_and_key(url, api_key)
    server = RemoteServer(find_address(url) if is_name(url) else url, api_key=api_key)
    lab = Lab.over(server, server.backend())
    try:
        lab.start()
    except BaseException:
        lab.stop()
        raise
    return lab


def _address_and_key(client: AsyncLabClient | LabClient, api_key: str | None) -> tuple[str, str | None]:
    # Imported here, because attaching to an address does not need it.
    from lmx_lab.client import LabClient

    if not isinstance(client, AsyncLabClient | LabClient):
        raise InvalidRequestError(
            f"url is {client!r:.80}; pass an address such as 'http://192.168.1.20:8400', or a client", param="url"
        )
    if api_key is not None:
        raise InvalidRequestError(
            "a client has a key of its own; leave api_key out, or pass an address", param="api_key"
        )
    return client.url, client.api_key


class RemoteServer(LabServer):
    """The connection to a server.

    Deleting it closes the connection, so the backend and the panels must not refer to it.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._client = AsyncLabClient(url, api_key=api_key)
        self._api_key = api_key
        self._thread = LoopThread("lmx-lab-attached")
        self._version = ""
        self._callbacks: list[Callable[[], None]] = []
        # Called by ``close``, when this object is deleted, and at exit.
        self._end = weakref.finalize(self, _end, self._thread, self._client)
        # Called before ``_end`` when this object is deleted, but not at exit, when the kernel may no longer send
        # messages.
        self._on_delete = weakref.finalize(self, _close_later, self._end, self._callbacks)
        self._on_delete.atexit = False
        self._portal = LoopPortal(self._thread, check=functools.partial(_check_open, self._end))

    def backend(self) -> RemoteBackend:
        end = self._end
        return RemoteBackend(self._client, self._portal, is_open=lambda: end.alive)

    @property
    def portal(self) -> LoopPortal:
        """The loop of the connection."""
        return self._portal

    # Lifetime

    async def start(self) -> None:
        """Connect, and check that a lab's server answers and accepts the key. Does nothing if this was done before.

        Raises:
            HostingError: the connection was stopped.
            LabError: as ``attach()``.
        """
        _check_open(self._end)
        if not self._version:
            self._thread.start()
            self._version = await on_loop(self._greet())

    async def _greet(self) -> str:
        version = await self._client.version()
        await self._client.models()
        return version

    async def stop(self) -> None:
        """Close the connection, which ends this lab's requests. Idempotent."""
        await in_thread(self.close)

    def close(self) -> None:
        """Close the connection. This takes up to ``CLOSE_S``."""
        self._on_delete.detach()
        self._end()
        if _PANEL_CONNECTIONS.get(self.url) is self:
            del _PANEL_CONNECTIONS[self.url]
        for callback in self._callbacks:
            callback()

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Register a function to call when the connection is closed. It must not refer to this object."""
        self._callbacks.append(callback)

    @property
    def running(self) -> bool:
        """Whether the connection is open. The server may have stopped."""
        return self._end.alive

    def panels_shown(self) -> None:
        """Keep this connection until panels of another one to the same address are shown."""
        if self.running:
            _PANEL_CONNECTIONS.pop(self.url, None)
            _PANEL_CONNECTIONS[self.url] = self
            while len(_PANEL_CONNECTIONS) > MAX_PANEL_CONNECTIONS:
                del _PANEL_CONNECTIONS[next(iter(_PANEL_CONNECTIONS))]

    # Description

    @property
    def url(self) -> str:
        """The server's address."""
        return self._client.url

    @property
    def api_key(self) -> str | None:
        return self._api_key

    @property
    def bench_folder(self) -> None:
        """None, which selects the user's own folder, because the server's home may be on another machine."""

    def unpinned(self) -> Sequence[LoadSpec]:
        return ()

    def facts(self) -> dict[str, str]:
        """Return the name and the value of each line that describes the lab."""
        return {"LMX Lab": self._state(), "address": self.url}

    def _state(self) -> str:
        if not self.running:
            return "connection stopped"
        try:
            now = self._portal.run(self._ready())
        except (LabError, TimeoutError) as exc:
            return f"in another process, which does not answer: {exc}"
        model = "no model ready" if isinstance(now, NotReady) else f"{now.model} ({now.vram_gb:.2f} GB)"
        state = f", {now.unloading}" if now.unloading is not None else ""
        return f"running in another process, version {self._version}, {model}{state}"

    async def _ready(self) -> Ready:
        return await asyncio.wait_for(self._client.ready(), REPR_TIMEOUT_S)


def _check_open(end: weakref.finalize[Any, Any]) -> None:
    if not end.alive:
        raise HostingError("this connection was stopped; attach() opens a new one")


def _end(thread: LoopThread, client: AsyncLabClient) -> None:
    try:
        with suppress(LabError, TimeoutError):
            thread.run(client.aclose(), CLOSE_S)
    finally:
        thread.stop()


def _close_later(end: Callable[[], object], callbacks: list[Callable[[], None]]) -> None:
    """Close the connection of a deleted object, and update its panels a last time, to show that it is stopped."""

    def close() -> None:
        end()
        for callback in callbacks:
            callback()

    if callbacks:
        # In a thread: the last reference may have been on the panels' own loop, which must not wait for its own end.
        threading.Thread(target=close, name="lmx-lab-close", daemon=True).start()

"""Run the inference server as an ASGI application that starts and ends with its lifespan.

It opens no socket, so another project's server can run it as one of several replicas.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from lmx_lab.engine import ModelManager
from lmx_lab.errors import EngineError, LabError, NotLoadedError
from lmx_lab.http.guard import PAGE_PATHS, Receive, Scope, Send, local_policy
from lmx_lab.server import InferenceServer, create_server
from lmx_lab.server.health import problem
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Values of the Host header that are accepted with any port, because the port belongs to the proxy."""
REQUESTS_S = 2.5
"""Time in which running requests can end when the application shuts down. The proxy has already waited for them."""


class ReplicaApp:
    """The inference server with one model, as an ASGI application. It can be pickled before it is started.

    Callers do not have the rights of programs on this machine: they cannot load or unload models, because such requests
    would reach only one replica.

    Args:
        settings: ``host`` and ``port`` are not used, and requests are not recorded. ``allowed_hosts`` must contain the
            names of the proxy, apart from loopback.

    Raises:
        InvalidRequestError: a setting for the guard can never match.
    """

    def __init__(self, settings: Settings, spec: LoadSpec) -> None:
        # Not recorded, because each replica would have its own records.
        self._settings, self._spec = replace(settings, record="off"), spec
        self._policy = local_policy(
            settings.port,
            hosts=[*LOCAL_NAMES, *settings.allowed_hosts],
            origins=settings.cors_origins,
            key=settings.api_key,
            open_paths=PAGE_PATHS if settings.page else (),
        )
        self._server: InferenceServer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
            return
        assert self._server is not None, "requests follow the start of the lifespan"
        # A caller without an address is not local.
        await self._server.asgi({**scope, "client": None}, receive, send)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        for step, work in (("startup", self.start), ("shutdown", self.stop)):
            await receive()
            if not await _report(step, work, send):
                return

    async def start(self) -> None:
        """Load the models.

        Raises:
            LabError: a model could not be loaded.
        """
        manager = ModelManager(self._settings)
        self._server = create_server(
            manager=manager, catalog=manager.catalog, settings=self._settings, policy=lambda: self._policy
        )
        manager.start()
        try:
            for spec in (*manager.unpinned(), self._spec):
                await manager.load(spec)
        except BaseException:
            await self.stop()
            raise

    def check(self) -> None:
        """Check that requests can be answered, as ``GET /readyz`` does.

        Raises:
            LabError: requests cannot be answered.
        """
        if self._server is None:
            raise NotLoadedError("the server was not started, or is being stopped")
        manager = self._server.manager
        if (error := problem(manager.snapshot, settings=self._settings, alive=manager.alive)) is not None:
            raise error

    async def stop(self) -> None:
        """End the running requests and unload the models. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.feed.close()
        with suppress(EngineError):
            await server.manager.quiesce(REQUESTS_S)
        await asyncio.to_thread(server.manager.stop)
        await asyncio.to_thread(server.close)


async def _report(step: str, work: Callable[[], Awaitable[None]], send: Send) -> bool:
    """Perform a step of the lifespan and send its result. Returns whether the step succeeded."""
    try:
        await work()
    except LabError as exc:
        await send({"type": f"lifespan.{step}.failed", "message": exc.message})
        return False
    await send({"type": f"lifespan.{step}.complete"})
    return True

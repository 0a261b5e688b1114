"""Run replicas of the inference server on a Ray cluster, behind the proxy of Ray Serve.

A replica is an ASGI application that starts and ends with its lifespan. It opens no socket.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmx_lab.engine import ModelManager
from lmx_lab.errors import EngineError, LabError, NotLoadedError
from lmx_lab.extras import import_optional
from lmx_lab.http.guard import PAGE_PATHS, Receive, Scope, Send, local_policy
from lmx_lab.server import InferenceServer, create_server
from lmx_lab.server.health import problem
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadOptions, LoadSpec
from lmx_lab.wire.admin import load_spec

if TYPE_CHECKING:
    from ray.serve import Application

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Values of the Host header that are accepted with any port, because the port belongs to the proxy."""
REQUESTS_S = 2.5
"""Time in which running requests can end when the application shuts down. The proxy has already waited for them."""
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
"""Routes requests with the same value of the header ``x-session-id`` to the same replica, whose prefix cache contains
the beginning of the conversation."""


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
            for step, work in (("startup", self.start), ("shutdown", self.stop)):
                await receive()
                try:
                    await work()
                except LabError as exc:
                    await send({"type": f"lifespan.{step}.failed", "message": exc.message})
                    return
                await send({"type": f"lifespan.{step}.complete"})
            return
        assert self._server is not None, "requests follow the start of the lifespan"
        # A caller without an address is not local.
        await self._server.asgi({**scope, "client": None}, receive, send)

    async def start(self) -> None:
        """Load the models.

        Raises:
            LabError: a model could not be loaded.
        """
        manager = ModelManager(self._settings)
        self._server = create_server(manager=manager, policy=lambda: self._policy)
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


def application(
    model: str, *, settings: Settings | None = None, load: LoadOptions | None = None, **deployment: Any
) -> Application:
    """Return replicas of the inference server with a loaded model: ``serve.run(application("smollm2-135m"))``.

    Ray Serve starts a replica where the requested resources are free, replaces a replica if ``GET /readyz`` would
    return 503, and waits for the running answers of a replica before it removes the replica.

    Args:
        model: An id, or a path that exists on each machine. A machine without the model downloads it.
        settings: Settings of each replica, by default of the environment. The proxy's options replace ``host`` and
            ``port``. ``allowed_hosts`` must contain the names of the proxy, apart from loopback.
        load: ``LoadOptions``, such as ``{"engine": "mlx"}``.
        deployment: Options of ``serve.deployment``, such as ``num_replicas`` and ``ray_actor_options``.

    Raises:
        InvalidRequestError: a setting or an option is not valid.
        MissingPackageError: Ray Serve is not installed.
    """
    serve = import_optional("ray.serve", "lmx_lab.deploy.ray_serve")
    settings = settings or Settings.read()
    app = ReplicaApp(settings, load_spec(model, load or {}))
    options = {
        "name": "lmx-lab",
        # By default, Ray Serve sends five requests to a replica, which would leave slots empty.
        "max_ongoing_requests": settings.slots + settings.queue_limit,
        "graceful_shutdown_timeout_s": settings.drain_s,
        "request_router_config": {"request_router_class": ROUTER},
    }
    replicas: Application = serve.deployment(**{**options, **deployment})(serve.ingress(app)(Replica)).bind()
    return replicas


class Replica:
    """A replica, which Ray Serve creates in a separate process."""

    app: ReplicaApp
    """The application of this process. Set by ``serve.ingress``."""

    async def check_health(self) -> None:
        """Check that requests can be answered. Ray Serve calls this, and replaces the replica after several failures.

        Raises:
            LabError: requests cannot be answered.
        """
        self.app.check()

"""Run replicas of the inference server on a Ray cluster, behind the proxy of Ray Serve."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lmx_lab.deploy.replica import ReplicaApp
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadOptions, LoadSpec

if TYPE_CHECKING:
    from ray.serve import Application

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
"""Sends requests with the same value of the header ``x-session-id`` to the same replica, whose prefix cache contains
the beginning of the conversation."""


def application(
    model: str, *, settings: Settings | None = None, load: LoadOptions | None = None, **deployment: Any
) -> Application:
    """Return replicas of the inference server that have loaded a model: ``serve.run(application("smollm2-135m"))``.

    Ray Serve starts a replica where the resources that it requests are free, replaces one that ``GET /readyz`` would
    report as not ready, and waits for the running answers of a replica before it removes it.

    Args:
        model: An id, or a path on each machine. A model that is not on the disk of a machine is downloaded there.
        settings: Settings of each replica, by default from the environment. The proxy's options replace ``host`` and
            ``port``. ``allowed_hosts`` must contain the names of the proxy, apart from loopback.
        load: ``LoadOptions``, such as ``{"engine": "mlx"}``.
        deployment: Options of ``serve.deployment``, such as ``num_replicas`` and ``ray_actor_options``.

    Raises:
        InvalidRequestError: a setting or an option is not valid.
        ImportError: Ray Serve is not installed.
    """
    serve = _ray_serve()
    settings = settings or Settings.read()
    app = ReplicaApp(settings, LoadSpec.with_options(model, load or {}))
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
    """A replica, which Ray Serve creates in a process of its own."""

    app: ReplicaApp
    """The copy of this process, which ``serve.ingress`` sets."""

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces the replica after several failures.

        Raises:
            LabError: requests cannot be answered.
        """
        self.app.check()


def _ray_serve() -> Any:
    try:
        return importlib.import_module("ray.serve")
    except ImportError as exc:
        raise ImportError("Ray Serve is not installed: pip install 'lmx-lab[ray]'") from exc

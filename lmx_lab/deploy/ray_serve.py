"""Run replicas of the inference server on a Ray cluster, behind the proxy of Ray Serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmx_lab.deploy.replica import ReplicaApp
from lmx_lab.extras import import_optional
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadOptions, LoadSpec

if TYPE_CHECKING:
    from ray.serve import Application

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
"""Routes requests with the same value of the header ``x-session-id`` to the same replica, whose prefix cache contains
the beginning of the conversation."""


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
    """A replica, which Ray Serve creates in a separate process."""

    app: ReplicaApp
    """The application of this process. Set by ``serve.ingress``."""

    async def check_health(self) -> None:
        """Check that requests can be answered. Ray Serve calls this, and replaces the replica after several failures.

        Raises:
            LabError: requests cannot be answered.
        """
        self.app.check()

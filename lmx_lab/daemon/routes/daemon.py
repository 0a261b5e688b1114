"""Routes of the daemon itself: health, state and shutdown."""

from __future__ import annotations

import os
import time
from dataclasses import asdict

from fastapi import APIRouter

from lmx_lab.daemon.routes.queries import StrictQueryRoute
from lmx_lab.daemon.routes.responses import read_failures
from lmx_lab.daemon.services import Services
from lmx_lab.daemon.storage.store import DatabaseView
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.middleware import VERSION
from lmx_lab.http.openapi import BODY, failures
from lmx_lab.wire.daemon import Counts, DaemonRecord, Health, Retention, Shutdown, ShutdownAnswer

HEALTH = "/v3/health"
FEATURES = ("sessions", "fork", "turns", "permissions", "events", "events-socket", "mcp-stdio", "mcp-http")
COUNTS = """
SELECT (SELECT count(*) FROM sessions) AS sessions, (SELECT count(*) FROM turns) AS turns,
    (SELECT count(*) FROM permissions WHERE decision IS NULL) AS permissions,
    (SELECT count(*) FROM mcp_servers) AS mcp_servers
"""


def daemon_routes(services: Services) -> APIRouter:
    """Return the routes of the daemon itself."""
    router = APIRouter(prefix="/v3", tags=["daemon"], route_class=StrictQueryRoute)

    # HEAD is used by load balancers. The HTTP server omits the body.
    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=failures(InvalidRequestError))
    async def health() -> Health:
        """Whether the daemon is running. Needs no token."""
        return Health(status=services.status(), daemon_id=services.daemon_id)

    @router.get("/daemon", responses=read_failures())
    async def daemon() -> DaemonRecord:
        """Ids, counts, limits, retention, features and the state of the model server."""
        rows = await services.store.read(_count_rows)
        running, queued = services.turns.counts()
        limits = services.limits
        log = services.log
        return DaemonRecord(
            daemon_id=services.daemon_id,
            stream_id=log.stream_id,
            version=VERSION,
            pid=os.getpid(),
            started_at=services.started_at,
            uptime_s=time.monotonic() - services.started_monotonic_s,
            latest_seq=log.latest_seq,
            oldest_seq=log.oldest_seq,
            counts=Counts(
                **rows,
                running_turns=running,
                queued_turns=queued,
                subscribers=len(services.subscribers),
                tools=len(services.toolbox.list_tools()),
            ),
            upstream=services.upstream.state(),
            retention=Retention(
                days=limits.keep_days, events=limits.keep_events, fold_tokens_after_s=limits.fold_after_s
            ),
            limits=asdict(limits),
            features=list(FEATURES),
        )

    @router.post("/daemon/shutdown", status_code=202, responses=failures(*BODY))
    async def shutdown(body: Shutdown | None = None) -> ShutdownAnswer:
        """Stop the daemon. With `drain`, running turns have `grace_s` seconds to end; with `now` they end immediately.
        Queued turns run at the next start."""
        services.shut_down(body or Shutdown())
        return ShutdownAnswer()

    return router


def _count_rows(view: DatabaseView) -> dict[str, int]:
    row = view.fetch_one(COUNTS)
    assert row is not None
    return {name: row[name] for name in row.keys()}  # noqa: SIM118

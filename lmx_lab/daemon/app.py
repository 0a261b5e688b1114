"""Create the daemon's ASGI application: its routes, and the rules for its callers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fastapi import FastAPI

from lmx_lab.daemon.routes.events import PATH, event_routes
from lmx_lab.daemon.routes.resources import (
    HEALTH,
    daemon_routes,
    mcp_routes,
    permission_routes,
    session_routes,
    turn_routes,
)
from lmx_lab.daemon.services import Services
from lmx_lab.daemon.storage.sessions import LIST_LIMIT
from lmx_lab.http.guard import ASGIApp, GuardPolicy, local_policy
from lmx_lab.http.middleware import VERSION, wrap_app
from lmx_lab.http.openapi import DescribedAPI
from lmx_lab.settings import Settings
from lmx_lab.wire.events import EVENT_DATA, Envelope

METHODS = ("GET", "POST", "PATCH", "DELETE")
POLLS = ("events_events", "events_events_of_session")
"""Operation ids of the routes that poll events."""
KEY_HINT = (
    "send the header Authorization: Bearer TOKEN; the token is new at each start, in state.json in the daemon's folder "
    "($LMX_LAB_HOME/daemon)"
)


def create_daemon_app(
    services: Services, *, policy: Callable[[], GuardPolicy], max_body_bytes: int
) -> tuple[ASGIApp, FastAPI]:
    """Create the application with its routes, error bodies, guard, CORS and request ids. Starts nothing."""
    limits = services.limits
    api = DescribedAPI(
        title="LMX Lab daemon",
        version=VERSION,
        redirect_slashes=False,
        openapi_url="/v3/openapi.json",
        docs_url=None,
        redoc_url=None,
        extra_models=(Envelope, *EVENT_DATA),
        key=("token", KEY_HINT),
        open_paths=frozenset({HEALTH}),
        maximums={
            **{(operation, "wait"): limits.wait_s for operation in (*POLLS, "turns_read")},
            **{(operation, "limit"): limits.page_events for operation in POLLS},
            ("sessions_listed", "limit"): LIST_LIMIT,
        },
    )
    api.state.max_body_bytes = max_body_bytes
    # Routes are tried in this order, so those of turns come first.
    for routes in (turn_routes, daemon_routes, session_routes, permission_routes, event_routes, mcp_routes):
        api.include_router(routes(services))
    return wrap_app(api, policy, methods=METHODS), api


def daemon_policy(settings: Settings, port: int, token: str, own_names: Sequence[str] = ()) -> GuardPolicy:
    """Return the rules for callers of the daemon: loopback and the hosts and origins of the settings are accepted, and
    all routes except health need the token.

    Args:
        own_names: Names and addresses of this computer that are accepted with this port.

    Raises:
        InvalidRequestError: ``allowed_hosts`` or ``cors_origins`` has an entry that can never match.
    """
    host = settings.daemon_host.strip("[]")
    names = [*own_names, *([] if host in ("0.0.0.0", "::", "localhost") else [host])]
    own_hosts = [f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names]
    policy = local_policy(port, hosts=[*own_hosts, *settings.allowed_hosts], origins=settings.cors_origins, key=token)
    return replace(policy, key_hint=KEY_HINT, open_paths=frozenset({HEALTH}), query_key_paths=frozenset({PATH}))

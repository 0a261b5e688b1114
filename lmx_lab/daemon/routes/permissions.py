"""Permissions that turns wait for: listed and decided."""

from __future__ import annotations

from fastapi import APIRouter

from lmx_lab.daemon.routes.queries import StrictQueryRoute
from lmx_lab.daemon.routes.responses import reading, writing
from lmx_lab.daemon.services import Services
from lmx_lab.errors import AlreadyResolvedError, PermissionExpiredError, PermissionNotFoundError
from lmx_lab.wire.sessions import Decision, PermissionList, PermissionRecord


def permission_routes(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v3/permissions", tags=["permissions"], route_class=StrictQueryRoute)

    @router.get("", responses=reading())
    async def listed() -> PermissionList:
        """Those that wait for a decision, of all sessions."""
        return await services.turns.permissions()

    @router.post(
        "/{permission_id}",
        responses=writing(PermissionNotFoundError, AlreadyResolvedError, PermissionExpiredError, in_path=True),
    )
    async def decide(permission_id: str, body: Decision) -> PermissionRecord:
        """Allow or deny one call, with exactly its arguments. The first decision counts; later ones are told of it."""
        return await services.turns.decide(permission_id, body)

    return router

"""The routes ``GET /healthz`` (the process is running) and ``GET /readyz`` (a model can answer requests)."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from lmx_lab.engine import ModelManager
from lmx_lab.engine.lookup import public_id, public_unloading
from lmx_lab.errors import EngineDeadError, LabError, NotLoadedError, OutOfMemoryError
from lmx_lab.http.errors import detail_for
from lmx_lab.http.guard import is_local
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.wire.admin import Alive, NotReady, Ready
from lmx_lab.wire.errors import ErrorBody


def health_routes(manager: ModelManager) -> APIRouter:
    """Return the router of the health checks."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def healthz() -> Alive:
        """Show that the process is running."""
        return Alive()

    @router.get(
        "/health", response_model=Alive, responses={503: {"model": ErrorBody, "description": "No model is ready"}}
    )
    async def health(request: Request) -> Alive | JSONResponse:
        """Show whether a model can answer requests, in the form of llama.cpp's server."""
        local = is_local(request.scope)
        error = problem(manager.snapshot, settings=manager.settings, alive=manager.alive, local=local)
        return Alive() if error is None else JSONResponse(ErrorBody(error=detail_for(request, error)).model_dump(), 503)

    @router.get(
        "/readyz",
        response_model=Ready,
        response_model_exclude_none=True,
        responses={503: {"model": NotReady, "description": "No model is ready"}},
    )
    async def readyz(request: Request) -> Ready | JSONResponse:
        """Show whether a model can answer requests. If not, the response is 503 with the reason and the next step."""
        now = manager.snapshot
        local = is_local(request.scope)
        error = problem(now, settings=manager.settings, alive=manager.alive, local=local)
        notices: dict[str, Any] = {
            "recorded": manager.settings.record == "all" or None,
            "swap": manager.settings.swap or None,
            "resident": None
            if manager.settings.resident == 1
            else [public_id(state.entry.id, local=local) for state in now.models],
        }
        if error is None:
            unloading = now.unloading and (now.unloading if local else public_unloading(now.unloading))
            return Ready(
                ready=True,
                model=public_id(now.model or "", local=local),
                vram_gb=now.model_memory_bytes / 1e9,
                unloading=unloading,
                **notices,
            )
        body = NotReady(ready=False, model="", vram_gb=0.0, error=detail_for(request, error), **notices)
        # Only the fields of the error are sent without a value.
        absent = {name for name in ("unloading", "recorded", "swap", "resident") if getattr(body, name) is None}
        return JSONResponse(body.model_dump(exclude=absent), status_code=503)

    return router


def problem(now: EngineSnapshot, *, settings: Settings, alive: bool = True, local: bool = True) -> LabError | None:
    """Return the error that explains why requests cannot be answered now; None if they can.

    Args:
        local: Whether the caller is on the server's machine. Others cannot load a model, unless the settings allow it.
    """
    if now.state == "dead" or not alive:
        remedy = _remedy("load a model to start it again", settings, local=local)
        return EngineDeadError(f"the engine has died; {remedy}")
    if now.stalled(time.perf_counter(), settings.stall_limit_s):
        return EngineDeadError(
            f"the engine has made no step for {settings.stall_limit_s:g} s; requests running: {now.active_requests}"
        )
    if now.state == "ready":
        return None
    pinned = ", ".join(public_id(each.entry.id, local=local) for each in now.pinned)
    note = f" (the pinned {pinned} can answer requests)" if pinned else ""
    if now.state == "loading":
        return NotLoadedError(f"a model is being loaded{note}; try again", retry_after_s=1)
    if now.unloaded_model is None:
        return NotLoadedError(f"no model is loaded{note}; {_remedy('load a model first', settings, local=local)}")
    reasons = {"memory": " because memory ran out", "idle": " because it was idle"}
    reason = f"{public_id(now.unloaded_model, local=local)} was unloaded{reasons.get(now.unload_cause or '', '')}{note}"
    error: type[LabError] = NotLoadedError
    what = "load it again"
    if now.unload_cause == "memory":
        error, what = OutOfMemoryError, "load it again, or a smaller or more quantized one"
    return error(f"{reason}; {_remedy(what, settings, local=local)}")


def _remedy(what: str, settings: Settings, *, local: bool) -> str:
    """Return what the caller can do, who may not be allowed to load a model."""
    may_load = local or settings.lan_admin
    return f"{what}: POST /admin/models/load" if may_load else "ask the person who runs this server to load one"

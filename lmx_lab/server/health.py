"""GET /healthz: the process runs. GET /readyz: a model answers."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from lmx_lab.engine import Engine
from lmx_lab.errors import EngineDeadError, LabError, NotLoadedError
from lmx_lab.server.errors import detail, request_id_of
from lmx_lab.wire.admin import Alive, NotReady, Ready


def health_routes(engine: Engine, *, stall_limit_s: float) -> APIRouter:
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def healthz() -> Alive:
        return Alive()

    @router.get(
        "/readyz", response_model=Ready, responses={503: {"model": NotReady, "description": "No model, or no progress"}}
    )
    async def readyz(request: Request) -> Ready | JSONResponse:
        error = _problem(engine, stall_limit_s)
        now = engine.snapshot
        if error is None:
            return Ready(ready=True, model=now.model or "", vram_gb=now.model_memory_bytes / 1e9)
        body = NotReady(ready=False, model="", vram_gb=0.0, error=detail(error, request_id_of(request)))
        return JSONResponse(body.model_dump(), status_code=503)

    return router


def _problem(engine: Engine, stall_limit_s: float) -> LabError | None:
    now = engine.snapshot
    if now.state == "dead" or not engine.alive:
        return EngineDeadError("the engine thread is gone; load a model to start it again: POST /admin/models/load")
    if now.stalled(time.perf_counter(), stall_limit_s):
        return EngineDeadError(f"no engine step for {stall_limit_s:g} s while {now.active_requests} requests run")
    if now.state != "ready":
        return NotLoadedError(f"the engine is {now.state}; load a model first: POST /admin/models/load")
    return None

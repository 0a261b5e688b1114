"""List, load and unload models. Also GET /v1/models, the list in the chat format."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request

from lmx_lab.engine import ModelManager
from lmx_lab.engine.model_lookup import ANY_KIND, check_unload, entries_in_memory, public_id, unknown_model
from lmx_lab.engine.registry import ENGINES, engine_for
from lmx_lab.engine.speeds import Speeds, read_speeds, versions
from lmx_lab.errors import AdminForbiddenError, ModelNotFoundError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import failures, link
from lmx_lab.server.openapi import SWAPPED
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import LoadSpec, ModelEntry
from lmx_lab.weights import Catalog, Listing
from lmx_lab.weights.files import in_thread
from lmx_lab.wire.admin import (
    Compute,
    EngineRecord,
    LoadAnswer,
    LoadRequest,
    ModelCard,
    ModelCards,
    ModelRecord,
    ModelRecords,
    Preference,
    UnloadAnswer,
    UnloadRequest,
)

FIRST_CARD = link("inference_get_model", "One of the models that are listed.", model="$response.body#/data/0/id")
FIRST_RECORD = link("admin_load", "Load one that is listed.", body={"model": "$response.body#/models/0/id"})
LOADED = {
    "model": link("inference_get_model", "The model that was loaded.", model="$response.body#/model"),
    "unload": link("admin_unload", "Unload it again.", body={"model": "$response.body#/model"}),
}


def admin_routes(*, manager: ModelManager, catalog: Catalog, lan_admin: bool) -> APIRouter:
    router = APIRouter(prefix="/admin", tags=["admin"], route_class=StrictRoute)

    @router.get("/models", responses={200: {"links": {"load": FIRST_RECORD}}})
    async def models(request: Request) -> ModelRecords:
        """Every model on this disk that can be loaded, and which one is, and which engines run them. Only local callers
        see paths; for others the `path` of a model is its id.
        """
        found = await alisting(catalog, manager)
        if is_local(request.scope):
            return found
        hide: Callable[[str], str] = request.app.state.without_paths
        return found.model_copy(
            update={
                "models": [_without_path(it) for it in found.models],
                "compute": found.compute and found.compute.model_copy(update={"detail": hide(found.compute.detail)}),
                "problem": found.problem and hide(found.problem),
            }
        )

    @router.post("/models/load", responses={200: {"links": LOADED}, **SWAPPED})
    async def load(body: LoadRequest, request: Request) -> LoadAnswer:
        """Load a model in place of the loaded one; answers when it is loaded. Local callers may give a path."""
        local = is_local(request.scope)
        check_admin(local=local, lan_admin=lan_admin)
        report = await manager.load(LoadSpec(**body.model_dump()), local=local)
        return LoadAnswer(model=report.model, load_time_ms=report.load_s * 1e3, vram_gb=report.memory_bytes / 1e9)

    @router.post("/models/unload", responses=SWAPPED)
    async def unload(request: Request, body: UnloadRequest | None = None) -> UnloadAnswer:
        """Unload the model; if none is loaded nothing happens, and 0 GB are freed. Pinned models stay."""
        local = is_local(request.scope)
        check_admin(local=local, lan_admin=lan_admin)
        if body is not None and body.model is not None:
            check_unload(body.model, manager.snapshot, local=local)
        return UnloadAnswer(freed_vram_gb=await manager.unload() / 1e9)

    return router


def check_admin(*, local: bool, lan_admin: bool) -> None:
    """Check that a caller may load and unload models.

    Raises:
        AdminForbiddenError: the caller is on another machine, and the operator does not allow that.
    """
    if not local and not lan_admin:
        raise AdminForbiddenError(
            "only local callers may load and unload: those on this machine that call http://127.0.0.1 or "
            "http://localhost directly, or send the API key to it; start the server with --lan-admin to allow others"
        )


def listing_routes(*, manager: ModelManager, catalog: Catalog) -> APIRouter:
    router = APIRouter(prefix="/v1/models", tags=["inference"])

    async def list_cards(request: Request) -> tuple[list[ModelCard], str | None]:
        local = is_local(request.scope)
        found = await catalog.alisting()
        cards = [_card(entry, local=local) for entry in _with_loaded(found.entries, manager.snapshot)]
        return cards, found.problem if local or not found.problem else request.app.state.without_paths(found.problem)

    @router.get("", responses={200: {"links": {"model": FIRST_CARD}}})
    async def list_models(request: Request) -> ModelCards:
        """The models on this disk, as the chat format lists them."""
        cards, problem = await list_cards(request)
        return ModelCards(data=cards, problem=problem)

    @router.get("/{model:path}", responses=failures(ModelNotFoundError))
    async def get_model(model: str, request: Request) -> ModelCard:
        """One model on this disk, by its id."""
        for card in (await list_cards(request))[0]:
            if card.id == model:
                return card
        raise unknown_model(model, manager.snapshot, ANY_KIND)

    return router


def listing(catalog: Catalog, manager: ModelManager) -> ModelRecords:
    """Return what the admin routes and a notebook show of models and engines. Reads files; bounded in time."""
    return _records(catalog.listing(), manager)


async def alisting(catalog: Catalog, manager: ModelManager) -> ModelRecords:
    """Do the same as ``listing``, on an event loop."""
    found = await catalog.alisting()
    return await in_thread(lambda: _records(found, manager))


def _records(found: Listing, manager: ModelManager) -> ModelRecords:
    now = manager.snapshot
    # The stored speeds usually are on the same disk as the models.
    speeds = read_speeds(manager.settings) if found.problem is None else None
    rates = speeds.tokens_per_second if speeds is not None else {}
    return ModelRecords(
        models=records(found.entries, now),
        compute=compute(now),
        engines=[
            EngineRecord(name=name, version=version, tokens_per_second=rates.get(name))
            for name, version in versions().items()
        ],
        preference=_preference(speeds),
        problem=found.problem,
    )


def _preference(speeds: Speeds | None) -> Preference | None:
    if speeds is None:
        return None
    day = time.strftime("%Y-%m-%d", time.localtime(speeds.measured_at))
    return Preference(
        engine=speeds.preferred, model=speeds.model, measured_at=speeds.measured_at, detail=f"{speeds} (of {day})"
    )


def records(entries: Sequence[ModelEntry], now: EngineSnapshot) -> list[ModelRecord]:
    """Return the records of the models on disk, and of models in memory that were loaded from elsewhere."""
    in_memory = {pinned.entry.path: pinned.memory_bytes for pinned in now.pinned}
    pinned_paths = set(in_memory)
    if now.entry is not None:
        in_memory[now.entry.path] = now.model_memory_bytes
    problems = {format_: row.problem() for row in ENGINES.values() for format_ in row.formats}
    return [
        ModelRecord(
            id=entry.id,
            path=str(entry.path),
            loaded=entry.path in in_memory,
            vram_gb=in_memory[entry.path] / 1e9 if entry.path in in_memory else None,
            format=entry.format,
            engine=engine_for(entry.format).name,
            problem=problems[entry.format],
            kind=entry.kind,
            size_gb=entry.size_bytes / 1e9,
            quantization=entry.quantization,
            context_length=entry.context_length,
            pinned=entry.path in pinned_paths,
        )
        for entry in _with_loaded(entries, now)
    ]


def _with_loaded(entries: Sequence[ModelEntry], now: EngineSnapshot) -> list[ModelEntry]:
    """Return the models on disk, and those in memory that were loaded from elsewhere."""
    known = {entry.path for entry in entries}
    elsewhere = {entry.path: entry for entry in entries_in_memory(now) if entry.path not in known}
    return [*entries, *elsewhere.values()]


def compute(now: EngineSnapshot) -> Compute | None:
    """Return what the admin routes and a notebook show of the BLAS."""
    if now.blas is None:
        return None
    blas = now.blas
    return Compute(blas=blas.name, detail=blas.detail, threads=blas.threads, gflops=blas.gflops)


def _without_path(record: ModelRecord) -> ModelRecord:
    """Return the record for callers on other machines."""
    model = public_id(record.id, local=False)
    return record.model_copy(update={"id": model, "path": model})


def _card(entry: ModelEntry, *, local: bool) -> ModelCard:
    return ModelCard(id=public_id(entry.id, local=local), created=entry.modified_at)

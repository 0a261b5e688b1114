"""Routes that list, load and unload models: ``/admin/models`` and, for clients of the chat format, ``/v1/models``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

from fastapi import APIRouter, Depends, Query, Request

from lmx_lab.engine import ModelManager
from lmx_lab.engine.engines import ENGINES, engine_for
from lmx_lab.engine.lookup import (
    ANY_KIND,
    CHAT,
    public_id,
    public_unloading,
    refusal,
    unknown_model,
)
from lmx_lab.engine.lookup import find_model as find_in_memory
from lmx_lab.engine.speeds import Speeds, by_preference, preferred_engine, read_speeds, versions
from lmx_lab.errors import AdminForbiddenError, ModelBusyError, ModelNotFoundError, NotLoadedError, OutOfMemoryError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import BODY, failures, link
from lmx_lab.http.streaming import while_connected
from lmx_lab.server.openapi import LOAD_ERRORS
from lmx_lab.values.engine import EngineSnapshot, ModelState
from lmx_lab.values.models import (
    OPTIONS_OF_STAY,
    EngineName,
    Format,
    LoadReport,
    LoadSpec,
    ModelEntry,
    by_model,
)
from lmx_lab.values.plan import LoadPlan
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.scanner import Listing
from lmx_lab.weights.starters import loadable_formats
from lmx_lab.wire.admin import (
    CancelLoadAnswer,
    CancelLoadRequest,
    Compute,
    EngineRecord,
    KeepAnswer,
    KeepRequest,
    ModelCard,
    ModelCards,
    ModelRecord,
    ModelRecords,
    Preference,
    UnloadAnswer,
    UnloadRequest,
)
from lmx_lab.wire.base import ANY_MODEL

FIRST_CARD = link("inference_get_model", "Get one of the listed models.", model="$response.body#/data/0/id")
FIRST_RECORD = link("admin_load", "Load one of the listed models.", body={"model": "$response.body#/models/0/id"})
EPOCH_S = time.time() - time.perf_counter()
"""Adding it to a time of ``time.perf_counter`` gives seconds since 1970."""
LOADED = {
    "model": link("inference_get_model", "Get the loaded model.", model="$response.body#/model"),
    "unload": link("admin_unload", "Unload the model again.", body={"model": "$response.body#/model"}),
}


def planned_spec(**options: Any) -> LoadSpec:
    """Return the load that the parameters of a URL describe. They are the fields of ``LoadSpec``."""
    return LoadSpec(**options)


_TYPES = get_type_hints(LoadSpec, include_extras=True)
planned_spec.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if each.default is MISSING else each.default,
            # A URL has at most 64 KiB, and a character of a name up to 12 bytes in it.
            annotation=Annotated[_TYPES[each.name], Query(max_length=1024)]
            if each.name in ("model", "draft")
            else _TYPES[each.name],
        )
        for each in fields(LoadSpec)
        if each.name not in OPTIONS_OF_STAY
    ]
)


def admin_routes(manager: ModelManager) -> APIRouter:
    """Return the router of ``/admin/models`` and the routes below it."""
    router = APIRouter(prefix="/admin", tags=["admin"], route_class=StrictRoute)

    @router.get("/models", responses={200: {"links": {"load": FIRST_RECORD}}})
    async def models(request: Request) -> ModelRecords:
        """List the models on this disk, whether each is loaded, and the engines that run them. Only local callers see
        paths; for other callers, the `path` of a model is its id.
        """
        records = await model_records(manager)
        if is_local(request.scope):
            return records
        hide: Callable[[str], str] = request.app.state.without_paths
        compute, problem = records.compute, records.problem
        models = []
        for record in records.models:
            model = public_id(record.id, local=False)
            unloading = record.unloading and public_unloading(record.unloading)
            models.append(record.model_copy(update={"id": model, "path": model, "unloading": unloading}))
        return records.model_copy(
            update={
                "models": models,
                "compute": compute and compute.model_copy(update={"detail": hide(compute.detail)}),
                "problem": problem and hide(problem),
                "in_use": None,
            }
        )

    @router.get("/models/plan", responses=LOAD_ERRORS)
    async def plan(request: Request, spec: Annotated[LoadSpec, Depends(planned_spec)]) -> LoadPlan:
        """Return what a load with these options would use in memory, and whether it fits now, after models in memory
        were unloaded, or not at all. Only headers of files are read, and nothing is loaded. Local callers may send a
        path, or a model of the hub, whose headers are read without a download.
        """
        local = is_local(request.scope)
        check_admin(manager, local=local)
        found = await manager.plan(spec, local=local)
        ids = [public_id(each, local=local) for each in (found.model, *found.unload)]
        return replace(found, model=ids[0], unload=tuple(ids[1:]))

    @router.post("/models/load", responses={200: {"links": LOADED}, **LOAD_ERRORS})
    async def load(body: LoadSpec, request: Request) -> LoadReport:
        """Load a model, and answer when it is ready. It becomes the main model, which answers requests that name none.
        Local callers may send a path. An encoder with `pin` is loaded next to the main model instead, if it fits.

        The new main model replaces the loaded one. A server that keeps several models in memory (`LMX_LAB_RESIDENT`)
        unloads the one that was used least recently, if there would be more, or if memory is short. Pinned models stay.
        Running answers of a replaced model have 30 s to end (`LMX_LAB_DRAIN_S`). With `wait` they have no time limit
        (`true`), or end immediately (`false`).
        """
        local = is_local(request.scope)
        check_admin(manager, local=local)
        # A client that disconnects no longer waits for the load, which continues.
        return await while_connected(request, manager.load(body, local=local))

    @router.post("/models/unload", responses=LOAD_ERRORS)
    async def unload(request: Request, body: UnloadRequest | None = None) -> UnloadAnswer:
        """Unload a model, by default the main one. If none is loaded, nothing happens and 0 GB are freed. Pinned models
        stay in memory.

        Running answers have 30 s to end (`LMX_LAB_DRAIN_S`). With `wait` they have no time limit (`true`), or end at
        once (`false`). The unload continues if the client disconnects, and further requests join it. While a model is
        being loaded, its load is cancelled instead, and the previous model is loaded again. To change only how long the
        load waits for answers of the previous model, send the name of that model and `wait`.
        """
        local = is_local(request.scope)
        check_admin(manager, local=local)
        model, wait = (body.model, body.wait) if body is not None else (None, None)
        return UnloadAnswer(freed_vram_gb=await manager.unload(model, local=local, wait=wait) / 1e9)

    @router.post("/models/keep", responses=failures(*BODY, AdminForbiddenError))
    async def keep(body: KeepRequest, request: Request) -> KeepAnswer:
        """Change how long a model stays in memory. A pinned model stays until it is unloaded by request: no other load
        replaces it, and it is loaded again if its engine loses it. Other models are unloaded after `ttl_s` seconds
        without requests.
        """
        local = is_local(request.scope)
        check_admin(manager, local=local)
        state = await manager.keep(body.model, pin=body.pin, ttl_s=body.ttl_s, local=local)
        return KeepAnswer(model=public_id(state.entry.id, local=local), pinned=state.pinned, ttl_s=state.ttl_s)

    @router.post("/models/cancel", responses=failures(*BODY, AdminForbiddenError, ModelBusyError))
    async def cancel(body: CancelLoadRequest, request: Request) -> CancelLoadAnswer:
        """Cancel the load of a model, and load the previous model again.

        The response does not wait for this; the requests that wait for the load get an error when it is done. If the
        model is not being loaded, for example because its load has just ended, the request is refused and nothing is
        unloaded. With `"shared": false`, it is also refused if several callers wait for the load.
        """
        check_admin(manager, local=is_local(request.scope))
        await manager.cancel_load(body.model, shared=body.shared)
        return CancelLoadAnswer()

    return router


def check_admin(manager: ModelManager, *, local: bool) -> None:
    """Check that a caller may load and unload models.

    Raises:
        AdminForbiddenError: the caller is on another machine, and the server was started without ``--lan-admin``.
    """
    if not local and not manager.settings.lan_admin:
        raise AdminForbiddenError(
            "only local callers may load and unload models: programs on this machine that call http://127.0.0.1 or "
            "http://localhost directly or send the API key; start the server with --lan-admin to allow other callers"
        )


def listing_routes(manager: ModelManager) -> APIRouter:
    """Return the router of ``/v1/models``."""
    router = APIRouter(prefix="/v1/models", tags=["inference"])

    # The path of a model would match an empty id.
    @router.get("/", response_model=ModelCards, include_in_schema=False)
    @router.get("", responses={200: {"links": {"model": FIRST_CARD}}})
    async def list_models(request: Request) -> ModelCards:
        """List the models on this disk in the chat format, and the aliases of models."""
        return await model_cards(manager, request)

    @router.get("/{model:path}", responses=failures(ModelNotFoundError, NotLoadedError, OutOfMemoryError))
    async def get_model(model: str, request: Request) -> ModelCard:
        """Get one model on this disk by its id or by an alias; `default` is the loaded model."""
        return await _named_card(model, manager, local=is_local(request.scope))

    return router


async def model_cards(manager: ModelManager, request: Request) -> ModelCards:
    """Return the cards of the models on this disk, and of the aliases of models."""
    local, names = is_local(request.scope), manager.settings.ids_by_alias
    found, problem = await listed_models(manager)
    problem = problem if local or not problem else request.app.state.without_paths(problem)
    aliases = []
    for name in names:
        with suppress(ModelNotFoundError):
            aliases.append(await _named_card(name, manager, local=local))
    cards = [_card(model, manager.snapshot, local=local) for model in found]
    # An alias has priority over a model whose id is the same.
    return ModelCards(data=[*(card for card in cards if card.id not in names), *aliases], problem=problem)


async def _named_card(name: str, manager: ModelManager, *, local: bool) -> ModelCard:
    """Return the card of a model, also for ``ANY_MODEL`` and for a name in ``Settings.model_aliases``."""
    names = manager.settings.ids_by_alias
    is_alias, id_ = name == ANY_MODEL or name in names, names.get(name, name)
    if name == ANY_MODEL:
        # The model that answers requests for this name: a chat model, otherwise an encoder.
        entry = find_in_memory(manager.snapshot.entries, None, ANY_KIND)
        if entry is None:
            raise refusal(manager.snapshot, None, CHAT)
        id_ = entry.id
    # An alias may stand for a path, because the path does not come from the caller.
    listed = await find_model(id_, manager, local=local or is_alias)
    card = _card(listed, manager.snapshot, local=local)
    return card.model_copy(update={"id": name, "root": card.id}) if is_alias else card


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    """A model in a list."""

    entry: ModelEntry
    """The loaded format, otherwise the format that is loaded by default."""
    entries: Sequence[ModelEntry]
    """All formats on the disk, the one that is loaded by default first."""

    @property
    def formats(self) -> list[Format]:
        """All formats in which the model can be loaded."""
        return list(dict.fromkeys(format_ for entry in self.entries for format_ in loadable_formats(entry)))

    def has_alias(self, name: str) -> bool:
        """Whether the name is an alias of the model in one of its formats."""
        return any(entry.has_alias(name) for entry in self.entries)

    def state(self, now: EngineSnapshot) -> ModelState | None:
        """Return the state of the model in memory; None if it is not loaded."""
        return next((state for state in now.models if state.entry.path == self.entry.path), None)


async def listed_models(manager: ModelManager) -> tuple[list[ListedModel], str | None]:
    """Return the models on this disk and in memory, and why the list may be incomplete; None if it is not."""
    listing = await manager.catalog.alisting()
    return await in_thread(lambda: _models(listing, manager, _speeds(listing, manager))), listing.problem


async def find_model(name: str, manager: ModelManager, *, local: bool) -> ListedModel:
    """Return the model with this id or name, on this disk or in memory.

    Raises:
        ModelNotFoundError: there is no such model.
    """
    models = (await listed_models(manager))[0]
    exact = [listed for listed in models if public_id(listed.entry.id, local=local) == name]
    if found := exact or [listed for listed in models if listed.has_alias(name)]:
        return found[0]
    raise unknown_model(name, manager.snapshot, ANY_KIND)


async def model_records(manager: ModelManager) -> ModelRecords:
    """Return the models and engines of this server, for ``/admin/models`` and for the notebook.

    The scan of the disk takes a bounded time; see ``Catalog.listing``.
    """
    listing = await manager.catalog.alisting()
    records = await in_thread(lambda: _describe(listing, manager))
    by_path = {str(entry.path): entry for entry in listing.entries}
    unloaded = [by_path[it.path] for it in records.models if not it.loaded and it.path in by_path]
    fits = {str(path): fit for path, fit in (await manager.fits.read(unloaded, manager.snapshot)).items()}
    models = [record.model_copy(update={"fits": fits.get(record.path)}) for record in records.models]
    return records.model_copy(update={"models": models})


def _describe(listing: Listing, manager: ModelManager) -> ModelRecords:
    now, speeds = manager.snapshot, _speeds(listing, manager)
    blas, preference = now.blas, None
    rates: Mapping[EngineName, float] = speeds.tokens_per_second if speeds is not None else {}
    if speeds is not None:
        day = time.strftime("%Y-%m-%d", time.localtime(speeds.measured_at))
        preference = Preference(
            engine=speeds.preferred, model=speeds.model, measured_at=speeds.measured_at, detail=f"{speeds} (of {day})"
        )
    in_memory = {model.entry.path: model for model in now.models}
    problems = {format_: row.problem() for row in ENGINES.values() for format_ in row.formats}
    models = [
        ModelRecord(
            id=entry.id,
            path=str(entry.path),
            loaded=state is not None,
            vram_gb=state.memory_bytes / 1e9 if state is not None else None,
            format=entry.format,
            formats=model.formats,
            source=entry.source,
            engine_reason=entry.engine_reason if state is not None else "",
            engine=engine_for(entry.format).name,
            problem=problems[entry.format],
            warning=(entry if state is None else state.entry).warning,
            kind=entry.kind,
            size_gb=entry.size_bytes / 1e9,
            quantization=entry.quantization,
            quantized_copy=entry.copy,
            quantized_copies=[each.copy for each in model.entries if each.copy is not None],
            context_length=entry.context_length,
            loaded_context_length=loaded_context_length(state, now),
            slots=state.slots if state is not None else None,
            main=state is not None and state is now.main,
            pinned=state is not None and state.pinned,
            ttl_s=state.ttl_s if state is not None else None,
            idle_since=EPOCH_S + state.idle_since if state is not None and state.idle_since is not None else None,
            unloading=state.unloading if state is not None else None,
        )
        for model in _models(listing, manager, speeds)
        for entry in [model.entry]
        for state in [in_memory.get(entry.path)]
    ]
    return ModelRecords(
        models=models,
        # Not known before MLX's engine has started.
        compute=blas and Compute(blas=blas.name, detail=blas.detail, threads=blas.threads, gflops=blas.gflops),
        engines=[
            EngineRecord(name=name, version=version, tokens_per_second=rates.get(name))
            for name, version in versions().items()
        ],
        preference=preference,
        problem=listing.problem,
        in_use={str(path): model for path, model in manager.in_use.items()},
    )


def _speeds(listing: Listing, manager: ModelManager) -> Speeds | None:
    # The stored speeds are usually on the same disk as the models, which may not respond.
    return read_speeds(manager.settings) if listing.problem is None else None


def _models(listing: Listing, manager: ModelManager, speeds: Speeds | None) -> list[ListedModel]:
    """Return the listed models, and models in memory that are not in the list."""
    preferred = preferred_engine(speeds)
    in_memory = {entry.path: entry for entry in manager.snapshot.entries}
    known = {entry.path for entry in listing.entries}
    # Models that were loaded by path are not in the list.
    elsewhere = [entry for entry in in_memory.values() if entry.path not in known]
    models = []
    for found in by_model([*listing.entries, *elsewhere]).values():
        entries = by_preference(found, preferred)
        entry = next((in_memory[entry.path] for entry in entries if entry.path in in_memory), entries[0])
        models.append(ListedModel(entry=entry, entries=entries))
    return models


def _card(model: ListedModel, now: EngineSnapshot, *, local: bool) -> ModelCard:
    entry, state = model.entry, model.state(now)
    return ModelCard(
        id=public_id(entry.id, local=local),
        created=entry.modified_at,
        format=entry.format,
        formats=model.formats,
        context_length=loaded_context_length(state, now) or entry.context_length,
        slots=state.slots if state is not None else None,
    )


def loaded_context_length(state: ModelState | None, now: EngineSnapshot) -> int | None:
    """Return the context length of a model in memory, but not that of an encoder that is pinned next to another one."""
    if state is None or (state.pinned and state.entry.kind != "chat" and state is not now.main):
        return None
    return state.context_length

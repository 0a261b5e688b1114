"""Plan a load: what a model would use in memory, by the headers of its files, and whether there is room for it."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from lmx_lab.engine.engines import Engines, choose_engine, engine_for, share_memory
from lmx_lab.engine.find import ModelFinder, choose_format, with_draft
from lmx_lab.engine.speeds import gpu_of_mlx, memory_bandwidth
from lmx_lab.errors import DownloadError, LabError, ModelNotFoundError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot, ModelState
from lmx_lab.values.models import EngineName, LoadSpec, ModelEntry
from lmx_lab.values.plan import Fit, LoadPlan, find_room
from lmx_lab.weights.files import in_thread

MLX_ENGINE = "lmx_lab.engine.mlx.engine"


async def plan_load(
    spec: LoadSpec,
    *,
    finder: ModelFinder,
    engines: Engines,
    now: EngineSnapshot,
    local: bool,
) -> LoadPlan:
    """Return what a load would use in memory, and whether there is room for it. Nothing is downloaded, and no weights
    are read: of a model that is only on the hub, the headers are read.

    Args:
        now: The models in memory.
        local: Whether the caller is on this machine, and may name paths and models of the hub.

    Raises:
        ModelNotFoundError: the model is neither on disk nor on the hub, or the hub cannot be reached.
        UnusableModelError: its files cannot be used, or no engine that is installed here runs it with these options.
        NotLoadedError: the disk does not answer.
    """
    settings = finder.settings
    with ExitStack() as headers:
        find = functools.partial(_find, finder=finder, now=now, local=local, headers=headers)
        entry, on_disk = await find(spec)
        row = choose_engine(entry, spec)
        if (problem := row.problem()) is not None:
            raise UnusableModelError(problem, param="model")

        async def find_draft(wanted: LoadSpec) -> ModelEntry:
            draft, _ = await find(wanted)
            choose_engine(draft, wanted)
            return draft

        entry = await with_draft(entry, spec, find_draft)
        chosen = await in_thread(lambda: engines.get(row.name))
        beside = _models_beside(entry, engines, now)
        limit_bytes = chosen.memory.limit
        pinned_bytes = sum(model.memory_bytes for model in beside if model.pinned)
        plan = await chosen.plan(entry, spec, room_bytes=limit_bytes - pinned_bytes)
    resident, unpinned = settings.resident, sum(not model.pinned for model in beside)
    surplus = 0 if resident == "auto" else max(0, unpinned + 1 - resident)
    fits, unload = find_room(plan.needed_bytes, limit_bytes, beside, surplus=surplus)
    speed = None
    if plan.read_bytes:
        speed = await in_thread(lambda: _bandwidth(settings, row.name)) / plan.read_bytes
    found = replace(plan, on_disk=on_disk, limit_bytes=limit_bytes, fits=fits, unload=unload, tokens_per_second=speed)
    return found if chosen.memory.is_of_device else replace(found, memory_pressure=now.memory_pressure)


async def _find(
    spec: LoadSpec, *, finder: ModelFinder, now: EngineSnapshot, local: bool, headers: ExitStack
) -> tuple[ModelEntry, bool]:
    """Return the files that a load would use, and whether they are on the disk. Others are opened within ``headers``,
    if they are on the hub.
    """
    name = spec.model
    try:
        entries = await finder.formats(spec, local=local)
    except (ModelNotFoundError, UnusableModelError):
        if not (local and finder.settings.downloads and finder.catalog.can_fetch(name)):
            raise
        try:
            opened = finder.catalog.open_headers(name)
            return await in_thread(lambda: headers.enter_context(opened), name="lmx-lab-hub"), False
        except DownloadError as exc:
            raise ModelNotFoundError(f"{name} is not on disk: {exc.message}", param="model") from exc
    # If none has the format for the required engine, the engine refuses the first one.
    loaded = [model.entry for model in now.models]
    return choose_format(entries, spec, await finder.preferred(spec), loaded) or entries[0], True


class FitList:
    """Finds out which of the models on the disk fit. The memory that each of them needs is kept while its files do not
    change, because it takes up to a second to read.
    """

    def __init__(self, engines: Engines, *, limit_s: float = 0.5) -> None:
        self._engines = engines
        self._limit_s = limit_s
        self._needed: dict[tuple[Path, int, int], int | None] = {}
        """Memory by path, time and size of a model; None for a model that cannot be loaded."""

    async def read(self, entries: Sequence[ModelEntry], now: EngineSnapshot) -> dict[Path, Fit]:
        """Return whether models fit, by path. Those that are not read within ``limit_s`` are left out; the next call
        continues.

        Models of MLX are left out until MLX is imported for another reason, because that takes seconds.
        """
        until, found = time.monotonic() + self._limit_s, dict[Path, Fit]()
        rows = {engine_for(entry.format) for entry in entries}
        usable = {
            row.name for row in rows if row.problem() is None and (row.name != "mlx" or MLX_ENGINE in sys.modules)
        }
        await in_thread(lambda: [self._engines.get(name) for name in usable])
        for entry in entries:
            if engine_for(entry.format).name not in usable:
                continue
            engine, key = self._engines.of(entry), (entry.path, entry.modified_at, entry.size_bytes)
            limit_bytes = engine.memory.limit
            if key not in self._needed:
                if time.monotonic() >= until:
                    continue
                try:
                    plan = await engine.plan(entry, LoadSpec(model=entry.id), room_bytes=limit_bytes)
                    self._needed[key] = plan.needed_bytes
                except LabError:
                    self._needed[key] = None
            if (needed := self._needed[key]) is not None:
                found[entry.path], _ = find_room(needed, limit_bytes, _models_beside(entry, self._engines, now))
        return found


def _models_beside(entry: ModelEntry, engines: Engines, now: EngineSnapshot) -> list[ModelState]:
    """Return the models in the same memory, without the model itself, which a load replaces."""
    engine, others = engines.of(entry), [model for model in now.models if not is_same(model.entry, entry)]
    return [model for model in others if share_memory(engine, engines.of(model.entry))]


def is_same(entry: ModelEntry, other: ModelEntry) -> bool:
    """Return whether two models cannot be in memory together, because requests could not tell them apart."""
    return entry.path == other.path or entry.id == other.id


def _bandwidth(settings: Settings, engine: EngineName) -> float:
    """Return the memory bandwidth of the device on which an engine computes; see ``memory_bandwidth``."""
    if engine != "mlx" or (gpu := gpu_of_mlx()) is None:
        return memory_bandwidth(settings)
    # Imported here, because MLX is slow to import.
    from lmx_lab.engine.mlx.memory import measure_bandwidth

    return memory_bandwidth(settings, gpu, measure_bandwidth)

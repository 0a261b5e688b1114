"""The models panel: the server, the models on its disk and in memory, and buttons that load and unload them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import html
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

import traitlets

from lmx_lab.backend import Backend
from lmx_lab.errors import (
    HostingError,
    InvalidRequestError,
    LabError,
    ModelBusyError,
    counted,
    first_names,
    format_bytes,
)
from lmx_lab.panels.panel import Panel, bool_field, text_field
from lmx_lab.panels.summary import MODEL_COLUMNS, describe_server, format_context, model_row
from lmx_lab.panels.workbench import Workbench
from lmx_lab.results.tables import UNBROKEN, html_table
from lmx_lab.values.models import (
    EngineChoice,
    EngineName,
    Format,
    KvCacheDtype,
    LoadOptions,
    ModelEvent,
    Stored,
    Unloading,
    with_reason,
)
from lmx_lab.wire.admin import KeepRequest, ModelRecord, Preference, RequestEvent, Sample, load_spec
from lmx_lab.wire.errors import validated

log = logging.getLogger(__name__)
MAX_ROWS = 500
NAMED_FILES = 8
"""Maximum number of files that the question before a deletion names."""
STAGES = {
    "begin": "looking for its files",
    "download": "downloading",
    "verify": "checking the download",
    "convert": "converting",
    "store": "storing",
    "load": "loading",
    "unload": "unloading",
}
IN_ENGINE = ("load", "unload")
TIMES_TO_LIVE_S = (60, 300, 900, 3600)
"""Times to live of a model that a view offers."""
ENGINES: Mapping[Format, EngineName] = {"mlx": "mlx", "gguf": "llama.cpp"}
"""The engine that runs models of a format, for formats whose engine can be chosen."""


@dataclass(frozen=True, kw_only=True)
class ModelJob:
    """A running load or unload."""

    model: str
    stage: str = "begin"
    done_bytes: int | None = None
    total_bytes: int | None = None
    updated_at: float = field(default_factory=time.monotonic)

    def row(self, *, unloading: Unloading | None) -> dict[str, Any]:
        """Return the job as a view shows it.

        Args:
            unloading: The state of a model in memory that has to be unloaded first; None if there is none.
        """
        text = STAGES[self.stage]
        if self.stage in IN_ENGINE and unloading is not None:
            text = f"waiting for running answers ({unloading.answers_left})"
        detail = "" if self.done_bytes is None else format_bytes(self.done_bytes)
        if self.done_bytes is not None and self.total_bytes:
            detail += f" of {format_bytes(self.total_bytes)}"
        fraction = self.done_bytes / self.total_bytes if self.done_bytes is not None and self.total_bytes else None
        return {
            "id": self.model,
            "text": text,
            "detail": detail,
            "fraction": None if fraction is None else min(fraction, 1.0),
            "actions": ["Cancel"] if self.stage != "unload" else [],
        }


class ModelsPanel(Panel):
    """Shows the models on disk and in memory, with buttons that load and unload them. ``compact`` folds the list."""

    SCRIPTS = ("elements.js", "panel.js", "models.js")
    STYLES = ("panel.css", "models.css")

    compact = traitlets.Bool(False).tag(sync=True)
    rows: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """``{id, cells, action, engines}`` of each model: the cells after the first column, the label of the button, which
    is empty if there is no button, and the engines that can run it."""
    resident: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """``{id, main, pinned, leaving, memory, fraction, engine, idle, ttl, ttls, warning}`` of each model in memory.
    ``leaving`` is true while it is being unloaded; ``fraction`` is its share of the machine's memory, 0 to 1, or None;
    ``engine`` is its engine and why that was chosen; ``ttl`` is its time to live, and ``ttls`` are pairs of those that
    can be chosen and their texts; ``warning`` may be empty."""
    choices: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    """The values of load options: ``engine`` for models that are not in the list, and ``kv_cache_dtype``."""
    caption = traitlets.Unicode().tag(sync=True)
    engines = traitlets.Unicode().tag(sync=True)
    """The faster engine on this machine, and why models of an engine cannot be loaded; empty if neither is known."""
    jobs: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """Running loads and unloads: ``{id, text, detail, fraction, actions}``. ``fraction`` is 0 to 1, or None; the
    actions are labels of buttons."""
    storage: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    """What takes space on the disk, as ``{rows, note}``; empty until it was requested. Each row is
    ``{id, cells, remedy, question}``: the cells after the name; how to remove it elsewhere, if this package does not
    remove it; and otherwise the question that the user must confirm."""
    pressure = traitlets.Unicode().tag(sync=True)
    """Why memory is short, and how much was freed; empty if it is not short."""
    error = traitlets.Unicode().tag(sync=True)
    """The message of the last failure, until it is dismissed or another job is started."""
    error_field = traitlets.Unicode().tag(sync=True)
    """The load option that has caused this failure; empty if none has."""

    def __init__(self, workbench: Workbench, **traits: Any) -> None:
        self._records: tuple[ModelRecord, ...] = ()
        self._is_listed = False
        """Whether ``_records`` have been read from the server, which happens after the panel was created."""
        self._preference: Preference | None = None
        self._installed: frozenset[str] = frozenset()
        """The names of the engines that the server can use."""
        self._problem: str | None = None
        """Why the list may be incomplete."""
        self._idle_since: dict[str, float] = {}
        """When the last request of each model in memory has ended, in seconds since 1970, if none was running then."""
        self._sample: Sample | None = None
        self._unloading: dict[str, tuple[Unloading, float]] = {}
        """The last known state of each model that waits for its running answers, and its time (``time.monotonic``)."""
        self._jobs: dict[str, ModelJob] = {}
        """Jobs of other clients."""
        self._own: ModelJob | None = None
        """The load or unload that was requested in this panel."""
        self._cancelled = False
        """Whether that job was cancelled in this panel."""
        self._scan: asyncio.Task[None] | None = None
        self._is_stale = True
        self._storage_task: asyncio.Task[None] | None = None
        """Lists what takes space on the disk, or deletes some of it and then lists the rest."""
        self._stored: Mapping[str, Stored] = {}
        """What takes space on the disk, by the questions that must be confirmed before it is deleted."""
        self._shown_server: Mapping[str, Any] = {}
        super().__init__(workbench, **traits)

    # Called by the workbench

    def tick(self, backend: Backend, sample: Sample | None) -> None:
        super().tick(backend, sample)
        self._sample, now = sample or self._sample, time.monotonic()
        stopped = not self.serves
        if (pressure := self._pressure()) != self.shown("pressure"):
            self.show(pressure=pressure)
        for job in list(self._jobs.values()):
            # Another client's download without an event has ended, or its model has received another name.
            if stopped or (job.stage not in IN_ENGINE and now - job.updated_at > 30):
                del self._jobs[job.model]
        self._show_jobs()
        server = self.shown("server")
        before, self._shown_server = self._shown_server, server
        is_changed = any(before.get(name) != server[name] for name in ("state", "model", "others", "kept"))
        if is_changed or (before.get("unloading") is None) != (server["unloading"] is None):
            self._show_rows()
            # If a model is unloaded because it is idle, or for lack of memory, there may be no event.
            if before and any(before[name] != server[name] for name in ("model", "others", "kept")):
                self._refresh_soon()

    def model_event(self, event: ModelEvent) -> None:
        if event.unloading is not None:
            is_new = event.model not in self._unloading
            self._unloading[event.model] = event.unloading, time.monotonic()
            if is_new:
                self._show_rows()
                self._refresh_soon()
        elif event.stage in ("loaded", "unloaded", "failed"):
            self._jobs.pop(event.model, None)
            self._unloading.pop(event.model, None)
            if event.stage == "unloaded" and event.message:
                self.show(error=f"{event.model} was unloaded: {event.message}")
            self._refresh_soon()
        elif (own := self._own) is not None and (
            event.model == own.model
            # In the engine a model has its id, which may differ from the requested name.
            or (event.stage == "load" and own.stage not in IN_ENGINE and event.model not in self._jobs)
        ):
            self._own = _updated(own, event)
        elif event.model in self._jobs or len(self._jobs) < 8:
            self._jobs[event.model] = _updated(ModelJob(model=event.model), event)
        self._show_jobs()

    def request_ended(self, event: RequestEvent) -> None:
        self._idle_since[event.model] = time.time()

    def backend_changed(self) -> None:
        if self.task is not None:
            self.task.cancel()
        self.task, self._own, self._cancelled, self._records, self._is_listed = None, None, False, (), False
        self._preference = self._problem = None
        self._storage_task, self._stored = None, {}
        self._sample = None
        self._idle_since.clear()
        self._unloading.clear()
        self._jobs.clear()
        self.show(error="", error_field="", storage={})
        self._show_jobs()
        self._show_rows()
        self._refresh_soon()

    # Requests

    async def do_refresh(self, fields: Mapping[str, Any]) -> None:
        await asyncio.shield(self._refresh_soon())

    async def do_load(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Start a load; ``jobs``, ``rows`` and ``error`` show its progress and result. The optional field ``options``
        contains those of ``lab.load``."""
        name = text_field(fields, "model").strip()
        options = fields.get("options") or {}
        if not isinstance(options, dict):
            raise InvalidRequestError(f"options is {options!r:.40}; it must be an object", param="options")
        spec = load_spec(name, cast(LoadOptions, options))
        self._check_free()
        backend = self.workbench.backend

        async def load() -> None:
            try:
                await backend.load(spec)
            except LabError as exc:
                if exc.param in options:
                    self.show(error_field=exc.param)
                raise

        self._start(ModelJob(model=name), load())
        return {"model": name}

    async def do_unload(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Start to unload a model, or change how long the running unload waits. Does nothing if it is no longer
        loaded, or no longer waits.
        """
        name, backend = text_field(fields, "model"), self.workbench.backend
        if fields.get("wait") is None:
            if self._own is None or (self._own.model, self._own.stage) != (name, "unload"):
                self._check_free()
                state = backend.state()
                if name in (state.model, *state.others):
                    self._start(ModelJob(model=name, stage="unload"), backend.unload(name))
            return {"model": name}
        wait = bool_field(fields, "wait")

        async def change_wait() -> None:
            try:
                await backend.unload(name, wait=wait)
            except LabError as exc:
                if backend is self.workbench.backend:
                    self.show(error=f"{name} was not unloaded: {exc.message}")

        if name in self._unloadings():
            self.workbench.create_task(change_wait(), f"wait for {name:.60}")
        return {"model": name}

    async def do_keep(self, fields: Mapping[str, Any]) -> None:
        """Change how long a model stays in memory; the fields are those of ``KeepRequest``."""
        request = validated(KeepRequest, {name: fields.get(name) for name in ("model", "pin", "ttl_s")})
        answer = await self.workbench.backend.keep(request.model, pin=request.pin, ttl_s=request.ttl_s)
        changed = {"pinned": answer.pinned, "ttl_s": answer.ttl_s}
        self._records = tuple(it.model_copy(update=changed) if it.id == answer.model else it for it in self._records)
        self._show_rows()
        # A scan that is in progress may have read the previous values, so another one follows it.
        self._is_stale = True

    async def do_cancel(self, fields: Mapping[str, Any]) -> None:
        """Cancel a load. The previous model is loaded again."""
        name = text_field(fields, "model")
        own = self._own is not None and self._own.model == name
        self._cancelled = self._cancelled or own
        try:
            await self.workbench.backend.cancel_load(name)
        except LabError:
            self._cancelled = self._cancelled and not own
            raise

    async def do_storage(self, fields: Mapping[str, Any]) -> None:
        """Start to list what takes space on the disk, unless this is in progress; ``storage`` shows the result."""
        if self._storage_task is None or self._storage_task.done():
            self._storage_task = self.workbench.create_task(self._list_storage(), "list what is stored")

    async def do_remove(self, fields: Mapping[str, Any]) -> None:
        """Start to delete something from the disk; ``storage`` and ``error`` show the result.

        The field ``question`` is that of the row, which names the files and their size, and which the user has
        confirmed.
        """
        question, backend = text_field(fields, "question", limit=100_000), self.workbench.backend
        item = self._stored.get(question)
        if item is None:
            raise InvalidRequestError("this has changed since it was listed; refresh the list", param="question")

        async def remove() -> None:
            error = ""
            try:
                await backend.remove_stored(item)
            except (LabError, OSError) as exc:
                error = f"{item.name} was not deleted: {exc}"
            if backend is self.workbench.backend:
                self.show(error=error, error_field="")
                self._refresh_soon()
                await self._list_storage()

        self._show_storage(f"Deleting {item.name} …")
        self._storage_task = self.workbench.create_task(remove(), f"delete {item.name:.60}")

    async def do_dismiss(self, fields: Mapping[str, Any]) -> None:
        self.show(error="", error_field="")

    def _check_free(self) -> None:
        if not self.serves:
            raise HostingError(f"the server is {self.shown('server')['state']}; run the launch cell again")
        if self._own is not None:
            doing = "unloaded" if self._own.stage == "unload" else "loaded"
            raise ModelBusyError(f"{self._own.model} is being {doing}; try again when that is done", retry_after_s=2)

    def _start(self, job: ModelJob, work: Coroutine[Any, Any, Any]) -> None:
        def ended(error: str | None) -> None:
            self._own = None
            if error and not self._cancelled:
                self.show(error=f"{job.model} was not {'unloaded' if job.stage == 'unload' else 'loaded'}: {error}")
            self._show_jobs()
            self._refresh_soon()

        self._own, self._cancelled = job, False
        self.run_job(work, ended)
        self.show(error="", error_field="")
        self._show_jobs()

    # The list

    def _refresh_soon(self) -> asyncio.Task[None]:
        """Start to list the models. If a scan is running, another one follows it, because the first may have started
        too early to see the latest change."""
        self._is_stale = True
        if self._scan is None or self._scan.done():
            self._scan = self.workbench.create_task(self._scan_while_stale(), "list the models")
            self._scan.add_done_callback(_log_failure)
        return self._scan

    async def _scan_while_stale(self) -> None:
        while self._is_stale:
            self._is_stale = False
            backend = self.workbench.backend
            found = await backend.models()
            if backend is self.workbench.backend:
                self._records, self._preference, self._is_listed = tuple(found.models), found.preference, True
                self._installed = frozenset(engine.name for engine in found.engines if engine.version is not None)
                self._problem = found.problem
                now = time.monotonic()
                self._idle_since = {it.id: it.idle_since for it in found.models if it.idle_since is not None}
                self._unloading = {it.id: (it.unloading, now) for it in found.models if it.unloading is not None}
                self._show_rows()

    def _show_rows(self) -> None:
        now = {
            "rows": list(self._rows()),
            "resident": self._resident(),
            "caption": self._caption(),
            "engines": self._engines(),
            "choices": {
                "engine": [name for name in get_args(EngineChoice) if name in self._installed],
                "kv_cache_dtype": list(get_args(KvCacheDtype)),
            },
        }
        if any(self.shown(name) != value for name, value in now.items()):
            self.show(**now)

    def _rows(self) -> Iterable[dict[str, Any]]:
        unloading = self._unloadings()
        for record in self._records[:MAX_ROWS]:
            engines = dict.fromkeys(ENGINES[each] for each in record.formats or [record.format] if each in ENGINES)
            row = model_row(record, serves=self.serves, unloading=record.id in unloading)
            yield {**row, "engines": [engine for engine in engines if engine in self._installed]}

    def _resident(self) -> list[dict[str, Any]]:
        if not self.serves:
            return []
        loaded = [record for record in self._records if record.loaded]
        server, sample, unloading, own = self.shown("server"), self._sample, self._unloadings(), self._own
        is_busy = sample is not None and sample.active_requests > 0
        rows = []
        for record in sorted(loaded, key=lambda record: (record.id != server["model"], record.id)):
            memory_gb, total_gb = record.vram_gb or 0.0, sample.memory_total_gb if sample is not None else 0.0
            memory = format_bytes(memory_gb * 1e9)
            # With several models in memory, it is not known whose requests are running.
            since = None if is_busy and len(loaded) == 1 else self._idle_since.get(record.id)
            idle = "answering" if since is None and is_busy else ""
            if since is not None:
                idle_s = time.time() - since
                idle = "idle" if idle_s < 60 else f"idle for {_duration(60 * (idle_s // 60))}"
            ttls = sorted({*TIMES_TO_LIVE_S, *([record.ttl_s] if record.ttl_s is not None else [])})
            rows.append(
                {
                    "id": record.id,
                    "main": record.id == server["model"],
                    "pinned": record.pinned,
                    "leaving": record.id in unloading or (own is not None and own.model == record.id),
                    "memory": f"{memory} of {format_bytes(total_gb * 1e9)}" if total_gb else memory,
                    "fraction": min(memory_gb / total_gb, 1.0) if total_gb else None,
                    "engine": _describe_engine(record),
                    "idle": idle,
                    "ttl": "never" if record.ttl_s is None else f"{record.ttl_s:.10g}",
                    "ttls": [["never", "never"], *([f"{ttl_s:.10g}", _duration(ttl_s)] for ttl_s in ttls)],
                    "warning": record.warning,
                }
            )
        return rows

    def _unloadings(self) -> dict[str, Unloading]:
        """Return the states of the models that wait for their running answers, by the ids of the models."""
        if not self.serves:
            return {}
        states, server = {}, self.shown("server")
        for model, (state, at) in self._unloading.items():
            left_s = state.seconds_left
            left_s = None if left_s is None else max(0, left_s - int(time.monotonic() - at))
            states[model] = replace(state, seconds_left=left_s)
        if server["model"] is not None:
            states.pop(server["model"], None)
        if server["unloading"] is not None:
            states[server["model"]] = Unloading(**server["unloading"])
        return states

    def _caption(self) -> str:
        if not self._is_listed:
            return ""
        count = len(self._records)
        caption = f"{counted(count, 'model')} on {self.workbench.backend.state().disk}"
        return caption if count <= MAX_ROWS else f"{caption}; the first {MAX_ROWS} are shown, others load by name"

    def _pressure(self) -> str:
        sample = self._sample
        if not self.serves or sample is None or sample.memory_pressure is None:
            return ""
        freed_bytes = round(sample.memory_freed_gb * 1e9)
        freed = f"{format_bytes(freed_bytes)} of models and caches were" if freed_bytes else "Nothing was"
        return f"Memory is short: {sample.memory_pressure}. {freed} freed, and further requests may have to wait."

    def _engines(self) -> str:
        problems = dict.fromkeys(record.problem for record in self._records if record.problem)
        copies = [copy.describe(record.id) for record in self._records for copy in record.quantized_copies]
        preference = self._preference.detail if self._preference else None
        notes = [*copies, preference, *problems, self._problem]
        return ". ".join(filter(None, notes))

    def _show_jobs(self) -> None:
        unloadings = self._unloadings()
        jobs = [*([self._own] if self._own else []), *self._jobs.values()]
        jobs = [job for job in jobs if job.stage != "unload" or job.model not in unloadings]
        replaced = next((state for state in unloadings.values() if state.replaced_by is not None), None)
        rows = [job.row(unloading=replaced) for job in jobs]
        for model, state in unloadings.items():
            actions = ["Stop now"] if state.seconds_left is None else ["Wait", "Stop now"]
            rows.append({"id": model, "text": str(state), "detail": "", "fraction": None, "actions": actions})
        now = {"jobs": rows, "resident": self._resident()}
        if any(self.shown(name) != value for name, value in now.items()):
            self.show(**now)

    # Storage

    async def _list_storage(self) -> None:
        self._show_storage("Reading the sizes of all files …")
        backend = self.workbench.backend
        try:
            use = await backend.disk_use()
        except (LabError, OSError) as exc:
            if backend is self.workbench.backend:
                self.show(storage={"rows": [], "note": str(exc)})
            return
        if backend is not self.workbench.backend:
            return
        loaded = {record.id for record in self._records if record.loaded}
        sizes: dict[str, int] = {}
        rows, questions = [], {}
        for item in use.items:
            sizes[item.what] = sizes.get(item.what, 0) + item.size_bytes
            question = ""
            if not item.remedy:
                # The question before a deletion names the files and their size.
                names = [f"{name} ({format_bytes(size)})" for name, size in item.files]
                files = f"{counted(len(item.files), 'file')}: {first_names(names, NAMED_FILES)}"
                question = f"Delete {item.name}, {format_bytes(item.size_bytes)} at {item.path}? {files}."
                if item.name in loaded:
                    question += " It is in memory, and can be used until it is unloaded."
                questions[question] = item
            cells = [item.what, format_bytes(item.size_bytes), str(item.path)]
            rows.append({"id": item.name, "cells": cells, "remedy": item.remedy, "question": question})
        self._stored = questions
        parts = ", ".join(f"{what} {format_bytes(size)}" for what, size in sorted(sizes.items(), key=lambda it: -it[1]))
        total = f"{format_bytes(sum(sizes.values()))} in all, {format_bytes(use.free_bytes)} free"
        self.show(storage={"rows": rows[:MAX_ROWS], "note": f"{total}: {parts}" if parts else total})

    def _show_storage(self, note: str) -> None:
        """Show a note above the rows, which cannot be deleted until they were listed again."""
        rows = [{**row, "question": ""} for row in self.shown("storage").get("rows", ())]
        self._stored = {}
        self.show(storage={"rows": rows, "note": note})

    # Saved notebooks

    def snapshot_html(self) -> str:
        if not self._records:
            waiting = self.workbench.submit(self.do_refresh({}))
            concurrent.futures.wait([waiting], timeout=1.0)
        facts = describe_server(self.workbench.backend.state())
        lines = f"<div><b>LMX Lab</b>: {html.escape(facts.pop('server'))}</div>"
        lines += "".join(f"<div>{name}: {html.escape(value)}</div>" for name, value in facts.items())
        loaded = [record for record in self._records if self.serves and record.loaded]
        engines = [f"{record.id}: {_describe_engine(record)}" for record in loaded]
        warnings = [f"{record.id}: {record.warning}" for record in loaded if record.warning]
        lines += "".join(f"<div>{html.escape(note)}</div>" for note in (*engines, self._pressure(), *warnings) if note)
        rows = ([row["id"], *row["cells"]] for row in self._rows())
        table = html_table(MODEL_COLUMNS, rows, caption=self._caption(), style=UNBROKEN)
        table += f"<div>{html.escape(self._engines())}</div>" if self._engines() else ""
        return lines + (f"<details><summary>models</summary>{table}</details>" if self.compact else table)


def _updated(job: ModelJob, event: ModelEvent) -> ModelJob:
    return replace(
        job,
        stage=event.stage,
        done_bytes=event.done_bytes,
        # While a model is read into memory, its size is known, but not the progress.
        total_bytes=event.total_bytes,
        updated_at=time.monotonic(),
    )


def _describe_engine(record: ModelRecord) -> str:
    context = format_context(record, serves=True)
    return f"on {with_reason(record.engine, record.engine_reason)}" + (f", context {context}" if context else "")


def _duration(seconds: float) -> str:
    """Format a duration in the largest unit of which it is a multiple."""
    if seconds < 60 or seconds % 60:
        return f"{seconds:g} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 or seconds % 3600 else f"{seconds / 3600:.0f} h"


def _log_failure(scan: asyncio.Task[None]) -> None:
    if not scan.cancelled() and (error := scan.exception()) is not None:
        log.debug("the models cannot be listed: %r", error)

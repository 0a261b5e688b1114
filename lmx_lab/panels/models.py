"""The models panel: the server, what is on this disk and in memory; load and unload."""

from __future__ import annotations

import asyncio
import concurrent.futures
import html
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import traitlets

from lmx_lab.backend import Source
from lmx_lab.errors import HostingError, LabError, ModelBusyError
from lmx_lab.panels.panel import Panel, text_field
from lmx_lab.panels.workbench import Workbench
from lmx_lab.wire.admin import ModelEvent, ModelRecord, Preference, Sample

log = logging.getLogger(__name__)
MOST_ROWS = 500
MOST_JOBS = 8
SILENT_S = 30.0
"""A download that others began and that says nothing for so long has gone on under another name, or is over."""
SNAPSHOT_S = 1.0
"""How long a snapshot waits for the first list."""
COLUMNS = ("model", "kind", "format", "engine", "size", "quantization", "context", "state")
ADDRESSES = {"url": "local", "lan_url": "LAN", "proxy_url": "browser"}
STAGES = {
    "begin": "looking for its files",
    "download": "downloading",
    "verify": "checking the download",
    "convert": "converting",
    "store": "storing",
    "load": "loading",
    "unload": "unloading",
}
ENDS = ("loaded", "unloaded", "failed")
IN_ENGINE = ("load", "unload")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Something that is being done to a model."""

    model: str
    stage: str = "begin"
    done_bytes: int | None = None
    total_bytes: int | None = None
    heard_at: float = field(default_factory=time.monotonic)

    def row(self, *, answers: int, can_cancel: bool) -> dict[str, Any]:
        """As a view shows it.

        Args:
            answers: Generations that run; the engine ends them before it changes its model.
        """
        words = STAGES[self.stage]
        if self.stage in IN_ENGINE and answers:
            words = f"waiting for running answers ({answers})"
        part = self.done_bytes / self.total_bytes if self.done_bytes is not None and self.total_bytes else None
        return {
            "id": self.model,
            "words": words,
            "detail": self._bytes(),
            "part": None if part is None else min(part, 1.0),
            "cancel": can_cancel and self.stage not in IN_ENGINE,
        }

    def _bytes(self) -> str:
        if self.done_bytes is None:
            return ""
        done = in_bytes(self.done_bytes)
        return f"{done} of {in_bytes(self.total_bytes)}" if self.total_bytes else done


class ModelsPanel(Panel):
    """Which models there are, what is loaded, and buttons that change it. ``compact`` folds the list away."""

    SCRIPTS = ("panel.js", "keyed.js", "direct.js", "models.js")
    STYLES = ("panel.css", "models.css")
    REQUESTS: ClassVar[frozenset[str]] = frozenset({"refresh", "load", "cancel", "unload", "dismiss"})

    compact = traitlets.Bool(False).tag(sync=True)
    rows: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """``{id, cells, can}``: the texts of the columns after the first, and the button's, if there is one."""
    caption = traitlets.Unicode().tag(sync=True)
    engines = traitlets.Unicode().tag(sync=True)
    """Which engine is the faster one here, or why models of one cannot be loaded; empty as long as nobody knows."""
    jobs: traitlets.List[Any] = traitlets.List().tag(sync=True)
    """What is being done now: ``{id, words, detail, part, cancel}``; ``part`` is between 0 and 1, or unknown."""
    error = traitlets.Unicode().tag(sync=True)
    """The last failure, until it is dismissed or something else is begun."""

    def __init__(self, workbench: Workbench, **traits: Any) -> None:
        self._records: tuple[ModelRecord, ...] = ()
        self._preference: Preference | None = None
        self._problem: str | None = None
        """Why the list may be incomplete."""
        self._jobs: dict[str, Job] = {}
        self._own: Job | None = None
        self._work: asyncio.Task[None] | None = None
        """The load or unload that was asked for here."""
        self._given_up = False
        self._answers = 0
        self._scan: asyncio.Task[None] | None = None
        self._is_stale = True
        self._shown_server: Mapping[str, Any] = {}
        super().__init__(workbench, **traits)

    # The workbench's calls

    def tick(self, source: Source, sample: Sample | None) -> None:
        super().tick(source, sample)
        self._answers = sample.active_requests if sample else 0
        now = time.monotonic()
        stopped = not self._serves
        for job in list(self._jobs.values()):
            if stopped or (job.stage not in IN_ENGINE and now - job.heard_at > SILENT_S):
                del self._jobs[job.model]
        self._show_jobs()
        self._follow_server()

    def _follow_server(self) -> None:
        server = self.shown("server")
        before, self._shown_server = self._shown_server, server
        if any(before.get(name) != server[name] for name in ("state", "model", "pinned")):
            self._show_rows()
            # Also what goes without an event: a model that was idle, or for which there was no memory.
            if before and before["model"] != server["model"]:
                self._refresh_soon()

    def model_event(self, event: ModelEvent) -> None:
        if event.stage in ENDS:
            self._jobs.pop(event.model, None)
            if event.stage == "unloaded" and event.message:
                self.show(error=f"{event.model} was unloaded: {event.message}")
            self._refresh_soon()
        elif self._own is not None and self._is_own(event):
            self._own = _moved(self._own, event)
        elif event.model in self._jobs or len(self._jobs) < MOST_JOBS:
            self._jobs[event.model] = _moved(Job(model=event.model), event)
        self._show_jobs()

    def _is_own(self, event: ModelEvent) -> bool:
        # What is given to the engine has its id from there on, and no longer the name that was asked for.
        own = self._own
        return own is not None and (
            event.model == own.model
            or (event.stage == "load" and own.stage not in IN_ENGINE and event.model not in self._jobs)
        )

    def changed_source(self) -> None:
        if self._work is not None:
            self._work.cancel()
        self._work, self._own, self._given_up, self._records = None, None, False, ()
        self._preference = self._problem = None
        self._jobs.clear()
        self.show(error="")
        self._show_jobs()
        self._show_rows()
        self._refresh_soon()

    # Requests

    async def do_refresh(self, fields: Mapping[str, Any]) -> None:
        await asyncio.shield(self._refresh_soon())

    async def do_load(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Begin a load; what becomes of it is in ``jobs``, ``rows`` and ``error``."""
        name = text_field(fields, "model").strip()
        self._check_free()
        self._begin(Job(model=name), self._load(self.workbench.source, name))
        return {"model": name}

    async def do_unload(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Begin to unload; if the model has gone already, nothing happens."""
        name = text_field(fields, "model")
        source = self.workbench.source
        if self._own is None or (self._own.model, self._own.stage) != (name, "unload"):
            self._check_free()
            if source.state().model == name:
                self._begin(Job(model=name, stage="unload"), self._unload(source, name))
        return {"model": name}

    async def do_cancel(self, fields: Mapping[str, Any]) -> None:
        name = text_field(fields, "model")
        own = self._own is not None and self._own.model == name
        self._given_up = self._given_up or own
        try:
            await self.workbench.source.cancel_load(name)
        except LabError:
            self._given_up = self._given_up and not own
            raise

    async def do_dismiss(self, fields: Mapping[str, Any]) -> None:
        self.show(error="")

    def _check_free(self) -> None:
        if not self._serves:
            raise HostingError(f"the server is {self.shown('server')['state']}; run the launch cell again")
        if self._own is not None:
            doing = "unloaded" if self._own.stage == "unload" else "loaded"
            raise ModelBusyError(f"{self._own.model} is being {doing}; ask again when that is done", retry_after_s=2)

    def _begin(self, job: Job, work: Any) -> None:
        self._own, self._given_up = job, False
        self._work = asyncio.create_task(work, name=f"{job.stage} {job.model:.60}")
        self._work.add_done_callback(self._ended)
        self.show(error="")
        self._show_jobs()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a panel's load or unload failed", exc_info=error)
        if task is self._work:
            self._work = self._own = None
            self._show_jobs()
            self._refresh_soon()

    async def _load(self, source: Source, name: str) -> None:
        try:
            await source.load(name)
        except LabError as exc:
            if not self._given_up:
                self.show(error=f"{name} was not loaded: {exc.message}")

    async def _unload(self, source: Source, name: str) -> None:
        try:
            await source.unload()
        except LabError as exc:
            self.show(error=f"{name} was not unloaded: {exc.message}")

    # The list

    def _refresh_soon(self) -> asyncio.Task[None]:
        """Scan, or once more when the scan that runs is done: it may have looked too early."""
        self._is_stale = True
        if self._scan is None or self._scan.done():
            self._scan = asyncio.create_task(self._scan_while_stale(), name="list the models")
            self._scan.add_done_callback(_note_failure)
        return self._scan

    async def _scan_while_stale(self) -> None:
        while self._is_stale:
            self._is_stale = False
            source = self.workbench.source
            found = await source.models()
            if source is self.workbench.source:
                self._records, self._preference = tuple(found.models), found.preference
                self._problem = found.problem
                self._show_rows()

    def _show_rows(self) -> None:
        now = {"rows": list(self._rows()), "caption": self._caption(), "engines": self._engines()}
        if any(self.shown(name) != value for name, value in now.items()):
            self.show(**now)

    def _rows(self) -> Iterable[dict[str, Any]]:
        return (model_row(record, serves=self._serves) for record in self._records[:MOST_ROWS])

    def _caption(self) -> str:
        count = len(self._records)
        said = f"{count} model{'' if count == 1 else 's'} on this disk"
        return said if count <= MOST_ROWS else f"{said}; the first {MOST_ROWS} are shown, others load by name"

    def _engines(self) -> str:
        problems = dict.fromkeys(record.problem for record in self._records if record.problem)
        said = [self._preference.detail if self._preference else None, *problems, self._problem]
        return ". ".join(filter(None, said))

    def _show_jobs(self) -> None:
        jobs = [*([self._own] if self._own else []), *self._jobs.values()]
        can_cancel = self.workbench.source.can_cancel_loads
        rows = [job.row(answers=self._answers, can_cancel=can_cancel) for job in jobs]
        if rows != self.shown("jobs"):
            self.show(jobs=rows)

    @property
    def _serves(self) -> bool:
        return self.shown("server")["state"] in ("running", "lagging")

    # Without a kernel

    def snapshot_html(self) -> str:
        self._wait_for_list()
        server = self.shown("server")
        facts = [f"<b>LMX Lab</b>: {_text(server['state'])}, {_text(server['place'])}"]
        facts += [f"{label}: <code>{_text(server[key])}</code>" for key, label in ADDRESSES.items() if server[key]]
        facts += [f"model: {_text(server['model'] or 'none')}"]
        facts += [f"beside it: {_text(', '.join(server['pinned']))}"] if server["pinned"] else []
        facts += [_text(server["note"])] if server["note"] else []
        lines = "".join(f"<div>{fact}</div>" for fact in facts)
        table = self._table_html() + (f"<div>{_text(self._engines())}</div>" if self._engines() else "")
        return lines + (f"<details><summary>models</summary>{table}</details>" if self.compact else table)

    def _table_html(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        rows = "".join(
            f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in (row['id'], *row['cells']))}</tr>"
            for row in self._rows()
        )
        caption = f"<caption>{self._caption()}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def _wait_for_list(self) -> None:
        if not self._records:
            waiting = self.workbench.submit(self.do_refresh({}))
            concurrent.futures.wait([waiting], SNAPSHOT_S)


def model_row(record: ModelRecord, *, serves: bool) -> dict[str, Any]:
    """A row of the table; what a server that is gone had loaded, is on disk."""
    memory = "" if record.vram_gb is None else f", {in_bytes(record.vram_gb * 1e9)}"
    state, can = ("needs " + record.engine, "") if record.problem else ("on disk", "Load")
    if serves and record.pinned:
        state, can = f"pinned{memory}", ""
    elif serves and record.loaded:
        state, can = f"loaded{memory}", "Unload"
    context = "" if record.context_length is None else f"{record.context_length:,}"
    size = in_bytes(record.size_gb * 1e9)
    cells = [record.kind, record.format, record.engine, size, record.quantization or "", context, state]
    return {"id": record.id, "cells": cells, "can": can}


def in_bytes(count: float) -> str:
    """A number of bytes for people: 1 GB is 10^9."""
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def _moved(job: Job, event: ModelEvent) -> Job:
    return replace(
        job,
        stage=event.stage,
        done_bytes=event.done_bytes,
        # Of a load only the size is known, and not how far it has come.
        total_bytes=event.total_bytes,
        heard_at=time.monotonic(),
    )


def _note_failure(scan: asyncio.Task[None]) -> None:
    if not scan.cancelled() and (error := scan.exception()) is not None:
        log.debug("the models could not be listed: %r", error)


def _text(value: object) -> str:
    return html.escape(str(value))

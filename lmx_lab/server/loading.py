"""One load at a time: name → files → checks → engine. What the HTTP route, the notebook and the command line share."""

from __future__ import annotations

import asyncio

from lmx_lab.engine import Engine, LoadReport
from lmx_lab.errors import AdminForbiddenError, DownloadError, LabError, ModelBusyError, ModelNotFoundError
from lmx_lab.feed import Feed
from lmx_lab.weights import Catalog, ModelEntry, Progress
from lmx_lab.wire.admin import ModelEvent, RequestEvent

Event = ModelEvent | RequestEvent


class ModelLoader:
    """Owns the running load. Progress goes to ``feed``, the result to whoever asked."""

    def __init__(self, *, engine: Engine, catalog: Catalog, feed: Feed[Event], downloads: bool) -> None:
        self._engine = engine
        self._catalog = catalog
        self._feed = feed
        self._downloads = downloads
        self._task: asyncio.Task[LoadReport] | None = None
        self._name = ""

    async def load(self, name: str, *, local: bool) -> LoadReport:
        """Load a model by id or, for local callers, by path or by an id that is downloaded first.

        A caller who leaves does not stop the load; who asks for the same model meanwhile waits for the same load.

        Raises:
            ModelNotFoundError: not on disk, and not to be had.
            UnusableModelError, StorageFullError, OutOfMemoryError: see the message for what is loaded now.
            ModelBusyError: another model is being loaded.
        """
        if self._task is None or self._task.done():
            self._name = name
            self._task = asyncio.create_task(self._load(name, local=local), name=f"load {name}")
        elif self._name != name:
            raise ModelBusyError(f"{self._name} is being loaded; ask again when that is done", retry_after_s=2)
        return await asyncio.shield(self._task)

    async def unload(self) -> int:
        """Unload; returns the bytes freed, 0 when nothing was loaded.

        Raises:
            ModelBusyError: a load is under way.
        """
        if self._task is not None and not self._task.done():
            raise ModelBusyError(f"{self._name} is being loaded; unload it when that is done", retry_after_s=2)
        model = self._engine.snapshot.model
        freed = await self._engine.unload()
        if model is not None:
            self._feed.publish(ModelEvent(model=model, stage="unloaded"))
        return freed

    async def close(self) -> None:
        """Wait for a load that still runs."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _load(self, name: str, *, local: bool) -> LoadReport:
        try:
            entry = await self._find(name, local=local)
            report = self._loaded(entry) or await self._load_entry(entry)
        except LabError as exc:
            self._feed.publish(ModelEvent(model=name, stage="failed", message=exc.message))
            raise
        self._feed.publish(ModelEvent(model=report.model, stage="loaded"))
        return report

    def _loaded(self, entry: ModelEntry) -> LoadReport | None:
        now = self._engine.snapshot
        if now.model != entry.id:
            return None
        return LoadReport(model=entry.id, load_s=0.0, memory_bytes=now.model_memory_bytes)

    async def _load_entry(self, entry: ModelEntry) -> LoadReport:
        await asyncio.to_thread(self._catalog.check, entry)
        self._feed.publish(ModelEvent(model=entry.id, stage="load", total_bytes=entry.size_bytes))
        return await self._engine.load(entry)

    async def _find(self, name: str, *, local: bool) -> ModelEntry:
        try:
            entry = await asyncio.to_thread(self._catalog.resolve, name, local=local)
        except ModelNotFoundError as exc:
            return await self._download(name, exc, local=local)
        if entry.format == "gguf":
            return await self._fetch(str(entry.path))
        return entry

    async def _download(self, name: str, missing: ModelNotFoundError, *, local: bool) -> ModelEntry:
        if not self._downloads or not local:
            raise missing
        try:
            return await self._fetch(name)
        except DownloadError as exc:
            # For the caller of a load there is one answer: the model is not here. The message says why.
            raise ModelNotFoundError(f"{name} is not on this disk: {exc.message}", param="model") from exc

    async def _fetch(self, name: str) -> ModelEntry:
        def tell(progress: Progress) -> None:
            self._feed.publish(
                ModelEvent(
                    model=name,
                    stage=progress.stage,
                    done_bytes=progress.done_bytes,
                    total_bytes=progress.total_bytes,
                )
            )

        return await asyncio.to_thread(self._catalog.fetch, name, tell)


def check_admin(*, local: bool, lan_admin: bool) -> None:
    """Other hosts may look; they change something only where the operator said so.

    Raises:
        AdminForbiddenError: the caller is another host.
    """
    if not local and not lan_admin:
        raise AdminForbiddenError(
            "only this machine may load and unload; start the server with --lan-admin to allow others"
        )

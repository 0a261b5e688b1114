"""One load at a time: name → files → checks → engine. What the HTTP route, the notebook and the command line share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from lmx_lab.broadcast import Feed
from lmx_lab.engine import Engine
from lmx_lab.engine.registry import check_engine
from lmx_lab.errors import (
    AdminForbiddenError,
    DownloadError,
    InvalidRequestError,
    LabError,
    ModelBusyError,
    ModelNotFoundError,
    NotLoadedError,
    UnusableModelError,
)
from lmx_lab.values.models import KINDS_IN_WORDS, Kind, LoadReport, LoadSpec, ModelEntry
from lmx_lab.weights import Catalog, Progress
from lmx_lab.weights.fingerprint import is_loaded
from lmx_lab.weights.threads import in_thread
from lmx_lab.wire.admin import ModelEvent, RequestEvent

T = TypeVar("T")
Event = ModelEvent | RequestEvent
LOOK_AGAIN_S = 0.02
CLOSE_S = 2.0
DISK_S = 30.0
"""How long the files of a model may take to be found and checked."""


class ModelLoader:
    """Owns the running loads. Progress goes to ``feed``, the result to whoever asked.

    Any number of models may be on their way to this disk; one at a time enters the engine. Several event loops may use
    one loader: the server's, and that of the notebook's panels.
    """

    def __init__(self, *, engine: Engine, catalog: Catalog, feed: Feed[Event], downloads: bool) -> None:
        self._engine = engine
        self._catalog = catalog
        self._feed = feed
        self._downloads = downloads
        self._tasks: dict[LoadSpec, asyncio.Task[LoadReport]] = {}
        """Each on the loop of the caller that started it."""
        self._lock = threading.Lock()
        self._doing: str | None = None
        """What is being done to the engine's model."""
        self._entering: ModelEntry | None = None
        """What the engine is loading."""
        self._inside: set[str] = set()
        """Names whose files are there, and which the engine is being given."""

    async def load(self, spec: LoadSpec, *, local: bool, finish_queued: bool = False) -> LoadReport:
        """Load a model by id or, for local callers, by path or by an id that is downloaded first.

        A caller who leaves does not stop the load; who asks for the same model meanwhile waits for the same load.

        Args:
            finish_queued: As ``Engine.load``: the requests that wait for the present model are answered first.

        Raises:
            ModelNotFoundError: not on disk, and not to be had.
            UnusableModelError, StorageFullError, OutOfMemoryError: see the message for what is loaded now.
            ModelBusyError: another model is being loaded.
        """
        if spec.pin is not None:
            return await self._pin(spec, spec.pin)
        name = spec.model
        with self._lock:
            task = self._tasks.get(spec)
            if task is None or task.get_loop().is_closed():
                work = self._load(spec, local=local, finish_queued=finish_queued)
                task = self._tasks[spec] = asyncio.create_task(work, name=f"load {name}")
                task.add_done_callback(functools.partial(self._ended, spec))
        try:
            if task.get_loop() is asyncio.get_running_loop():
                return await _shielded(task)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_shielded(task), task.get_loop()))
        except asyncio.CancelledError:
            if task.cancelled():
                raise NotLoadedError(f"the load of {name} was given up") from None
            raise

    def cancel(self, name: str) -> None:
        """Give up the loads of a model that have not reached the engine; who waits for them is told. What is being
        fetched goes on to this disk.

        Raises:
            ModelBusyError: it is entering the engine, which takes seconds and cannot be left half done.
            InvalidRequestError: it is not being loaded.
        """
        tasks = [task for spec, task in list(self._tasks.items()) if spec.model == name]
        if not tasks:
            raise InvalidRequestError(f"{name} is not being loaded; there is nothing to cancel", param="model")
        if name in self._inside:
            raise ModelBusyError(f"{name} is entering the engine already; unload it when it is there", retry_after_s=2)
        self._cancel(tasks)

    async def _pin(self, spec: LoadSpec, kind: Kind) -> LoadReport:
        """Keep a model of that kind in the engine beside the loaded one; the operator's choice, so paths and downloads
        are as for local callers.

        Raises: as ``load``; the loaded model is not touched.
        """
        name = spec.model
        try:
            entry = await self._find(name, local=True)
            if entry.kind != kind:
                raise UnusableModelError(
                    f"{name} is {KINDS_IN_WORDS[entry.kind]}; this place is for {KINDS_IN_WORDS[kind]}; "
                    "load the other kind as the model"
                )
            check_engine(entry, spec)
            await _from_disk(lambda: self._catalog.check(entry), entry.id)
            self._feed.publish(ModelEvent(model=entry.id, stage="load", total_bytes=entry.size_bytes))
            report = await self._engine.pin(entry)
        except LabError as exc:
            self._feed.publish(ModelEvent(model=name, stage="failed", message=exc.message))
            raise
        self._feed.publish(ModelEvent(model=report.model, stage="loaded"))
        return report

    def _ended(self, spec: LoadSpec, task: asyncio.Task[LoadReport]) -> None:
        if self._tasks.get(spec) is task:
            del self._tasks[spec]
        # Those who asked got the failure; if all of them have left, it is nobody's.
        if not task.cancelled():
            task.exception()

    async def unload(self) -> int:
        """Unload; returns the bytes freed, 0 when nothing was loaded. A load that can be given up ends: it may hang.

        Raises:
            ModelBusyError: a load is under way that cannot.
        """
        model = self._engine.snapshot.model
        with contextlib.nullcontext() if self._gives_up() else self._entrance("the model is being unloaded"):
            freed = await self._engine.unload()
        if model is not None:
            self._feed.publish(ModelEvent(model=model, stage="unloaded"))
        return freed

    @property
    def changing(self) -> bool:
        """Whether something is being done to the engine's model."""
        return self._doing is not None

    async def settled(self) -> None:
        """Return when nothing is being done to the engine's model."""
        # Looking is all that works on every loop alike.
        while self.changing:  # noqa: ASYNC110 (an asyncio.Event has one loop)
            await asyncio.sleep(LOOK_AGAIN_S)

    async def close(self) -> None:
        """Give up the loads that run; who waits for them is told."""
        self._cancel(list(self._tasks.values()))
        # A loop that has ended, or does not come round, takes its task with it.
        for _ in range(round(CLOSE_S / LOOK_AGAIN_S)):
            if all(task.get_loop().is_closed() for task in list(self._tasks.values())):
                break
            await asyncio.sleep(LOOK_AGAIN_S)

    def _cancel(self, tasks: list[asyncio.Task[LoadReport]]) -> None:
        for task in tasks:
            with contextlib.suppress(RuntimeError):  # its loop is closed, and the task has ended
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def _load(self, spec: LoadSpec, *, local: bool, finish_queued: bool) -> LoadReport:
        name = spec.model
        try:
            entry = await self._find(name, local=local)
            check_engine(entry, spec)
            self._inside.add(name)
            report = await in_thread(lambda: self._loaded(entry)) or await self._enter(
                entry, finish_queued=finish_queued
            )
        except LabError as exc:
            self._feed.publish(ModelEvent(model=name, stage="failed", message=exc.message))
            raise
        except asyncio.CancelledError:
            self._feed.publish(ModelEvent(model=name, stage="failed", message="the load was given up"))
            raise
        finally:
            self._inside.discard(name)
        self._feed.publish(ModelEvent(model=report.model, stage="loaded"))
        return report

    def _loaded(self, entry: ModelEntry) -> LoadReport | None:
        now = self._engine.snapshot
        if self._doing is not None or not is_loaded(now.entry, entry):
            return None
        return LoadReport(model=entry.id, load_s=0.0, memory_bytes=now.model_memory_bytes)

    async def _enter(self, entry: ModelEntry, *, finish_queued: bool) -> LoadReport:
        with self._entrance(f"{entry.id} is being loaded"):
            await _from_disk(lambda: self._catalog.check(entry), entry.id)
            self._feed.publish(ModelEvent(model=entry.id, stage="load", total_bytes=entry.size_bytes))
            self._entering = entry
            try:
                return await self._engine.load(entry, finish_queued=finish_queued)
            finally:
                self._entering = None

    def _gives_up(self) -> bool:
        """Whether a load is under way that an unload ends."""
        entering = self._entering
        return entering is not None and self._engine.gives_up(entering)

    @contextlib.contextmanager
    def _entrance(self, doing: str) -> Iterator[None]:
        """Only one change of the engine's model at a time: who comes second should know what they replace."""
        with self._lock:
            if self._doing is not None:
                raise ModelBusyError(f"{self._doing}; ask again when that is done", retry_after_s=2)
            self._doing = doing
        try:
            yield
        finally:
            self._doing = None

    async def _find(self, name: str, *, local: bool) -> ModelEntry:
        try:
            return await _from_disk(lambda: self._catalog.resolve(name, local=local), name)
        except (ModelNotFoundError, UnusableModelError) as exc:
            # A fetch that was cut off, by a full disk or the end of its process, leaves a part: the rest is to be had.
            if isinstance(exc, UnusableModelError) and not self._catalog.can_fetch(name):
                raise
            return await self._download(name, exc, local=local)

    async def _download(
        self, name: str, missing: ModelNotFoundError | UnusableModelError, *, local: bool
    ) -> ModelEntry:
        if not self._downloads or not local:
            raise missing
        try:
            return await self._fetch(name)
        except DownloadError as exc:
            # For the caller of a load there is one answer: the model is not here, or not whole. The message says why.
            if isinstance(missing, UnusableModelError):
                raise UnusableModelError(f"{missing.message}; {exc.message}", param="model") from exc
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

        return await in_thread(lambda: self._catalog.fetch(name, tell), name="lmx-lab-fetch")


async def _from_disk(work: Callable[[], T], name: str) -> T:
    """
    Raises:
        NotLoadedError: the disk does not answer in time.
    """
    try:
        return await asyncio.wait_for(in_thread(work), DISK_S)
    except TimeoutError:
        raise NotLoadedError(
            f"{name} was not loaded: the folders with models have not been read within {DISK_S:g} s; check their disks"
        ) from None


async def _shielded(task: asyncio.Task[T]) -> T:
    return await asyncio.shield(task)


def check_admin(*, local: bool, lan_admin: bool) -> None:
    """Callers that are not local may look; they load and unload only where the operator allows it.

    Raises:
        AdminForbiddenError: they may not.
    """
    if not local and not lan_admin:
        raise AdminForbiddenError(
            "only local callers may load and unload: those on this machine that call http://127.0.0.1 or "
            "http://localhost directly, or send the API key to it; start the server with --lan-admin to allow others"
        )

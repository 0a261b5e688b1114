"""Track the servers that answer the rows of a run: their models, which of them accept rows, and their answers.

``ServerRun`` sends the items of a run to the servers. If a server cannot accept an item, the item is sent again
after the delay that the server returns. If there are several servers, another one gets the item instead, and the first
one gets items again as soon as it responds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from lmx_lab.backend import Backend
from lmx_lab.batch.cache import AnswerCache
from lmx_lab.errors import (
    BatchStoppedError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
    QueueFullError,
    UnavailableError,
    UnreachableError,
    WrongServerError,
)
from lmx_lab.wire.admin import ModelRecord

T = TypeVar("T")
ItemT = TypeVar("ItemT")
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 5.0
"""Minimum and maximum delay before a request is sent again, and before a server that has failed is asked again."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The model that answers rows or computes vectors."""

    id: str
    engine: str
    key: str
    """Identifies the engine and the weights in the keys of the cache."""
    slots: int
    description: str
    """The model's id, quantization, size and engine."""
    weights: str
    """SHA-256 of its files; empty if the hash is not known."""

    def is_same(self, other: LoadedModel) -> bool:
        """Return whether both are the same model on the same engine, as far as their hashes are known."""
        is_other = self.weights and other.weights and self.weights != other.weights
        return self.description == other.description and not is_other


FindModel = Callable[[Backend], Awaitable[LoadedModel]]
"""Returns the model of a server that answers rows. Raises ``NotLoadedError`` if there is none."""


async def loaded_model(backend: Backend, *, hashed: bool) -> LoadedModel:
    """Return the chat model that answers requests which name none.

    Args:
        hashed: Whether to hash the model's files for the key, if they are on this machine.

    Raises:
        NotLoadedError: no chat model is loaded.
    """
    records = (await backend.models()).models
    loaded = [each for each in records if each.loaded and each.kind == "chat"]
    record = min(loaded, key=lambda each: not each.main, default=None)
    if record is None:
        raise NotLoadedError(f"no chat model is loaded at {backend.state().url}; load one first: lab.load(...)")
    return await identify(backend, record, hashed=hashed)


async def identify(backend: Backend, record: ModelRecord, *, hashed: bool) -> LoadedModel:
    """Return a model with its cache key. ``hashed`` has the same meaning as for ``loaded_model``."""
    weights = await backend.weights_of(record.id) if hashed else ""
    named = f"{record.id} {record.quantization} {record.size_gb}"
    size = ", ".join(filter(None, (record.quantization, f"{record.size_gb:g} GB")))
    return LoadedModel(
        id=record.id,
        engine=record.engine or "",
        key=f"{record.engine} {weights or named}",
        # Some servers do not report their slots.
        slots=record.slots or 4,
        description=f"{record.id} ({size}) on the engine {record.engine}",
        weights=weights,
    )


class RowServer:
    """A server that answers rows.

    Args:
        slots: Number of requests that the server computes at the same time.
        waiting: Number of additional requests that wait in the server's queue, so that a slot that becomes free is used
            immediately.
    """

    def __init__(self, backend: Backend, slots: int, *, waiting: int = 2) -> None:
        self.backend = backend
        self.url = backend.state().url
        self.running = 0
        """Number of requests that the server is answering."""
        self.answers = 0
        """Number of rows that the server has answered."""
        self.returned = 0
        """Number of rows that the server could not answer, and that other servers got instead."""
        self.error = ""
        """The reason why the server gets no rows at present; empty if it gets rows."""
        self.has_failed = False
        """Whether the server has had such an error during the run."""
        self._slots = slots
        self._waiting = waiting
        self._output_tokens = 0
        self._started_at: float | None = None
        self._answered_at = 0.0

    @property
    def occupancy(self) -> float:
        """The fraction of the slots in use; above 1 if requests wait in the queue."""
        return self.running / self._slots

    @property
    def has_room(self) -> bool:
        return not self.error and self.running < self._slots + self._waiting

    def begin(self) -> None:
        """Count a request that the server starts to answer."""
        self._started_at = self._started_at or time.monotonic()
        self.running += 1

    def count(self, rows: int = 1, *, output_tokens: int = 0) -> None:
        """Count the rows that the server has answered with a request."""
        self.answers += rows
        self._output_tokens += output_tokens
        self._answered_at = time.monotonic()

    def rate(self, count: int) -> float:
        """Return a count per second of the time in which the server has answered rows."""
        elapsed_s = self._answered_at - self._started_at if self.answers and self._started_at else 0.0
        return count / elapsed_s if elapsed_s else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the statistics of the server as a row of a table."""
        return {
            "url": self.url,
            "slots": self._slots,
            "answers": self.answers,
            "output_tokens": self._output_tokens,
            "tokens_per_s": self.rate(self._output_tokens),
            "returned": self.returned,
            "error": self.error,
        }


async def same_models(backends: Sequence[Backend], find: FindModel) -> tuple[LoadedModel, list[RowServer]]:
    """Return the model of the first server, and the other servers, which must have the same model.

    Raises:
        NotLoadedError: one of the servers has no model loaded.
        InvalidRequestError: the servers have different models.
    """
    models = [await find(each) for each in backends]
    for backend, model in zip(backends, models, strict=True):
        if not model.is_same(models[0]):
            first, other = (f"{each.description} {each.weights[:12]}".rstrip() for each in (models[0], model))
            raise InvalidRequestError(
                f"the labs have different models: {first} at {backends[0].state().url}, and {other} at "
                f"{backend.state().url}; load the same model on the same engine in all of them",
                param="labs",
            )
    others = zip(backends[1:], models[1:], strict=True)
    return models[0], [RowServer(backend, model.slots) for backend, model in others]


class ServerRun(ABC, Generic[ItemT]):
    """Sends the items of a run to its servers: requests for rows. Coroutines run on the lab's event loop.

    Args:
        find: Returns the model of a server that has failed, to check whether it responds with the same model.
    """

    product: ClassVar[str] = "answers"
    """What the servers compute, for messages."""

    def __init__(
        self,
        model: LoadedModel,
        servers: Sequence[RowServer],
        find: FindModel,
        *,
        cache: AnswerCache | None = None,
    ) -> None:
        self._model, self._servers, self._find = model, servers, find
        self._cache = cache
        self._ready: deque[ItemT] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._warnings: deque[str] = deque()
        self._changed = asyncio.Event()
        self._failure: LabError | None = None
        self._concerns_row = False
        self._stopped = False
        self._progress_at = time.monotonic()
        self.done = 0

    @abstractmethod
    async def _compute(self, item: ItemT, server: RowServer) -> None:
        """Let a server compute an item.

        Raises:
            LabError: the run cannot continue.
        """

    @abstractmethod
    def _must_return(self) -> bool:
        """Return whether the caller of ``_work`` can continue without further answers."""

    @property
    def _kept(self) -> str:
        """Where the results so far are if the run ends with an error."""
        if self._cache is not None:
            return f"the {self.product} are stored in {self._cache.path}"
        return f"the attribute frame of this error contains the {self.product}"

    def warn(self) -> None:
        """Warn about servers that failed and whose rows the others get. Call it in the caller's thread."""
        while self._warnings:
            warnings.warn(self._warnings.popleft(), RuntimeWarning, stacklevel=3)

    async def stop(self) -> None:
        """Cancel all running requests, and wait until they have ended. Idempotent."""
        self._stopped = True
        self._ready.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        """Send items until the caller can continue, or for 0.25 s; the caller then shows the progress.

        Raises:
            LabError: the run cannot continue.
        """
        self._start_tasks()
        deadline = time.monotonic() + 0.25
        while not self._must_return() and (left_s := deadline - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                break
        if self._failure is not None:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._concerns_row or not self.done:
                raise self._failure
            # Created here, because a cancelled task may have stored another result. It names the errors of all servers
            # that have failed.
            errors = [f"{each.url}: {each.error.rstrip('.')}" for each in self._servers if each.error]
            reasons = "; ".join([self._failure.message.rstrip("."), *errors])
            ended = f"the run ended after {self.done} {self.product} of {self._model.id}"
            raise BatchStoppedError(f"{ended}: {reasons}; {self._kept}") from self._failure

    def _start_tasks(self) -> None:
        while self._ready and not self._stopped and self._failure is None:
            free = [each for each in self._servers if each.has_room]
            if not free:
                return
            server = min(free, key=lambda each: each.occupancy)
            server.begin()
            self._start(self._compute(self._ready.popleft(), server), "answer a row", server)

    def _start(self, work: Coroutine[Any, Any, None], name: str, server: RowServer | None = None) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(partial(self._end_task, server))

    def _end_task(self, server: RowServer | None, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if server is not None:
            # Not in the task: between its end and this call, a run would seem to be complete without its error.
            server.running -= 1
        if not task.cancelled():
            if (exc := task.exception()) is not None:
                self._fail(exc if isinstance(exc, LabError) else LabError(f"{type(exc).__name__}: {exc}"))
            self._start_tasks()
        self._changed.set()

    def _fail(self, error: LabError, *, concerns_row: bool = False) -> None:
        """End the run with the error of a row, which is raised unchanged, or one that prevents further results."""
        if self._failure is None:
            self._failure, self._concerns_row = error, concerns_row
            self._ready.clear()
            for task in self._tasks:
                task.cancel()

    async def _send(self, request: Callable[[], Awaitable[T]], server: RowServer, *, waits: bool = False) -> T:
        """Return the response to a request. Send the request again while the server cannot accept it.

        Args:
            waits: Whether to send the request again even if other servers could answer it.

        Raises:
            LabError: there is no response.
        """
        while True:
            try:
                return await request()
            except UnavailableError as exc:
                is_lost = isinstance(exc, UnreachableError) and not isinstance(exc, WrongServerError)
                # Without a finished row for two minutes, requests are no longer sent again to a server that does not
                # respond or that loads the model.
                is_late = time.monotonic() - self._progress_at >= 120
                can_retry = isinstance(exc, QueueFullError) or (
                    (is_lost or exc.retry_after_s is not None) and not is_late
                )
                if not can_retry or (self._has_others(server) and not waits):
                    raise
                pause_s = _pause_s(exc)
            await asyncio.sleep(pause_s)

    def _has_others(self, server: RowServer) -> bool:
        """Return whether other servers get rows."""
        return any(each is not server and not each.error for each in self._servers)

    async def _store(self, work: Coroutine[Any, Any, None]) -> None:
        """Store results. A cancelled task also stores its results, so that the table has all of the cache."""
        storing = asyncio.create_task(work, name="store an answer")
        try:
            await asyncio.shield(storing)
        except asyncio.CancelledError:
            await storing
            raise

    async def _give_back(self, item: ItemT, server: RowServer, error: LabError, *, rows: int = 1) -> None:
        """Queue an item again that a server could not answer, for the other servers.

        Raises:
            LabError: there are no others.
        """
        if not self._has_others(server):
            raise error
        self._ready.appendleft(item)
        server.returned += rows
        if isinstance(error, QueueFullError):
            self._start_tasks()
            await asyncio.sleep(_pause_s(error))
        elif not server.error:
            if not server.has_failed:
                self._warnings.append(f"the other labs get the rows of {server.url} until it responds: {error.message}")
            server.error, server.has_failed = error.message, True
            self._start(self._await_return(server), "wait for a server")

    async def _await_return(self, server: RowServer) -> None:
        """Wait until a server that has failed responds with the same model, and let it answer rows again."""
        pause_s = MIN_PAUSE_S
        while server.error:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            with contextlib.suppress(LabError):
                if await self._has_model(server):
                    server.error = ""

    async def _has_model(self, server: RowServer) -> bool:
        """Return whether a server has the model of this run."""
        return (await self._find(server.backend)).is_same(self._model)


def _pause_s(error: UnavailableError) -> float:
    """Return the delay after which a request is sent again."""
    return min(max(error.retry_after_s or 1.0, MIN_PAUSE_S), MAX_PAUSE_S)

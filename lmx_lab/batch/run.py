"""Answer rows, with as many concurrent requests as the engines of one or several servers have slots.

Rows are read in the caller's thread, up to a limit ahead of the answers. Requests are sent on the lab's event loop. If
the server cannot accept a request, the request is sent again after the delay that the server returns. If there are
several servers, another one gets the row instead, and the first one gets rows again as soon as it responds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lmx_lab.backend import Backend, read_answer
from lmx_lab.batch.answer import RowAnswer
from lmx_lab.batch.cache import AnswerCache
from lmx_lab.batch.choices import score_choices
from lmx_lab.batch.columns import TypedColumns
from lmx_lab.batch.prompts import Prompt, Row, RowPrompts
from lmx_lab.batch.servers import RowServer, next_server
from lmx_lab.batch.table import LOGPROBS, RowSource, answer_row
from lmx_lab.errors import (
    ERROR_CLASSES,
    BatchStoppedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
    QueueFullError,
    UnavailableError,
    UnreachableError,
    WrongServerError,
)
from lmx_lab.wire.admin import ModelRecord
from lmx_lab.wire.chat import ChatRequest

AHEAD = 256
"""Maximum number of requests that were read and are not finished or, for an iterator, whose answers were not taken."""
DEFAULT_SLOTS = 4
"""Assumed number of slots if the server does not report it."""
STEP_S = 0.25
"""Maximum duration of a step. The progress is shown after each step."""
RETRY_S = 120.0
"""Time in seconds without a finished row after which requests are no longer sent again to a server that does not
respond or that loads the model."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 5.0
"""Minimum and maximum delay before a request is sent again."""
UNFINISHED = RowAnswer(error="was not computed, because the run ended earlier")
CUT_OFF = "the answer is not complete JSON, because it was cut off at max_tokens; increase max_tokens"

ReadChoices = Callable[[Row], Sequence[str]]
"""Returns the choices of a row. Raises ``InvalidRequestError`` if they are invalid."""
MakeRequest = Callable[[Prompt], ChatRequest]
"""Creates the request for a prompt. Raises ``InvalidRequestError`` if it is invalid."""
Errors = Literal["row", "raise"]
Retry = Literal["errors"]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How the rows of a run are answered."""

    prompts: RowPrompts
    make_request: MakeRequest
    parameters: frozenset[str]
    """Names of the parameters that all requests have. If the server refuses a value of one of them, the run ends."""
    columns: TypedColumns | None = None
    choices: ReadChoices | None = None
    """If set, the choices of each row are scored after its prompt, and no answer is generated."""
    chat_template: bool = True
    """Whether the choices are answers to a chat; otherwise, they continue the plain text of the prompt."""
    n: int = 1
    """Number of answers for each row."""
    seed: int | None = None
    errors: Errors = "row"
    retry: Retry | None = None


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


async def loaded_model(backend: Backend, *, hashed: bool) -> LoadedModel:
    """Return the loaded chat model.

    Args:
        hashed: Whether to hash the model's files for the key, if they are on this machine.

    Raises:
        NotLoadedError: no chat model is loaded.
    """
    records = (await backend.models()).models
    record = next((each for each in records if each.loaded and not each.pinned and each.kind == "chat"), None)
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
        slots=record.slots or DEFAULT_SLOTS,
        description=f"{record.id} ({size}) on the engine {record.engine}",
        weights=weights,
    )


async def same_models(backends: Sequence[Backend], *, hashed: bool) -> tuple[LoadedModel, list[RowServer]]:
    """Return the model of the first server, and the other servers, which must have the same model.

    Raises:
        NotLoadedError: one of the servers has no chat model loaded.
        InvalidRequestError: the servers have different models.
    """
    models = [await loaded_model(each, hashed=hashed) for each in backends]
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


@dataclass(kw_only=True)
class _Item:
    """One request for a row."""

    position: int
    label: Any
    sample: int
    request: ChatRequest | None
    choices: tuple[str, ...] = ()
    key: str = ""
    error: InvalidRequestError | None = None
    """The reason why there is no request."""


class BatchRun:
    """Answers the rows of a source.

    ``read`` and ``take`` must be called in one thread; the coroutines run on the lab's event loop.

    Args:
        in_order: Whether the caller takes the answers one by one during the run, which limits the number of answers
            that were not taken.
        others: Other servers with the same model, which also answer rows.
    """

    def __init__(
        self,
        backend: Backend,
        model: LoadedModel,
        source: RowSource,
        options: BatchOptions,
        *,
        cache: AnswerCache | None = None,
        in_order: bool = False,
        others: Sequence[RowServer] = (),
    ) -> None:
        self._model, self._source, self.options = model, source, options
        self._servers = [RowServer(backend, model.slots), *others]
        self._warnings: deque[str] = deque()
        self._cache, self._in_order = cache, in_order
        self._loop: asyncio.AbstractEventLoop | None = None
        self._new: deque[_Item] = deque()
        self._ready: deque[_Item] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rows: dict[int, dict[str, Any]] = {}
        self._repeats: Counter[int] = Counter()
        """Number of requests so far for each prompt, by the first eight bytes of its digest to save memory."""
        self._exhausted = False
        self._stopped = False
        self._probed = options.columns is None
        self._failure: LabError | None = None
        self._changed = asyncio.Event()
        self._progress_at = time.monotonic()
        self._labels = 0
        self._taken = 0
        self.read_items = 0
        """Number of requests whose rows were read."""
        self.done = 0
        self.errors = 0
        self.output_tokens = 0
        """Tokens of answers that this run has computed."""

    # In the caller's thread

    def read(self) -> bool:
        """Read rows up to the limit. Returns whether there are rows that were not read or not finished.

        Warns about servers that failed and whose rows the others answer.

        Raises:
            InvalidRequestError: the first row of an iterable does not have a column of the prompt.
        """
        while self._warnings:
            warnings.warn(self._warnings.popleft(), RuntimeWarning, stacklevel=2)
        while not self._exhausted and not self._stopped and self._has_room:
            found = next(self._source.rows, None)
            if found is None:
                self._exhausted = True
                break
            label, row = found
            if not self._labels and self._source.columns is None:
                self.options.prompts.check(row)
            self._labels += 1
            for sample in range(self.options.n):
                self._new.append(self._item(label, row, sample))
                self.read_items += 1
        return not self._stopped and (not self._exhausted or self.done < self.read_items)

    @property
    def _has_room(self) -> bool:
        return self.read_items - self.done < AHEAD and not (self._in_order and self.read_items - self._taken >= AHEAD)

    def _item(self, label: Any, row: Mapping[str, Any], sample: int) -> _Item:
        item = _Item(position=self.read_items, label=label, sample=sample, request=None)
        options = self.options
        try:
            request = options.make_request(options.prompts.prompt(row))
            item.choices = () if options.choices is None else tuple(options.choices(row))
        except InvalidRequestError as exc:
            item.error = exc
            return item
        if self._cache is not None or options.seed is not None:
            self._identify(item, request)
        if options.seed is not None:
            digest = hashlib.sha256(f"{options.seed} {item.key}".encode()).digest()
            request = request.model_copy(update={"seed": int.from_bytes(digest[:6])})
            item.key = _digest(item.key, request.seed)
        item.request = request
        return item

    def _identify(self, item: _Item, request: ChatRequest) -> None:
        """Set the key of a request. Requests with equal prompts are numbered, so that each has its own key."""
        content = request.model_dump(mode="json", exclude={"model", "seed", "response_format"}, exclude_defaults=True)
        columns = self.options.columns
        scored = [self.options.chat_template, *item.choices] if item.choices else []
        key = _digest(self._model.key, content, columns and dict(columns.json_schema), *scored)
        prompt = int(key[:16], 16)
        item.key = _digest(key, self._repeats[prompt])
        self._repeats[prompt] += 1

    def take(self) -> dict[str, Any] | None:
        """Return the next answer in the order of the rows; None if it is not finished, or the run was stopped."""
        row = None if self._stopped else self._rows.pop(self._taken, None)
        if row is not None:
            self._taken += 1
        return row

    def rows(self) -> list[dict[str, Any]]:
        """Return all answers that were not taken. Rows that were not computed have an error."""
        total = len(self._source.index) * self.options.n
        return [self._rows.get(at) or self._row(at % self.options.n, UNFINISHED) for at in range(self._taken, total)]

    def figures(self) -> list[dict[str, Any]]:
        """Return the statistics of each server as rows of a table. Answers from the cache are not counted."""
        return [server.figures() for server in self._servers]

    # On the event loop

    async def step(self) -> None:
        """Compute answers until rows can be read, the next answer can be taken, or ``STEP_S`` has passed.

        Raises:
            BatchStoppedError: no further row can be answered, for example because the model was unloaded.
            LabError: no row could be answered, or a row failed and ``errors`` is ``raise``.
        """
        self._loop = asyncio.get_running_loop()
        await self._look_up()
        self._start_tasks()
        deadline = time.monotonic() + STEP_S
        while not self._must_return() and (left_s := deadline - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                break
        if self._failure is not None:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            raise self._failure

    def _must_return(self) -> bool:
        if self._failure is not None or self.done >= self.read_items:
            return True
        if self._in_order and self._taken in self._rows:
            return True
        return not self._exhausted and self._has_room and self.read_items - self.done <= AHEAD // 2

    async def stop(self) -> None:
        """Cancel all running requests, and wait until they have ended. Idempotent."""
        self._stopped = True
        self._ready.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Cancel all running requests. Returns immediately; can be called from any thread. Idempotent."""
        self._stopped = True
        if self._tasks and self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self.stop(), self._loop)

    async def _look_up(self) -> None:
        """Finish the new requests whose answers are in the cache, and queue the others."""
        new = [self._new.popleft() for _ in range(len(self._new))]
        keys = [item.key for item in new if item.request is not None]
        found = await self._cache.find(keys) if self._cache is not None and keys else {}
        for item in new:
            if item.error is not None:
                self._finish(item, _failed(item.error))
            elif (answer := found.get(item.key)) is not None and not self._is_retried(answer):
                self._finish(item, answer)
            else:
                self._ready.append(item)
        if self._ready and not self._probed:
            await self._probe()
            self._probed = True

    def _is_retried(self, answer: RowAnswer) -> bool:
        return self.options.retry == "errors" and self._read_values(answer)[0].error is not None

    async def _probe(self) -> None:
        """Check that the schema can be enforced, before the first row is sent.

        Raises:
            LabError: the schema cannot be enforced.
        """
        request = self.options.make_request("x").model_copy(update={"max_tokens": 1})
        await self._answer(request, self._servers[0], waits=True)

    def _start_tasks(self) -> None:
        while self._ready and not self._stopped and self._failure is None:
            if (server := next_server(self._servers)) is None:
                return
            server.begin()
            self._start(self._compute(self._ready.popleft(), server), "answer a row")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            if (exc := task.exception()) is not None:
                self._fail(exc if isinstance(exc, LabError) else LabError(f"{type(exc).__name__}: {exc}"))
            self._start_tasks()
        self._changed.set()

    def _fail(self, error: LabError) -> None:
        if self._failure is None:
            self._failure = error
            self._ready.clear()
            for task in self._tasks:
                task.cancel()

    async def _compute(self, item: _Item, server: RowServer) -> None:
        try:
            answer = await self._answer_row(item, server)
            if answer is None:
                return
            server.count(answer)
            storing = asyncio.create_task(self._store(item, answer), name="store an answer")
            try:
                await asyncio.shield(storing)
            except asyncio.CancelledError:
                # A cancelled task also finishes its row, so that the frame has all answers that are in the cache.
                await storing
                raise
        finally:
            server.running -= 1

    async def _answer_row(self, item: _Item, server: RowServer) -> RowAnswer | None:
        """Return the answer to a row, or its error; None if another server gets the row instead.

        Raises:
            LabError: the run cannot continue.
        """
        assert item.request is not None
        try:
            return await self._answer(item.request, server, choices=item.choices)
        except LabError as exc:
            concerns_row = isinstance(exc, InvalidRequestError | EngineError) and not isinstance(exc, EngineDeadError)
            concerns_all = (exc.param or "").partition(".")[0] in self.options.parameters
            if concerns_row and not concerns_all:
                return _failed(exc)
            if concerns_row or not self._has_others(server):
                raise self._stopping_error(exc) from exc
            await self._give_back(item, server, exc)
            return None

    def _has_others(self, server: RowServer) -> bool:
        """Return whether other servers get rows."""
        return any(each is not server and not each.error for each in self._servers)

    async def _give_back(self, item: _Item, server: RowServer, error: LabError) -> None:
        """Queue a row again that a server could not answer, for the other servers."""
        self._ready.appendleft(item)
        server.returned += 1
        if isinstance(error, QueueFullError):
            self._start_tasks()
            await asyncio.sleep(_pause_s(error))
        elif not server.error:
            if not server.has_failed:
                self._warnings.append(
                    f"the other labs answer the rows of {server.url} until it responds: {error.message}"
                )
            server.error, server.has_failed = error.message, True
            self._start(self._await_return(server), "wait for a server")

    async def _await_return(self, server: RowServer) -> None:
        """Wait until a server that has failed responds with the same model, and let it answer rows again."""
        while server.error:
            await asyncio.sleep(MAX_PAUSE_S)
            with contextlib.suppress(LabError):
                if (await loaded_model(server.backend, hashed=False)).is_same(self._model):
                    server.error = ""

    async def _store(self, item: _Item, answer: RowAnswer) -> None:
        """Store an answer in the cache, and finish its row."""
        if self._cache is not None:
            try:
                await self._cache.add(item.key, self._model.id, answer)
            except LabError as exc:
                raise self._stopping_error(exc) from exc
        self.output_tokens += answer.output_tokens or 0
        self._finish(item, answer)

    def _stopping_error(self, error: LabError) -> LabError:
        """Return the error that ends the run. It names the errors of all servers that have failed."""
        if not self.done:
            return error
        if self._cache is not None:
            kept = f"the answers are stored in {self._cache.path}"
        elif self._in_order:
            kept = "pass cache=path to keep all computed answers"
        else:
            kept = "the attribute frame of this error contains the answers"
        errors = [f"{each.url}: {each.error.rstrip('.')}" for each in self._servers if each.error]
        reasons = "; ".join([error.message.rstrip("."), *errors])
        return BatchStoppedError(f"the run ended after {self.done} answers of {self._model.id}: {reasons}; {kept}")

    async def _answer(
        self, request: ChatRequest, server: RowServer, *, choices: Sequence[str] = (), waits: bool = False
    ) -> RowAnswer:
        """Return the answer to a request. Send the request again while the server cannot accept it.

        Args:
            choices: Texts that are scored after the prompt; empty if an answer is generated.
            waits: Whether to send the request again even if other servers could answer it.

        Raises:
            LabError: there is no answer.
        """
        while True:
            try:
                if choices:
                    chat_template = self.options.chat_template
                    return await score_choices(server.backend, request, choices, chat_template=chat_template)
                return await _generate(server.backend, request)
            except UnavailableError as exc:
                if not self._can_retry(exc) or (self._has_others(server) and not waits):
                    raise
                pause_s = _pause_s(exc)
            await asyncio.sleep(pause_s)

    def _can_retry(self, error: UnavailableError) -> bool:
        if isinstance(error, QueueFullError):
            return True
        is_lost = isinstance(error, UnreachableError) and not isinstance(error, WrongServerError)
        if not is_lost and error.retry_after_s is None:
            return False
        return time.monotonic() - self._progress_at < RETRY_S

    def _finish(self, item: _Item, answer: RowAnswer) -> None:
        answer, values = self._read_values(answer)
        self._rows[item.position] = answer_row(answer, values, sample=item.sample if self.options.n > 1 else None)
        self._progress_at = time.monotonic()
        self.done += 1
        if answer.error is None:
            return
        self.errors += 1
        if self.options.errors == "raise":
            kind = ERROR_CLASSES.get(answer.code, LabError)
            self._fail(kind(f"row {item.label!r:.80}: {answer.error}"))

    def _read_values(self, answer: RowAnswer) -> tuple[RowAnswer, dict[str, Any]]:
        """Return the answer, and the values of its other columns. Values that do not match the schema are an error."""
        if (columns := self.options.columns) is None:
            return answer, {} if self.options.choices is None else {LOGPROBS: answer.logprobs}
        missing: dict[str, Any] = dict.fromkeys(columns.dtypes)
        if answer.text is None or answer.error is not None:
            return answer, missing
        try:
            return answer, columns.values(answer.text)
        except (ValueError, RecursionError) as exc:
            error = CUT_OFF if answer.finish_reason == "length" else str(exc)
            return replace(answer, error=error, code=InvalidRequestError.code), missing

    def _row(self, sample: int, answer: RowAnswer) -> dict[str, Any]:
        return answer_row(answer, self._read_values(answer)[1], sample=sample if self.options.n > 1 else None)


def _pause_s(error: UnavailableError) -> float:
    """Return the delay after which a request is sent again."""
    return min(max(error.retry_after_s or 1.0, MIN_PAUSE_S), MAX_PAUSE_S)


async def _generate(backend: Backend, request: ChatRequest) -> RowAnswer:
    started_at = time.monotonic()
    answer, cost = await read_answer(backend, request, batch=True)
    return RowAnswer(
        text=answer.text,
        reasoning=answer.reasoning,
        finish_reason=cost.finish_reason,
        prompt_tokens=cost.usage.prompt_tokens,
        cached_tokens=cost.usage.prompt_tokens_details.cached_tokens,
        output_tokens=cost.usage.completion_tokens,
        ttft_s=cost.ttft_s,
        total_s=time.monotonic() - started_at,
        request_id=cost.request_id,
    )


def _failed(error: LabError) -> RowAnswer:
    return RowAnswer(error=error.message, code=error.code)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

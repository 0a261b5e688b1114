"""Provide a manager with two slots and the tiny model, and helpers for its requests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from lmx_lab.engine import GenerationRequest, ModelManager, Sampling, TokenPrompt, TokenStream
from lmx_lab.engine.interface import InferenceEngine
from lmx_lab.engine.model_control import ModelControl
from lmx_lab.engine.registry import engine_for
from lmx_lab.engine.stream import Item, Mailbox
from lmx_lab.errors import LabError
from lmx_lab.settings import Settings
from lmx_lab.values.generation import GenerationReport, TokenLogprob
from lmx_lab.values.models import Format, LoadReport, LoadSpec, ModelEntry

# Imported by the functions that need it, because it imports mlx-lm, and fast tests import this file.
if TYPE_CHECKING:
    from lmx_lab.engine.mlx.encoding import EncodingLoop
    from lmx_lab.engine.mlx.engine import MlxEngine
    from lmx_lab.engine.mlx.state import MlxCore
    from lmx_lab.engine.mlx.thread import EngineThread

T = TypeVar("T")
GREEDY = Sampling(temperature=0)
# Token 2 ends a text; the tiny model's greedy answer to this prompt does not contain it.
PROMPT = TokenPrompt(tokens=(300, 301, 302))


TWO_SLOTS = Settings(slots=2, queue_limit=2)


class Shared:
    """A manager that the tests of a module use one after the other.

    Only one exists at a time, because the memory that an engine reports is that of the process.
    """

    def __init__(self) -> None:
        self._engine: ModelManager | None = None
        self._configuration: tuple[object, ...] = ()

    @contextlib.contextmanager
    def use(self, settings: Settings, main: ModelEntry, *pinned: ModelEntry) -> Iterator[ModelManager]:
        """Yield a manager with these models and an empty prefix cache. The test must not load or unload models."""
        configuration = (settings, main, *pinned)
        if self._engine is None or self._configuration != configuration:
            self.stop()
            self._engine, self._configuration = ModelManager(settings), configuration
            self._engine.start()
            asyncio.run(load_all(self._engine, main, *pinned))
        manager = self._engine
        asyncio.run(reset(manager))
        models = asyncio.run(loaded_models(manager))
        yield manager
        if not (manager.alive and asyncio.run(are_loaded(manager, models))):
            self.stop()
            pytest.fail("this test changes the loaded models, so it needs a manager of its own")

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        self._engine = None


def engine_of(manager: ModelManager, format: Format) -> InferenceEngine:
    """Return the engine that runs models of this format."""
    return manager.engine(engine_for(format).name)


def mlx_engine(manager: ModelManager) -> MlxEngine:
    from lmx_lab.engine.mlx.engine import MlxEngine

    engine = manager.engine("mlx")
    assert isinstance(engine, MlxEngine)
    return engine


def mlx_thread(manager: ModelManager) -> EngineThread:
    return mlx_engine(manager)._thread


async def pin(manager: ModelManager, entry: ModelEntry) -> LoadReport:
    """Load a model beside the main one."""
    return await manager.load_entry(entry, LoadSpec(model=entry.id, pin=entry.kind))


async def load_all(manager: ModelManager, main: ModelEntry, *pinned: ModelEntry) -> None:
    for entry in pinned:
        await pin(manager, entry)
    await manager.load_entry(main)


async def reset(manager: ModelManager) -> None:
    """Wait until no request is left, and drop the prefix cache."""
    async with asyncio.timeout(60):
        await until_idle(manager)
    await mlx_thread(manager).call(lambda core: core.generating.shrink_prefixes(2**60))


async def loaded_models(manager: ModelManager) -> list[weakref.ref[Any]]:
    return await mlx_thread(manager).call(lambda core: [weakref.ref(model) for _, model in core._in_memory()])


async def are_loaded(manager: ModelManager, models: list[weakref.ref[Any]]) -> bool:
    def are_same(core: MlxCore) -> bool:
        current = [model for _, model in core._in_memory()]
        return len(current) == len(models) and all(
            model() is other for model, other in zip(models, current, strict=True)
        )

    return await mlx_thread(manager).call(are_same)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    shared = Shared()
    yield shared
    shared.stop()


@pytest.fixture
def no_shared_model(shared: Shared) -> None:
    """Unload the shared models, for tests that measure or limit memory."""
    shared.stop()


@pytest.fixture
def manager(shared: Shared, tiny: ModelEntry) -> Iterator[ModelManager]:
    """A shared manager, for tests that do not load or unload models."""
    with shared.use(TWO_SLOTS, tiny) as manager:
        yield manager


@pytest.fixture
async def own_manager(no_shared_model: None, tiny: ModelEntry) -> AsyncIterator[ModelManager]:
    """A manager for one test, which may unload or break its model, or end its thread."""
    async with ModelManager(TWO_SLOTS) as manager:
        await manager.load_entry(tiny)
        yield manager


def request(**changes: Any) -> GenerationRequest:
    return replace(GenerationRequest(prompt=PROMPT, sampling=GREEDY, max_tokens=8), **changes)


def numbers(count: int, *, start: int = 1000) -> TokenPrompt:
    """Return a prompt of ``count`` tokens, beginning with ``start``."""
    return TokenPrompt(tokens=tuple(range(start, start + count)))


async def run(manager: ModelManager, **changes: Any) -> tuple[str, GenerationReport]:
    stream = await manager.submit(request(**changes))
    return await finish(stream)


async def finish(stream: TokenStream) -> tuple[str, GenerationReport]:
    text = "".join([delta.text async for delta in stream])
    assert stream.report is not None
    return text, stream.report


async def finish_with_logprobs(stream: TokenStream) -> tuple[str, list[TokenLogprob]]:
    deltas = [delta async for delta in stream]
    return "".join(delta.text for delta in deltas), [entry for delta in deltas for entry in delta.logprobs]


async def until_idle(manager: ModelManager) -> None:
    # Polled, because the snapshot has no event.
    while manager.snapshot.active_requests + manager.snapshot.queued_requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def until_written(manager: ModelManager, *, files: int = 1) -> AsyncIterator[None]:
    """Wait at the end of the block until this many more files of the prefix cache have been written in it."""
    folder = manager.settings.prefix_cache_dir
    assert folder is not None
    before = len(list(folder.glob("*.safetensors")))
    yield
    async with asyncio.timeout(60):
        while len(list(folder.glob("*.safetensors"))) < before + files:  # noqa: ASYNC110 - another thread writes
            await asyncio.sleep(0.01)


async def until_busy(manager: ModelManager, *, requests: int = 1) -> None:
    while manager.snapshot.active_requests + manager.snapshot.queued_requests < requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def engine_paused(manager: ModelManager) -> AsyncIterator[None]:
    """Pause the engine thread within the block. Afterwards it performs all queued commands before its next step."""
    stopped, resume = threading.Event(), threading.Event()

    def stop(core: MlxCore) -> None:
        stopped.set()
        resume.wait()

    mlx_thread(manager).post(stop)
    await asyncio.to_thread(stopped.wait)
    try:
        yield
    finally:
        resume.set()


async def submit_while_paused(manager: ModelManager, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a call to a paused engine; return its task when the command is in the queue of the thread."""
    before = mlx_thread(manager)._commands.qsize()
    task = asyncio.create_task(work)
    while mlx_thread(manager)._commands.qsize() == before and not task.done():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return task


@pytest.fixture
def delivered_items(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Mailbox, Item]]:
    """All items of streams in the order in which the engine delivers them."""
    items: list[tuple[Mailbox, Item]] = []
    deliver = Mailbox.deliver

    def note(self: Mailbox, item: Item) -> None:
        items.append((self, item))
        deliver(self, item)

    monkeypatch.setattr(Mailbox, "deliver", note)
    return items


class Gate:
    """While closed, stops the engine thread before it computes a layer of texts."""

    def __init__(self) -> None:
        self._reached, self._passes = threading.Semaphore(0), threading.Semaphore(0)
        self._shut = False

    def wait(self) -> None:
        if self._shut:
            self._reached.release()
            self._passes.acquire()

    def shut(self) -> None:
        self._shut = True

    async def reached(self) -> None:
        """Wait until the thread has reached the gate. Each call waits for one arrival."""
        assert await asyncio.to_thread(self._reached.acquire, timeout=60)

    def let_pass(self, layers: int) -> None:
        """Let the thread compute this number of layers. Commands that were posted in the meantime run after the first
        layer, and take effect with the second.
        """
        self._passes.release(layers)

    def open(self) -> None:
        self._shut = False
        self._passes.release()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """An open gate. Each step of the engine computes one layer of texts."""
    from lmx_lab.engine.mlx.encoding import EncodingLoop

    gate, advance = Gate(), EncodingLoop._advance

    def wait_and_advance(encoding: EncodingLoop, batch: Any) -> None:
        gate.wait()
        advance(encoding, batch)

    monkeypatch.setattr(EncodingLoop, "_advance", wait_and_advance)
    monkeypatch.setattr("lmx_lab.engine.mlx.state.ENCODE_S", 0)
    yield gate
    gate.open()


async def unload_when_idle_for(manager: ModelManager, idle_s: float | None) -> None:
    """Change the setting of a manager that is running."""
    manager.settings = replace(manager.settings, idle_unload_s=idle_s)

    async def change(control: ModelControl) -> None:
        control.settings = manager.settings
        control._set_idle_timer()

    await manager._run(change)


async def fail_next_step(manager: ModelManager, exc: BaseException) -> None:
    """Make the next forward pass raise an error."""

    def break_model(core: MlxCore) -> None:
        batch = core.generating.batch
        assert batch is not None

        def fail() -> None:
            weights = batch._model  # in the frame, as in a real forward pass
            assert weights is not None
            raise exc

        batch._generator.next = fail

    await mlx_thread(manager).call(break_model)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Number of ends that each mailbox has received."""
    counted: Counter[int] = Counter()
    deliver = Mailbox.deliver

    def count(self: Mailbox, item: Item) -> None:
        counted[id(self)] += isinstance(item, GenerationReport | LabError)
        deliver(self, item)

    monkeypatch.setattr(Mailbox, "deliver", count)
    return counted

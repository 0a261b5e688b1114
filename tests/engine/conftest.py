"""Provide a manager with two slots and the tiny model, and helpers for its requests."""

import asyncio
import contextlib
import threading
import weakref

import pytest

from lmx_lab.engine import ModelManager
from lmx_lab.engine.stream import Mailbox
from tests.support.engines import TWO_SLOTS, count_ends, load_entry, manager_with, mlx_thread, pin, until_idle


@pytest.fixture(scope="module")
def shared():
    shared = Shared()
    yield shared
    shared.stop()


@pytest.fixture
def no_shared_model(shared):
    """Unload the shared models, for tests that measure or limit memory."""
    shared.stop()


@pytest.fixture
def manager(shared, tiny):
    """A shared manager, for tests that do not load or unload models."""
    with shared.use(TWO_SLOTS, tiny) as manager:
        yield manager


@pytest.fixture
async def own_manager(no_shared_model, tiny):
    """A manager for one test, which may unload or break its model, or end its thread."""
    async with manager_with(tiny, TWO_SLOTS) as manager:
        yield manager


@pytest.fixture
def delivered_items(monkeypatch):
    """All items of streams in the order in which the engine delivers them, each with the ``steps`` of its stream."""
    items = []
    deliver = Mailbox.deliver

    def note(self, item):
        items.append((self.steps, item))
        deliver(self, item)

    monkeypatch.setattr(Mailbox, "deliver", note)
    return items


@pytest.fixture
def gate(monkeypatch):
    """An open gate. Each step of the engine computes one layer of texts."""
    from lmx_lab.engine.mlx.encoding import EncodingLoop
    from lmx_lab.engine.mlx.thread import MlxThread

    gate, advance = Gate(), EncodingLoop._advance

    def wait_and_advance(encoding, batch):
        gate.wait()
        advance(encoding, batch)

    monkeypatch.setattr(EncodingLoop, "_advance", wait_and_advance)
    monkeypatch.setattr(MlxThread, "encode_s", 0)
    yield gate
    gate.open()


@pytest.fixture
def ends(monkeypatch):
    return count_ends(monkeypatch)


class Shared:
    """A manager that the tests of a module use one after the other.

    Only one exists at a time, because the memory that an engine reports is that of the process.
    """

    def __init__(self):
        self._engine = None
        self._configuration = ()

    @contextlib.contextmanager
    def use(self, settings, main, *pinned):
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

    def stop(self):
        if self._engine is not None:
            self._engine.stop()
        self._engine = None


async def load_all(manager, main, *pinned):
    for entry in pinned:
        await pin(manager, entry)
    await load_entry(manager, main)


async def reset(manager):
    """Wait until no request is left, and drop the prefix cache."""
    async with asyncio.timeout(60):
        await until_idle(manager)
    await mlx_thread(manager).call(lambda thread: thread.room.free(2**60))


async def loaded_models(manager):
    return await mlx_thread(manager).call(lambda thread: [weakref.ref(model) for model in thread.models])


async def are_loaded(manager, models):
    def are_same(thread):
        current = list(thread.models)
        return len(current) == len(models) and all(
            model() is other for model, other in zip(models, current, strict=True)
        )

    return await mlx_thread(manager).call(are_same)


class Gate:
    """While closed, stops the engine thread before it computes a layer of texts."""

    def __init__(self):
        self._reached, self._passes = threading.Semaphore(0), threading.Semaphore(0)
        self._shut = False

    def wait(self):
        if self._shut:
            self._reached.release()
            self._passes.acquire()

    def shut(self):
        self._shut = True

    async def reached(self):
        """Wait until the thread has reached the gate. Each call waits for one arrival."""
        assert await asyncio.to_thread(self._reached.acquire, timeout=60)

    def let_pass(self, layers):
        """Let the thread compute this number of layers. Commands that were posted in the meantime run after the first
        layer, and take effect with the second.
        """
        self._passes.release(layers)

    def open(self):
        self._shut = False
        self._passes.release()

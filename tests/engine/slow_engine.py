"""A manager whose engine finishes loads only when a test allows it."""

import asyncio
import contextlib
import threading

from lmx_lab.engine import ChatPrompt, GenerationRequest, ModelManager
from lmx_lab.engine.echo.engine import EchoEngine
from lmx_lab.errors import EngineDeadError, ModelNotFoundError, OutOfMemoryError
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.scanner import Listing
from tests.support.engines import echo_entry
from tests.support.waiting import auntil

SETTINGS = Settings(slots=2, queue_limit=2, echo_tokens_per_s=1000, downloads=False)


ONE, TWO, THREE = (echo_entry(name, context=8192) for name in ("one", "two", "three"))
EMBEDDER = echo_entry("embedder", context=8192, kind="embedding")


class FakeCatalog(Catalog):
    """A catalog of these models, which are not on disk."""

    def __init__(self, *entries):
        super().__init__(SETTINGS)
        self.known = {entry.id: entry for entry in entries}

    def find_formats(self, name, *, local=True, all_formats=False):
        if name not in self.known:
            raise ModelNotFoundError(f"there is no model {name!r}", param="model")
        return [self.known[name]]

    def check(self, entry):
        """All models are complete."""

    async def alisting(self):
        return Listing(entries=tuple(self.known.values()))


class SlowEngine(EchoEngine):
    """An echo engine that records its loads, which wait while ``resume`` is not set."""

    def __init__(self, settings, host):
        super().__init__(settings, host)
        self.resume = threading.Event()
        self.resume.set()
        self.specs = []
        self.failures = {}
        self.hangs = ""
        self.needed_bytes = 0
        """Memory that a model needs to be loaded."""

    async def lose(self, model, error):
        """End a model as if its process had ended. Called on the manager's loop."""
        model.lost = error
        await model.end(error)
        self._host.lost(model)

    async def check(self, entry, spec, *, room_bytes):
        if room_bytes < self.needed_bytes:
            raise OutOfMemoryError(f"{entry.id} needs {self.needed_bytes} bytes, and {room_bytes} are free")
        await super().check(entry, spec, room_bytes=room_bytes)

    async def load(self, entry, spec, *, room_bytes):
        self.specs.append(spec)
        while not self.resume.is_set() or entry.id == self.hangs:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if entry.id in self.failures:
            raise self.failures[entry.id]
        return await super().load(entry, spec, room_bytes=room_bytes)


class Lab:
    """A manager, its engine and the progress that it reports."""

    def __init__(self, settings):
        self.manager = ModelManager(settings, FakeCatalog(ONE, TWO, EMBEDDER), engines={"echo": SlowEngine})
        self.progress = []
        self.manager.add_observer(self.progress.append)

    @property
    def stages(self):
        return [(step.model, step.stage) for step in self.progress]

    @property
    def engine(self):
        return self.manager.engines.get("echo")

    async def begin_load(self, model):
        """Return the task of a load that the engine has begun and finishes only when ``resume`` is set."""
        self.engine.resume.clear()
        before = len(self.engine.specs)
        load = asyncio.create_task(self.manager.load(LoadSpec(model=model)))
        await auntil(lambda: len(self.engine.specs) > before)
        return load

    async def lose(self, model):
        """End a model as if its process had ended."""
        await self.manager._run(lambda: self.engine.lose(model, EngineDeadError("the process has died")))

    async def until_unloading(self):
        """Wait until a model waits for its answers to end before it is unloaded."""
        await auntil(lambda: any(state.unloading for state in self.manager.snapshot.models))


@contextlib.asynccontextmanager
async def running(settings=SETTINGS):
    lab = Lab(settings)
    async with lab.manager:
        yield lab


def request(model=None, *, tokens=5, text="hello"):
    prompt = ChatPrompt(messages=({"role": "user", "content": text},))
    return GenerationRequest(prompt=prompt, model=model, max_tokens=tokens, ignore_eos=True)


async def answer(lab, model=None, **options):
    """Submit a request; return the model that answered it."""
    async with await lab.manager.submit(request(model, **options)) as stream:
        async for _ in stream:
            pass
    assert stream.report is not None
    return stream.report.model


async def start_answer(lab):
    """Return the stream of an answer that would take longer than any of the tests."""
    stream = await lab.manager.submit(request(tokens=8000))
    await anext(stream)
    return stream

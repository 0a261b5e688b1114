"""Tests of a load on llama.cpp that hangs, as on a file system that does not respond: the next request ends it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import psutil
import pytest

from lmx_lab.engine import Engine
from lmx_lab.engine.llama_cpp import process as process_module
from lmx_lab.errors import LabError, NotLoadedError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from tests.engine.conftest import run
from tests.engine.llama_cpp.conftest import entry_of
from tests.faults.chat_requests import CHAT, WAIT_S
from tests.flows.conftest import chat_body, serving, wait_until
from tests.gguf_files import unknown_architecture

SETTINGS = Settings(slots=2, threads=1, memory_limit_bytes=2**30)
STANDS_STILL = """\
import sys, time
if "unknown-architecture" in sys.stdin.readline():
    sys.exit("error loading model: bad magic")
open(__file__ + ".begun", "w").close()
while True:
    time.sleep(60)
"""


class Hanging:
    """Makes processes that are started from now on stop responding when they receive the load request."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._script, self._works = folder / "still.py", process_module.SCRIPT
        self._script.write_text(STANDS_STILL)
        self._monkeypatch = monkeypatch

    def __call__(self, on: bool) -> None:
        self._monkeypatch.setattr(process_module, "SCRIPT", self._script if on else self._works)

    @property
    def begun(self) -> bool:
        """Whether a process has begun to hang."""
        return Path(f"{self._script}.begun").exists()

    @property
    def processes(self) -> int:
        """Number of hanging processes, including ended ones that the system still lists."""
        found = 0
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += str(self._script) in child.cmdline()
        return found


@pytest.fixture
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hanging:
    return Hanging(tmp_path, monkeypatch)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(SETTINGS) as engine:
        yield engine


async def hanging(engine: Engine, hangs: Hanging, entry: ModelEntry) -> asyncio.Task[object]:
    """Start a load and wait until it hangs."""
    hangs(True)
    load = asyncio.create_task(engine.load(entry), name="hangs")
    await begun(load, hangs)
    assert engine.snapshot.state == "loading"
    return load


async def begun(work: asyncio.Task[object], hangs: Hanging) -> None:
    while not hangs.begun:
        assert not work.done(), work
        await asyncio.sleep(0.01)


async def told(load: asyncio.Task[object]) -> str:
    with pytest.raises(NotLoadedError) as given_up:
        await asyncio.wait_for(load, WAIT_S)
    return given_up.value.message


@pytest.fixture(params=["nothing", "mlx", "gguf"])
async def before(request: pytest.FixtureRequest, engine: Engine, tiny: ModelEntry, tiny_gguf: Path) -> None:
    """Load the model that is in memory before the other load begins to hang."""
    if request.param != "nothing":
        await engine.load(tiny if request.param == "mlx" else entry_of(tiny_gguf))


@pytest.mark.anyio
@pytest.mark.usefixtures("before")
async def test_an_unload_ends_a_hanging_load_and_no_model_is_restored(
    engine: Engine, long_gguf: Path, tiny_gguf: Path, hangs: Hanging
) -> None:
    load = await hanging(engine, hangs, entry_of(long_gguf, "long"))
    await asyncio.wait_for(engine.unload(), WAIT_S)
    assert await told(load) == "the load of long was given up: the model is unloaded"
    assert hangs.processes == 0
    assert (engine.snapshot.state, engine.snapshot.entry) == ("empty", None)
    with pytest.raises(NotLoadedError, match="no model is loaded"):
        await run(engine)
    hangs(False)
    await engine.load(entry_of(tiny_gguf))
    assert (await run(engine))[1].output_tokens == 8


@pytest.mark.anyio
@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("made_for", ["mlx", "gguf"])
async def test_another_load_replaces_a_hanging_load(
    engine: Engine, tiny: ModelEntry, *, long_gguf: Path, tiny_gguf: Path, hangs: Hanging, made_for: str
) -> None:
    load = await hanging(engine, hangs, entry_of(long_gguf, "long"))
    hangs(False)
    await asyncio.wait_for(engine.load(tiny if made_for == "mlx" else entry_of(tiny_gguf)), WAIT_S)
    assert await told(load) == "the load of long was given up: tiny is loaded in its place"
    assert hangs.processes == 0
    assert (await run(engine))[1].model == "tiny"


@pytest.mark.anyio
async def test_the_last_of_several_hanging_loads_is_completed(
    engine: Engine, tiny: ModelEntry, long_gguf: Path, tiny_gguf: Path, hangs: Hanging
) -> None:
    first = await hanging(engine, hangs, entry_of(long_gguf, "long"))
    second: asyncio.Task[object] = asyncio.create_task(engine.load(entry_of(tiny_gguf, "second")))
    assert "second is loaded in its place" in await told(first)
    await asyncio.wait_for(engine.unload(), WAIT_S)
    assert "the model is unloaded" in await told(second)
    assert hangs.processes == 0
    await engine.load(tiny)
    assert (await run(engine))[1].model == "tiny"


@pytest.mark.anyio
async def test_a_second_request_for_the_same_model_waits_for_the_same_load(
    engine: Engine, long_gguf: Path, hangs: Hanging
) -> None:
    first = await hanging(engine, hangs, entry_of(long_gguf, "long"))
    again: asyncio.Task[object] = asyncio.create_task(engine.load(entry_of(long_gguf, "long")))
    done, _ = await asyncio.wait([first, again], timeout=0.3)
    assert not done
    assert hangs.processes == 1
    await engine.unload()
    for load in (first, again):
        await told(load)
    assert hangs.processes == 0


@pytest.mark.anyio
async def test_restoring_a_model_that_hangs_blocks_no_other_request(
    engine: Engine, tiny: ModelEntry, *, tiny_gguf: Path, tmp_path: Path, hangs: Hanging
) -> None:
    await engine.load(entry_of(tiny_gguf))
    load = await hanging(engine, hangs, entry_of(unknown_architecture(tiny_gguf, tmp_path), "bad"))
    await asyncio.wait_for(engine.load(tiny), WAIT_S)
    with pytest.raises(UnusableModelError, match=r"bad magic.*could not be loaded again either: .* was given up"):
        await asyncio.wait_for(load, WAIT_S)
    assert hangs.processes == 0
    assert (await run(engine))[1].model == "tiny"


@pytest.mark.anyio
@pytest.mark.usefixtures("before")
async def test_a_hanging_load_of_an_encoder_does_not_block_an_unload(
    engine: Engine, tiny_gguf: Path, minilm_gguf: Path, hangs: Hanging
) -> None:
    hangs(True)
    pin: asyncio.Task[object] = asyncio.create_task(engine.pin(entry_of(minilm_gguf, "minilm")))
    await begun(pin, hangs)
    await asyncio.wait_for(engine.unload(), WAIT_S)
    assert (engine.snapshot.state, engine.snapshot.entry) == ("empty", None)
    # A load has to wait, because it needs the memory size of the encoder.
    load: asyncio.Task[object] = asyncio.create_task(engine.load(entry_of(tiny_gguf)))
    await asyncio.sleep(0.3)
    assert not load.done()
    await asyncio.wait_for(engine.unload(), WAIT_S)
    assert await told(load) == "the load of tiny was given up: the model is unloaded"
    assert not pin.done()
    await asyncio.to_thread(engine.stop)
    with pytest.raises(LabError):
        await asyncio.wait_for(pin, WAIT_S)
    assert hangs.processes == 0


@pytest.mark.anyio
async def test_stopping_the_engine_ends_a_hanging_load(long_gguf: Path, hangs: Hanging) -> None:
    async with Engine(SETTINGS) as engine:
        load = await hanging(engine, hangs, entry_of(long_gguf, "long"))
    with pytest.raises(LabError, match="the engine was stopped"):
        await asyncio.wait_for(load, WAIT_S)
    assert hangs.processes == 0


def test_a_server_accepts_an_unload_while_a_load_hangs(tiny_home: Path, long_gguf: Path, hangs: Hanging) -> None:
    with serving(tiny_home, None, threads=1) as lab, httpx2.Client(base_url=lab.url, timeout=WAIT_S) as http:
        hangs(True)
        answers: list[httpx2.Response] = []
        body = {"model": str(long_gguf)}
        load = threading.Thread(target=lambda: answers.append(http.post("/admin/models/load", json=body)))
        load.start()
        wait_until(lambda: hangs.begun)
        # The response tells the client to retry in a second.
        refused = http.post(CHAT, json=chat_body(model="default"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no-model-loaded")
        assert refused.json()["error"]["retryable"]
        assert (refused.headers["retry-after"], refused.headers.get("x-should-retry")) == ("1", None)
        assert http.get("/readyz").json()["error"]["retryable"]
        # Another load would replace the one for which a client waits.
        assert http.post("/admin/models/load", json={"model": "tiny"}).status_code == 409
        assert http.post("/admin/models/unload").status_code == 200
        load.join(WAIT_S)
        (answer,) = answers
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no-model-loaded")
        assert "given up: the model is unloaded" in answer.json()["error"]["message"]
        assert hangs.processes == 0
        assert http.post("/admin/models/load", json={"model": "tiny"}).status_code == 200
        gone = http.post(CHAT, json=chat_body())
        assert gone.status_code == 200
        http.post("/admin/models/unload")
        none = http.post(CHAT, json=chat_body(model="default"))
        assert (none.status_code, none.json()["error"]["retryable"]) == (503, False)
        assert none.headers["x-should-retry"] == "false"

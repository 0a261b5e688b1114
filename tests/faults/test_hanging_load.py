"""Tests that a hanging load of llama.cpp, as from a file system that does not respond, can be cancelled or replaced."""

import asyncio
import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import httpx2
import psutil
import pytest

from lmx_lab.engine import ModelManager
from lmx_lab.engine.llama_cpp import process as process_module
from lmx_lab.errors import LabError, NotLoadedError, UnusableModelError
from lmx_lab.settings import Settings
from tests.support.asking import CHAT, CHAT_WAIT_S, chat_body, refused
from tests.support.engines import entry_of, load_entry, pin, run
from tests.support.gguf import unknown_architecture
from tests.support.labs import serving
from tests.support.waiting import until

pytestmark = pytest.mark.anyio
SETTINGS = Settings(slots=2, threads=1, memory_limit_bytes=2**30)
HANGING_SCRIPT = """\
import sys, time
if "unknown-architecture" in sys.stdin.readline():
    sys.exit("error loading model: bad magic")
open(__file__ + ".begun", "w").close()
while True:
    time.sleep(60)
"""


class HangingProcesses:
    """A switch with which new processes of llama.cpp hang after they have read their order."""

    def __init__(self, folder, monkeypatch):
        self._script, self._real_script = folder / "hanging.py", process_module.SCRIPT
        self._script.write_text(HANGING_SCRIPT)
        self._monkeypatch = monkeypatch

    def __call__(self, on):
        self._monkeypatch.setattr(process_module, "SCRIPT", self._script if on else self._real_script)

    @property
    def has_begun(self):
        """Whether a process hangs."""
        return Path(f"{self._script}.begun").exists()

    @property
    def processes(self):
        """Number of hanging processes, including ended ones that have not been reaped."""
        found = 0
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += str(self._script) in child.cmdline()
        return found


@pytest.fixture
def hangs(tmp_path, monkeypatch):
    return HangingProcesses(tmp_path, monkeypatch)


@pytest.fixture
async def manager():
    async with ModelManager(SETTINGS) as manager:
        yield manager


async def start_hanging_load(manager, hangs, entry):
    """Start a load, and return its task when it hangs."""
    hangs(True)
    load = asyncio.create_task(load_entry(manager, entry), name="hangs")
    await wait_until_hanging(load, hangs)
    assert manager.snapshot.state == "loading"
    return load


async def wait_until_hanging(work, hangs):
    while not hangs.has_begun:
        assert not work.done(), work
        await asyncio.sleep(0.01)


async def cancelled(load):
    """Return the error message of a cancelled load."""
    with pytest.raises(NotLoadedError) as error:
        await asyncio.wait_for(load, CHAT_WAIT_S)
    return error.value.message


@pytest.fixture(params=["nothing", "mlx", "gguf"])
async def before(request, manager, tiny, tiny_gguf):
    """Load a model, or none, before the load that hangs."""
    if request.param != "nothing":
        await load_entry(manager, tiny if request.param == "mlx" else entry_of(tiny_gguf))


@pytest.mark.usefixtures("before")
async def test_an_unload_cancels_a_hanging_load_and_the_previous_model_is_loaded_again(
    manager, long_gguf, tiny_gguf, hangs
):
    previous = manager.snapshot.model
    load = await start_hanging_load(manager, hangs, entry_of(long_gguf, "long"))
    hangs(False)
    await asyncio.wait_for(manager.unload(), CHAT_WAIT_S)
    end = "no model is loaded" if previous is None else f"the previous model {previous} is loaded again"
    assert await cancelled(load) == f"the load of long was cancelled; {end}"
    assert hangs.processes == 0
    assert manager.snapshot.model == previous
    if previous is None:
        with pytest.raises(NotLoadedError, match="no model is loaded"):
            await run(manager)
        await load_entry(manager, entry_of(tiny_gguf))
    assert (await run(manager))[1].output_tokens == 8


async def test_a_hanging_load_ends_at_its_time_limit_with_its_process(long_gguf, hangs):
    async with ModelManager(replace(SETTINGS, load_timeout_s=3)) as manager:
        hangs(True)
        with pytest.raises(NotLoadedError, match=r"long was not loaded within 3 s.*load_timeout_s"):
            await load_entry(manager, entry_of(long_gguf, "long"))
        assert hangs.processes == 0


async def test_loading_the_previous_model_again_can_be_replaced_too(manager, tiny, *, tiny_gguf, tmp_path, hangs):
    await load_entry(manager, entry_of(tiny_gguf))
    load = await start_hanging_load(manager, hangs, entry_of(unknown_architecture(tiny_gguf, tmp_path), "bad"))
    await asyncio.wait_for(load_entry(manager, tiny, if_busy="replace"), CHAT_WAIT_S)
    with pytest.raises(UnusableModelError, match=r"bad magic.*could not be loaded again either: .* was cancelled"):
        await asyncio.wait_for(load, CHAT_WAIT_S)
    assert hangs.processes == 0
    assert (await run(manager))[1].model == "tiny"


@pytest.mark.usefixtures("before")
async def test_a_hanging_load_of_a_pinned_model_does_not_delay_an_unload(manager, tiny_gguf, minilm_gguf, hangs):
    hangs(True)
    pinning = asyncio.create_task(pin(manager, entry_of(minilm_gguf, "minilm")))
    await wait_until_hanging(pinning, hangs)
    await asyncio.wait_for(manager.unload(), CHAT_WAIT_S)
    assert (manager.snapshot.state, manager.snapshot.entry) == ("empty", None)
    # A load waits until the memory of the pinned model is known.
    load = asyncio.create_task(load_entry(manager, entry_of(tiny_gguf)))
    await asyncio.sleep(0.3)
    assert not load.done()
    await asyncio.wait_for(manager.unload(), CHAT_WAIT_S)
    assert await cancelled(load) == "the load of tiny was cancelled; no model is loaded"
    assert not pinning.done()
    await asyncio.to_thread(manager.stop)
    with pytest.raises(LabError):
        await asyncio.wait_for(pinning, CHAT_WAIT_S)
    assert hangs.processes == 0


def test_a_server_accepts_an_unload_while_a_load_hangs(tiny_home, long_gguf, hangs):
    with serving(tiny_home, None, threads=1) as lab, httpx2.Client(base_url=lab.url, timeout=CHAT_WAIT_S) as http:
        hangs(True)
        answers = []
        body = {"model": str(long_gguf)}
        load = threading.Thread(target=lambda: answers.append(http.post("/admin/models/load", json=body)))
        load.start()
        until(lambda: hangs.has_begun)
        # The error tells the client to retry after a second.
        early = http.post(CHAT, json=chat_body(model="default"))
        assert refused(early, 503, "no-model-loaded")["retryable"]
        assert (early.headers["retry-after"], early.headers.get("x-should-retry")) == ("1", None)
        assert http.get("/readyz").json()["error"]["retryable"]
        # The hanging load is not replaced, because a client waits for it.
        assert http.post("/admin/models/load", json={"model": "tiny"}).status_code == 409
        assert http.post("/admin/models/unload").status_code == 200
        load.join(CHAT_WAIT_S)
        (answer,) = answers
        assert "was cancelled; no model is loaded" in refused(answer, 503, "no-model-loaded")["message"]
        assert hangs.processes == 0
        assert http.post("/admin/models/load", json={"model": "tiny"}).status_code == 200
        assert http.post(CHAT, json=chat_body()).status_code == 200
        http.post("/admin/models/unload")
        none = http.post(CHAT, json=chat_body(model="default"))
        assert not refused(none, 503, "no-model-loaded")["retryable"]
        assert none.headers["x-should-retry"] == "false"

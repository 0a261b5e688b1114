"""The process of a model ends cleanly, is protected from other programs, and reports bad files."""

import asyncio
import dataclasses
import gc
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import weakref
from pathlib import Path

import httpx2
import psutil
import pytest

from lmx_lab.engine import ChatPrompt, EmbeddingRequest, ModelManager, TextPrompt
from lmx_lab.engine.llama_cpp import process as process_module
from lmx_lab.engine.llama_cpp.engine import LlamaCppEngine
from lmx_lab.engine.llama_cpp.memory_plan import plan_context
from lmx_lab.engine.llama_cpp.process import LlamaProcess, llama_environ, missing_part
from lmx_lab.engine.memory import HEADROOM_BYTES, Budget, usable_cores
from lmx_lab.engine.model import EngineHost
from lmx_lab.errors import (
    EngineDeadError,
    GenerationTimeoutError,
    InvalidRequestError,
    LabError,
    NotLoadedError,
    OutOfMemoryError,
    UnusableModelError,
)
from lmx_lab.values.models import LoadSpec
from lmx_lab.weights.fingerprint import with_marks
from lmx_lab.weights.gguf.header import read_header
from tests.support.engines import (
    LLAMA_SETTINGS,
    entry_of,
    finish,
    llama_model,
    load_entry,
    manager_with,
    numbers,
    pin,
    process_of,
    request,
    run,
    system_process_of,
    until_busy,
    until_idle,
)
from tests.support.gguf import foreign, split_gguf, truncated, unknown_architecture, with_template
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio
LONG = {"max_tokens": 8192, "ignore_eos": True}


async def busy_streams(manager):
    """Submit two requests that decode, and one that stays in the queue; return their streams."""
    streams = [await manager.submit(request(prompt=numbers(5, start=at), **LONG)) for at in (100, 200, 300)]
    for stream in streams[:2]:
        await anext(stream)
    return streams


async def death_message(stream):
    """Check that the stream ends with ``EngineDeadError``, and return the message."""
    with pytest.raises(EngineDeadError) as died:
        await asyncio.wait_for(finish(stream), 60)
    return died.value.message


# The end of the process


async def test_the_death_of_the_process_ends_all_requests_and_a_load_starts_another(manager, long_gguf):
    streams = await busy_streams(manager)
    system_process_of(manager).kill()
    for stream in streams:
        message = await death_message(stream)
        assert "tiny has died: its process was ended by SIGKILL" in message
        assert "load a model again" in message
    assert (manager.snapshot.state, manager.snapshot.entry) == ("dead", None)
    assert manager.snapshot.active_requests + manager.snapshot.queued_requests == 0
    assert not manager.alive
    with pytest.raises(EngineDeadError):
        await manager.submit(request())
    await load_entry(manager, entry_of(long_gguf))
    assert manager.alive
    assert (await run(manager))[1].output_tokens == 8


async def test_a_process_that_exceeds_its_memory_limit_is_ended(manager):
    streams = await busy_streams(manager)
    process_of(manager)._max_bytes = 2**20
    for stream in streams:
        assert "used more than 0.0 GB of memory" in await death_message(stream)


async def test_a_load_ends_when_other_programs_take_its_memory(long_gguf):
    message = r"out of memory: 0\.01 GB were free on this machine .*; end other programs"
    with pytest.raises(OutOfMemoryError, match=message):
        await LlamaProcess.start(long_gguf, {}, environ={}, max_bytes=2**33, free_bytes=lambda: 10**7)


async def test_a_process_that_the_system_kills_during_a_load_is_an_error_of_the_memory(long_gguf, tmp_path):
    killed = tmp_path / "killed_while_loading.py"
    killed.write_text("import os, signal, sys\nsys.stdin.readline()\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(OutOfMemoryError, match="ended by SIGKILL, probably because memory ran out; choose a smaller"):
        await LlamaProcess.start(long_gguf, {}, environ={}, max_bytes=2**33, program=[str(killed)])


async def test_a_load_that_exceeds_its_limit_is_an_error_of_the_memory(long_gguf):
    with pytest.raises(OutOfMemoryError, match=r"it used more than 0\.0 GB of memory; choose a smaller"):
        await LlamaProcess.start(long_gguf, {}, environ={}, max_bytes=2**20)


async def test_the_previous_model_is_loaded_again_if_other_programs_use_the_memory(long_gguf, tmp_path):
    entry, total = entry_of(long_gguf), 2**40
    needed = plan_context(entry, read_header(entry.path), slots=2, limit_bytes=2**30).bytes - entry.load_bytes
    (tmp_path / "memory.max").write_text(str(total))
    (tmp_path / "memory.current").write_text("0")
    budget = Budget(2**30, cgroups=tmp_path, membership=tmp_path / "none")
    short = LoadSpec(model="long", context_length=512)
    async with manager_with(entry, LLAMA_SETTINGS, spec=short, budget=budget) as manager:
        (tmp_path / "memory.current").write_text(str(total - needed - HEADROOM_BYTES + 1))
        message = r"needs 0\.\d\d GB more, and of the 0\.\d\d GB that are free .*; the previous .* is loaded again"
        with pytest.raises(OutOfMemoryError, match=message):
            await load_entry(manager, entry)
        assert manager.snapshot.context_length == 512
        assert (await run(manager))[1].output_tokens == 8


async def test_a_pinned_model_survives_the_death_of_the_main_one(manager, minilm_gguf):
    await pin(manager, entry_of(minilm_gguf, "minilm"))
    system_process_of(manager).kill()
    while manager.snapshot.state != "dead":  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert (await manager.embed(EmbeddingRequest(inputs=("sea",)))).vectors.shape == (1, 384)


async def test_the_death_of_a_pinned_model_ends_only_its_requests(manager, minilm_gguf, long_gguf):
    entry = entry_of(minilm_gguf, "minilm")
    await pin(manager, entry)
    model = llama_model(manager, "embedding")
    texts = tuple(f"{at} " + "of the sea " * 60 for at in range(64))
    pending = [asyncio.create_task(manager.embed(EmbeddingRequest(inputs=texts))) for _ in range(2)]
    await until_busy(manager, requests=2)
    system_process_of(model).kill()
    for each in pending:
        with pytest.raises(LabError):
            await asyncio.wait_for(each, 60)
    assert manager.snapshot.state == "ready"
    assert (await run(manager))[1].output_tokens == 8
    # The pinned model is loaded again in a new process.
    async with asyncio.timeout(60):
        while manager.model_for(None, ("embedding",)) in (None, model):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await until_idle(manager)
    assert (await manager.embed(EmbeddingRequest(inputs=("sea",)))).vectors.shape == (1, 384)


async def test_an_unloaded_model_is_released_without_a_collection_of_cycles(manager):
    gc.disable()
    try:
        assert (await run(manager))[1].output_tokens == 8
        model = weakref.ref(llama_model(manager))
        await manager.unload()
        async with asyncio.timeout(30):
            while model() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    finally:
        gc.enable()


async def test_a_file_that_is_truncated_while_it_is_used_ends_only_the_process(tiny_gguf, tmp_path):
    path = tmp_path / "cut.gguf"
    shutil.copy(tiny_gguf, path)
    async with manager_with(entry_of(path), LLAMA_SETTINGS) as manager:
        assert (await run(manager))[1].output_tokens == 8
        os.truncate(path, 4096)
        # The truncation may be detected before the request is sent.
        with pytest.raises(EngineDeadError, match="SIGBUS: its file was changed or cut short"):
            await asyncio.wait_for(run(manager, prompt=numbers(300), max_tokens=100), 60)
        assert manager.snapshot.state == "dead"
        await load_entry(manager, entry_of(tiny_gguf))
        assert (await run(manager))[1].output_tokens == 8


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit the memory of a process")
async def test_the_memory_of_the_process_has_a_hard_limit_in_proportion_to_the_model(manager):
    soft, hard = system_process_of(manager).rlimit(psutil.RLIMIT_DATA)
    assert soft == hard
    assert 2**30 < hard < 4 * 2**30


# Cleanup


async def test_an_unload_ends_the_process_and_removes_its_folder(long_gguf):
    async with ModelManager(LLAMA_SETTINGS) as manager:
        seen = []
        for _ in range(2):
            await load_entry(manager, entry_of(long_gguf))
            seen.append((system_process_of(manager), Path(process_of(manager).socket).parent))
            await run(manager)
            assert await manager.unload() > 10_000_000
        await load_entry(manager, entry_of(long_gguf))
        seen.append((system_process_of(manager), Path(process_of(manager).socket).parent))
        await busy_streams(manager)
    for process, folder in seen:
        assert not process.is_running()
        assert not folder.exists()


# Access


async def test_the_process_requires_its_key_and_listens_on_no_port(manager):
    assert [
        connection
        for connection in system_process_of(manager).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ] == []
    hosted = process_of(manager)
    folder = Path(hosted.socket).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert hosted.api_key not in " ".join(system_process_of(manager).cmdline())
    async with httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=hosted.socket)) as client:
        body = {"prompt": [300], "n_predict": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert (await client.post("http://llama/completion", json=body, headers=headers)).status_code == 401
        right = {"Authorization": f"Bearer {hosted.api_key}"}
        assert (await client.post("http://llama/completion", json=body, headers=right)).status_code == 200


# Bad files


async def load_bad_file(manager, path):
    """Load a bad file, and check that ``tiny`` is loaded afterwards; return the error message."""
    good = manager.snapshot.entry
    assert good is not None
    # An entry like that of the file before it was damaged.
    bad = dataclasses.replace(good, id="bad", path=path)
    with pytest.raises(UnusableModelError) as failed:
        await load_entry(manager, entry_of(path, "bad") if path.name == "unknown-architecture.gguf" else bad)
    assert (manager.snapshot.model, manager.snapshot.state) == ("tiny", "ready")
    assert (await run(manager))[1].output_tokens == 8
    assert path.name in failed.value.message
    return failed.value.message


async def test_the_error_of_a_bad_file_names_it_and_the_previous_model_stays(manager, tiny_gguf, tmp_path):
    message = await load_bad_file(manager, unknown_architecture(tiny_gguf, tmp_path / "unknown"))
    assert "unknown model architecture: 'zzzzz'" in message
    assert message.endswith("; the previous model tiny is loaded again")
    process = process_of(manager)
    children = [
        child.pid for child in psutil.Process().children() if "llama_cpp/worker.py" in " ".join(child.cmdline())
    ]
    assert children == [system_process_of(manager).pid], "the failed load left a process"
    # These files are refused before the previous model is unloaded.
    for bad in (
        truncated(tiny_gguf, tmp_path / "half"),
        truncated(tiny_gguf, tmp_path / "header", keep=0.001),
        foreign(tmp_path / "foreign"),
        tmp_path / "missing.gguf",
        tmp_path,
    ):
        assert len(await load_bad_file(manager, bad)) < 500
    (tmp_path / "empty.gguf").write_bytes(b"")
    await load_bad_file(manager, tmp_path / "empty.gguf")
    assert process_of(manager) is process


async def test_the_error_of_an_incomplete_set_of_files_names_the_missing_one(manager, tiny_gguf, tmp_path):
    first, second, third = split_gguf(tiny_gguf, 3, tmp_path)
    whole = entry_of(first, "parts")
    await load_entry(manager, whole)
    assert (await run(manager))[1].model == "parts"
    await manager.unload()
    second.unlink()
    with pytest.raises(UnusableModelError, match=f"{second.name}.*fetch the model again"):
        await load_entry(manager, whole)
    assert third.exists()


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{% for message in messages %}{{ message.content", InvalidRequestError, "unexpected end of template"),
        (None, LabError, "tiny has no chat template; send a prompt to /v1/completions instead"),
    ],
    ids=["invalid", "none"],
)
async def test_a_model_without_a_valid_template_refuses_messages(tiny_gguf, tmp_path, template, error, message):
    async with manager_with(entry_of(with_template(tiny_gguf, template, tmp_path)), LLAMA_SETTINGS) as manager:
        with pytest.raises(error, match=message):
            await run(manager, prompt=ChatPrompt(messages=({"role": "user", "content": "hi"},)))
        assert (await run(manager))[1].output_tokens == 8


# Without llama.cpp


async def test_without_the_package_the_error_names_the_command_that_installs_it(tiny_gguf, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        process_module.importlib.util,
        "find_spec",
        lambda name, *more: None if name == "xllamacpp" else find(name, *more),
    )
    async with ModelManager(LLAMA_SETTINGS) as manager:
        with pytest.raises(UnusableModelError) as failed:
            await load_entry(manager, entry_of(tiny_gguf))
        assert "pip install 'lmx-lab[gguf]'" in failed.value.message
        assert f"lmx-lab pull {tiny_gguf} --mlx" in failed.value.message
        with pytest.raises(NotLoadedError, match="no model is loaded; load one first"):
            await run(manager)


# Errors of the system


async def test_after_an_error_of_a_full_disk_the_previous_model_is_loaded_again(
    manager, tiny_gguf, tmp_path, monkeypatch
):
    full, real = [True], process_module.tempfile.mkdtemp

    def mkdtemp(*args, **options):
        if full.pop() if full else False:
            raise OSError(28, "No space left on device", str(tmp_path))
        return real(*args, **options)

    monkeypatch.setattr(process_module.tempfile, "mkdtemp", mkdtemp)
    other = shutil.copy(tiny_gguf, tmp_path / "other.gguf")
    with pytest.raises(UnusableModelError, match=r"No space left on device; free space there.*tiny is loaded again"):
        await load_entry(manager, entry_of(Path(other), "other"))
    assert manager.snapshot.state == "ready"
    assert (await run(manager))[1].output_tokens == 8


async def test_a_suspended_process_delays_neither_deadlines_nor_the_stop(long_gguf):
    async with manager_with(entry_of(long_gguf), LLAMA_SETTINGS) as manager:
        process = system_process_of(manager)
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 (the signal takes effect later)
            await asyncio.sleep(0.001)
        with pytest.raises(GenerationTimeoutError, match=r"time limit of 0\.2 s"):
            await manager.submit(request(prompt=TextPrompt(text="a"), timeout_s=0.2))
    assert not process.is_running()


@pytest.mark.long
async def test_the_process_ends_with_its_parent_even_if_a_fork_of_the_parent_is_running(manager, long_gguf):
    program = f"""
import asyncio, os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from lmx_lab.engine import ModelManager
from tests.support.engines import LLAMA_SETTINGS as SETTINGS, entry_of, load_entry, system_process_of

async def main():
    manager = ModelManager(SETTINGS)
    manager.start()
    await load_entry(manager, entry_of(Path({str(long_gguf)!r})))
    if not os.fork():
        os.close(1)
        time.sleep(30)
        os._exit(0)
    print(system_process_of(manager).pid, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    worker = psutil.Process(int(await parent.stdout.readline()))
    await parent.wait()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [worker], timeout=20)
    assert gone


def test_a_worker_that_gets_no_parameters_removes_its_folder(tmp_path):
    folder = tmp_path / "lmx-folder"
    folder.mkdir()
    command = [sys.executable, "-P", str(process_module.SCRIPT), str(folder), str(os.getpid())]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert not folder.exists()


@pytest.fixture
async def loaded(long_gguf):
    """A model of the engine without a manager, and the models that the engine has lost."""
    lost = []
    engine = LlamaCppEngine(LLAMA_SETTINGS, EngineHost(lost=lost.append))
    entry, spec = with_marks(entry_of(long_gguf)), LoadSpec(model="tiny")
    await engine.check(entry, spec, room_bytes=2**30)
    model = await engine.load(entry, spec, room_bytes=2**30)
    yield model, lost
    await model.close(EngineDeadError("the test has ended"))


async def test_a_lost_model_has_told_its_host_when_its_requests_end(loaded):
    model, lost = loaded
    (stream,) = await model.generate(request(**LONG), model.admission.admit(1), asyncio.get_running_loop())
    await anext(stream)
    system_process_of(model).kill()
    message = await death_message(stream)
    assert (lost, model.lost.message) == ([model], message)
    assert (model.memory_bytes, model.state().requests, model.admission.active) == (0, 0, 0)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await model.generate(request(), model.admission.admit(1), asyncio.get_running_loop())
    assert await model.close(NotLoadedError("it was unloaded")) == 0


async def test_a_close_whose_caller_is_cancelled_ends_the_process(loaded):
    model, lost = loaded
    (stream,) = await model.generate(request(**LONG), model.admission.admit(1), asyncio.get_running_loop())
    await anext(stream)
    process = system_process_of(model)
    closing = asyncio.create_task(model.close(NotLoadedError("it was unloaded")))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(NotLoadedError, match="it was unloaded"):
        await asyncio.wait_for(finish(stream), 60)
    await auntil(lambda: not process.is_running())
    assert (closing.cancelled(), lost) == (True, [])


async def test_a_load_that_is_cancelled_when_its_process_is_ready_leaves_no_process(long_gguf, monkeypatch):
    started, start = [], LlamaProcess.start

    async def start_and_cancel(*arguments, **options):
        started.append(await start(*arguments, **options))
        asyncio.get_running_loop().call_soon(load.cancel)
        return started[0]

    monkeypatch.setattr(LlamaProcess, "start", start_and_cancel)
    engine = LlamaCppEngine(LLAMA_SETTINGS, EngineHost())
    load = asyncio.create_task(engine.load(with_marks(entry_of(long_gguf)), LoadSpec(model="tiny"), room_bytes=2**30))
    await asyncio.wait([load])
    assert load.cancelled()
    assert not psutil.pid_exists(started[0]._process.pid)


async def test_a_load_that_is_cancelled_repeatedly_waits_for_the_end_of_its_process(tmp_path, monkeypatch):
    loading = []
    hangs = asyncio.Event()

    async def hang(process, *_):
        loading.append(process)
        hangs.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(LlamaProcess, "_load", hang)
    load = asyncio.create_task(LlamaProcess.start(tmp_path / "model.gguf", {}, environ={}, max_bytes=2**40))
    await hangs.wait()
    # As when the loop is closed while a cancelled load ends its process.
    while not load.done():
        load.cancel()
        await asyncio.sleep(0)
    assert load.cancelled()
    assert loading[0]._process.returncode is not None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bind threads to cores")
@pytest.mark.skipif(usable_cores() == 1, reason="all threads share the only core")
@pytest.mark.parametrize("threads", [usable_cores(), usable_cores() - 1])
async def test_each_computing_thread_has_its_own_core_unless_there_are_fewer_threads_than_cores(threads, long_gguf):
    async with manager_with(entry_of(long_gguf), dataclasses.replace(LLAMA_SETTINGS, threads=threads)) as manager:
        await run(manager)
        bound = {frozenset(os.sched_getaffinity(thread.id)) for thread in system_process_of(manager).threads()}
    own = bound - {frozenset(os.sched_getaffinity(0))}
    assert len(own) == (threads if threads == usable_cores() else 0)
    assert sum(map(len, own)) == len(frozenset().union(*own))


def test_variables_of_the_user_decide_how_threads_share_cores():
    bound = llama_environ({}, usable_cores())
    assert (bound["OMP_PLACES"], bound["OMP_PROC_BIND"]) == ("cores", "true")
    assert not {"OMP_PLACES", "OMP_PROC_BIND"} & llama_environ({"OMP_PROC_BIND": "false"}, usable_cores()).keys()
    assert "GOMP_SPINCOUNT" not in llama_environ({"OMP_WAIT_POLICY": "passive"}, usable_cores())


def test_only_as_many_threads_of_llama_cpp_as_cores_are_bound_to_cores():
    # Other threads would all inherit the core of the first one, or share a core while another one is idle.
    for threads in (None, usable_cores() + 1):
        assert not {"OMP_PLACES", "OMP_PROC_BIND"} & llama_environ({}, threads).keys()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bind threads to cores")
@pytest.mark.skipif(usable_cores() == 1, reason="there is only one core")
def test_a_check_for_libgomp_binds_no_thread_of_the_lab_to_a_core():
    code = (
        "import os; from lmx_lab.engine.llama_cpp.process import missing_part; "
        "print(missing_part(), len(os.sched_getaffinity(0)))"
    )
    environ = os.environ | {"OMP_PROC_BIND": "true"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", str(len(os.sched_getaffinity(0)))]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bind threads to cores")
def test_a_check_for_libgomp_works_where_threads_may_not_choose_their_cores(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert missing_part() is None

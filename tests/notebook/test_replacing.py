"""Test launches that would replace a running lab and fail: before anything was changed, and during a load."""

import asyncio
import contextlib
import os
import shutil
import socket
import threading
from pathlib import Path

import httpx2
import numpy as np
import pytest

import lmx_lab
from lmx_lab.engine import engines
from lmx_lab.engine.echo.engine import EchoEngine
from lmx_lab.errors import (
    DaemonRunningError,
    HostingError,
    InvalidRequestError,
    ModelBusyError,
    ModelNotFoundError,
    NotLoadedError,
    OutOfMemoryError,
    PortTakenError,
    UnusableModelError,
)
from lmx_lab.http.uvicorn_server import bind
from lmx_lab.notebook import addresses
from tests.support.daemons import serving as serving_daemon
from tests.support.gguf import unknown_architecture, with_context
from tests.support.labs import manager_of, running_answer
from tests.support.models import write_tiny_bert, write_tiny_llama
from tests.support.waiting import interrupt

WAIT_S = 60.0
LONG = {"max_tokens": 8000, "ignore_eos": True, "temperature": 0}
"""An answer that runs longer than any launch that fails at a check."""
SMALL = 1_000_000
"""A memory limit that is too small for each model."""
NO_ROOM = 7_000_000
"""A memory limit that is sufficient for the weights of a tiny model, but not for a request."""


@pytest.fixture(scope="module")
def home(tmp_path_factory, starter_home, tiny_gguf):
    """A home with models in both formats: usable ones, damaged ones, and some that fail only when they are read."""
    home = tmp_path_factory.mktemp("replacing")
    models, starter = home / "models", starter_home / "models" / "smollm2-135m"
    for seed, name in enumerate(("long", "other")):
        write_tiny_llama(models / name, starter, seed=seed, context=8192)
    write_tiny_bert(models / "embedder")
    write_tiny_bert(models / "reranker", labels=1)
    nan = {"embeddings.LayerNorm.weight": np.full(32, np.nan, np.float32)}
    write_tiny_bert(models / "not-finite", change=nan)
    for name in ("cut", "no-config", "no-header", "missing-layer"):
        shutil.copytree(models / "other", models / name)
    os.truncate(models / "cut" / "model.safetensors", 4096)
    (models / "no-config" / "config.json").write_text("{")
    (models / "no-header" / "model.safetensors").write_bytes(bytes(4096))
    config = models / "missing-layer" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    (home / "files").mkdir()
    with_context(tiny_gguf, 8192, home / "files").rename(home / "files" / "long-file.gguf")
    unknown_architecture(tiny_gguf, home / "files").rename(home / "files" / "unknown.gguf")
    shutil.copyfile(tiny_gguf, home / "files" / "cut-file.gguf")
    os.truncate(home / "files" / "cut-file.gguf", 100_000)
    return home


@pytest.fixture
def options(home):
    return {"home": home, "model_folders": [home / "files"], "port": 0, "threads": 1}


@pytest.fixture(scope="module", autouse=True)
def _no_lab_remains():
    yield
    if (lab := lmx_lab.current()) is not None:
        lab.stop()


@pytest.fixture(scope="module", params=["long", "long-file.gguf"], ids=["mlx", "gguf"])
def model(request):
    """A model that answers in this process, or in another one."""
    return request.param


MLX_ONLY = pytest.mark.parametrize("model", ["long"], indirect=True, ids=["mlx"])


@pytest.fixture
def running(model, options):
    """A lab with this model: that of the previous test, if it is unchanged."""
    return lmx_lab.launch(model, **options)


@contextlib.contextmanager
def unchanged(lab):
    """Check that the code in the block leaves a lab as it is: its running answer, model, port and panels."""
    main, workbench, url = manager_of(lab).main, lab.workbench, lab.url
    with running_answer(lab, **LONG) as pieces:
        yield pieces
        next(pieces)
    assert (lmx_lab.current(), lab.running, lab.url) == (lab, True, url)
    # A model that was loaded again is another object.
    assert manager_of(lab).main is main
    assert httpx2.get(f"{url}/readyz").json()["model"] == main.entry.id
    assert lab.chat("hello", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    assert lab.workbench is workbench
    assert (workbench.backend.state().state, workbench.backend.state().url) == ("running", url)


def restored(lab, model):
    """Check that a lab runs again with its model after its place was not taken."""
    assert (lmx_lab.current(), lab.running, manager_of(lab).snapshot.model) == (lab, True, model)
    assert httpx2.get(f"{lab.url}/readyz").json()["model"] == model
    assert lab.chat("hello", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
    assert lab.workbench.backend.state().state == "running"


# --- models that cannot be loaded


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "logn"}, ModelNotFoundError, r"there is no model 'logn' on disk; did you mean 'long'\?"),
        ({"model": "/nowhere"}, ModelNotFoundError, "there is no model '/nowhere'"),
        ({"model": "cut"}, UnusableModelError, r"model\.safetensors"),
        ({"model": "no-config"}, UnusableModelError, r"config\.json cannot be read"),
        ({"model": "no-header"}, UnusableModelError, r"model\.safetensors"),
        ({"model": "cut-file.gguf"}, UnusableModelError, r"cut-file\.gguf"),
        ({"model": "missing-layer"}, UnusableModelError, "Missing 9 parameters"),
        ({"model": "other", "memory_limit_bytes": NO_ROOM}, OutOfMemoryError, "enough for 0 tokens"),
        *(
            ({"model": model, "memory_limit_bytes": SMALL}, OutOfMemoryError, "GB are allowed; choose a smaller")
            for model in ("other", "long-file.gguf")
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_leaves_the_lab_as_it_is(running, options, changes, error, message):
    # With the same settings, the load is refused by the lab itself.
    for settings in (changes, {"slots": 3, **changes}):
        with unchanged(running), pytest.raises(error, match=message):
            lmx_lab.launch(**options, **settings)


@MLX_ONLY
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"engine": "llama.cpp"}, UnusableModelError, "runs on mlx and not on llama.cpp"),
        ({"model": "long-file.gguf", "engine": "mlx"}, UnusableModelError, "runs on llama.cpp and not on mlx"),
        ({"engine": "metal"}, InvalidRequestError, "engine: Input should be .*given: 'metal'"),
        ({"embedder": "embedder2"}, ModelNotFoundError, "did you mean 'embedder'"),
        ({"embedder": "other"}, UnusableModelError, "other is a chat model"),
        ({"model": None, "reranker": "embedder"}, UnusableModelError, "a reranker is needed here: load it as the main"),
        ({"model": "unknown-model", "embedder": "embedder", "reranker": "reranker"}, ModelNotFoundError, "no model"),
        ({"model": "echo", "echo_script": Path("no-script.jsonl")}, UnusableModelError, "no-script"),
        ({"slots": 0}, InvalidRequestError, "slots is 0"),
        ({"slot": 3}, InvalidRequestError, "did you mean 'slots'"),
        ({"loop": "kernel"}, InvalidRequestError, "running event loop"),
        ({"api_key": "two words"}, InvalidRequestError, "api_key must be a single word"),
        ({"cors_origins": ["*"]}, InvalidRequestError, "cors_origins"),
        ({"record_to": Path("/proc/no-folder/records.sqlite")}, InvalidRequestError, "cannot be used as a recording"),
        ({"host": "192.0.2.77"}, HostingError, "cannot listen on '192.0.2.77'"),
        ({"announce": True}, InvalidRequestError, "lan=True"),
        ({"announce": True, "announce_name": "my.lab", "lan": True}, InvalidRequestError, "without dots"),
        ({"lan": True, "host": "127.0.0.1"}, InvalidRequestError, "contradict"),
        ({"daemon": True, "daemon_host": "192.0.2.77"}, HostingError, "cannot listen on '192.0.2.77'"),
        ({"daemon": True, "cors_origins": ["*"]}, InvalidRequestError, "cors_origins"),
    ],
)
def test_arguments_that_cannot_work_leave_the_lab_as_it_is(running, options, changes, error, message):
    with unchanged(running), pytest.raises(error, match=message):
        lmx_lab.launch(**{"model": "other", "slots": 3, **options, **changes})


@MLX_ONLY
def test_models_that_do_not_fit_into_memory_together_leave_the_lab_as_it_is(running, options):
    sizes = [running.server.catalog.resolve(name).size_bytes for name in ("other", "embedder")]
    with unchanged(running), pytest.raises(OutOfMemoryError, match="other uses"):
        lmx_lab.launch("other", embedder="embedder", memory_limit_bytes=sum(sizes) - 1, **options)


@MLX_ONLY
def test_an_engine_that_is_not_installed_leaves_the_lab_as_it_is(running, options, monkeypatch):
    monkeypatch.setattr(engines, "missing_part", lambda: "is not installed: pip install 'lmx-lab[gguf]'")
    with unchanged(running), pytest.raises(UnusableModelError, match=r"not installed: pip install 'lmx-lab\[gguf\]'"):
        lmx_lab.launch("long-file.gguf", engine="llama.cpp", slots=3, **options)


def test_a_first_launch_that_cannot_load_its_model_leaves_a_server_for_the_corrected_one(tmp_path, options):
    if (lab := lmx_lab.current()) is not None:
        lab.stop()
    with pytest.raises(ModelNotFoundError, match="did you mean 'echo'"):
        lmx_lab.launch("ecko", **{**options, "home": tmp_path})
    first = lmx_lab.current()
    with lmx_lab.launch("echo", **{**options, "home": tmp_path}) as lab:
        assert (lab, manager_of(lab).snapshot.model) == (first, "echo")


# --- ports and daemons


@MLX_ONLY
def test_a_port_in_use_leaves_the_lab_as_it_is(running, options, monkeypatch):
    # A socket that does not listen refuses the request that asks which program it is.
    with socket.socket() as other, unchanged(running):
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        with pytest.raises(PortTakenError):
            lmx_lab.launch("other", **{**options, "port": taken})
        with pytest.raises(PortTakenError):
            lmx_lab.launch("other", slots=3, daemon=True, daemon_port=taken, **options)
    # Another program has the lab's port on an address at which the lab does not listen yet.
    monkeypatch.setattr(addresses, "lan_addresses", lambda: ["127.0.0.2"])
    with socket.socket() as other, unchanged(running):
        other.bind(("127.0.0.2", running.server.port))
        with pytest.raises(PortTakenError):
            lmx_lab.launch("other", **{**options, "port": running.server.port, "host": "0.0.0.0"})


# A socket that zeroconf has opened is left to the garbage collector if another one cannot be opened.
@pytest.mark.filterwarnings("ignore:.*5353:pytest.PytestUnraisableExceptionWarning")
@MLX_ONLY
def test_a_network_on_which_nothing_can_be_announced_leaves_the_lab_as_it_is(running, options, monkeypatch):
    monkeypatch.setattr(addresses, "lan_addresses", lambda: ["192.0.2.77"])
    with unchanged(running), pytest.raises(HostingError, match=r"multicast DNS cannot be used on 192\.0\.2\.77"):
        lmx_lab.launch("other", lan=True, announce=True, **options)


@MLX_ONLY
def test_a_daemon_of_another_process_leaves_the_lab_as_it_is(running, options, home):
    with serving_daemon(home) as daemon, unchanged(running):
        with pytest.raises(DaemonRunningError, match=daemon.url):
            lmx_lab.launch("other", slots=3, daemon=True, daemon_port=0, **options)
        assert daemon.running


# --- loads that fail when the models of the running lab have made room


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "not-finite"}, UnusableModelError, "cannot be loaded"),
        ({"model": "unknown.gguf"}, UnusableModelError, "unknown"),
    ],
)
def test_after_a_load_that_fails_the_lab_loads_its_model_again(running, options, arguments, error, message):
    model, requests = manager_of(running).snapshot.model, len(running.requests)
    with running_answer(running, **LONG) as pieces:
        with pytest.raises(error, match=message) as caught:
            lmx_lab.launch(slots=3, **options, **arguments)
        assert caught.value.message.endswith(f"; the running lab was not replaced, and {model} is loaded in it again")
        assert "no model is loaded" not in caught.value.message
        with pytest.raises(NotLoadedError, match="the server was restarted for"):
            list(pieces)
    restored(running, model)
    assert len(running.requests) == requests + 2


@MLX_ONLY
def test_an_interrupt_during_the_load_loads_the_model_of_the_lab_again(running, options, monkeypatch):
    loading, answers, refusals = threading.Event(), [], []

    async def hang(engine, entry, spec, **_):
        loading.set()
        await asyncio.Event().wait()

    def use_the_lab():
        assert loading.wait(WAIT_S)
        answers.append(httpx2.get(f"{running.url}/readyz"))
        body = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
        answers.append(httpx2.post(f"{running.url}/v1/chat/completions", json=body))
        # The new lab has the memory now.
        for change in (lambda: running.load("other"), running.unload):
            with pytest.raises(ModelBusyError) as caught:
                change()
            refusals.append(caught.value)
        interrupt()

    monkeypatch.setattr(EchoEngine, "load", hang)
    using = threading.Thread(target=use_the_lab)
    using.start()
    with pytest.raises(KeyboardInterrupt, match="the running lab was not replaced, and long is loaded in it again"):
        lmx_lab.launch("echo", slots=3, **options)
    using.join()
    assert [answer.status_code for answer in answers] == [503, 503]
    assert "a model is being loaded" in answers[1].json()["error"]["message"]
    assert [refusal.message.partition(" is being loaded")[0] for refusal in refusals] == ["echo", "echo"]
    restored(running, "long")


def test_after_a_load_that_fails_pinned_models_and_the_daemon_are_there_again(tmp_path, options):
    options |= {"home": tmp_path, "model_folders": [options["home"] / "models"], "daemon": True, "daemon_port": 0}
    with lmx_lab.launch("long", embedder="embedder", **options) as lab:

        @lab.daemon.tool
        def noon() -> str:
            return "noon"

        vector, before = lab.embed("a cat"), lab.daemon
        message = r"not-finite .*; the running lab was not replaced, and long"
        with pytest.raises(UnusableModelError, match=message):
            lmx_lab.launch("not-finite", embedder="embedder", slots=3, **options)
        restored(lab, "long")
        assert (lab.embed("a cat") == vector).all()
        assert lab.daemon is not before
        assert [tool.name for tool in lab.daemon.tools] == ["noon"]


def test_a_lab_whose_model_cannot_be_loaded_again_still_runs(tmp_path, options):
    models = tmp_path / "models"
    shutil.copytree(options["home"] / "models" / "long", models / "removed")
    shutil.copytree(options["home"] / "models" / "not-finite", models / "not-finite")
    with lmx_lab.launch("removed", **{**options, "home": tmp_path}) as lab:
        (models / "removed" / "config.json").unlink()
        message = "not replaced, but its model could not be loaded again: .*config"
        with pytest.raises(UnusableModelError, match=message):
            lmx_lab.launch("not-finite", slots=3, **{**options, "home": tmp_path})
        assert (lmx_lab.current(), manager_of(lab).snapshot.model) == (lab, None)
        assert lab.load("echo").model == "echo"


# --- launches that succeed


@MLX_ONLY
def test_the_memory_of_the_replaced_lab_counts_as_free(running, options):
    # Sufficient for one of the models, but not for both.
    limit = manager_of(running).snapshot.model_memory_bytes * 2 - 1
    with lmx_lab.launch("other", **{**options, "memory_limit_bytes": limit}) as lab:
        assert (manager_of(lab).snapshot.model, lab.server.port) == ("other", running.server.port)
        assert not running.running
        assert lmx_lab.launch("other", **{**options, "memory_limit_bytes": limit}) is lab


@MLX_ONLY
def test_a_replaced_lab_gets_its_models_before_the_other_one_ends(running, options):
    workbench = running.workbench
    with lmx_lab.launch("other", embedder="embedder", reranker="reranker", slots=3, **options) as lab:
        assert manager_of(lab).snapshot.model == "other"
        assert {pinned.entry.id for pinned in manager_of(lab).snapshot.pinned} == {"embedder", "reranker"}
        assert lab.workbench is workbench
        assert httpx2.get(f"{lab.url}/readyz").json()["model"] == "other"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # On another port, and without a model.
        with lmx_lab.launch(**{**options, "port": port}) as moved:
            assert (moved.server.port, manager_of(moved).snapshot.model, lab.running) == (port, None, False)


@MLX_ONLY
def test_a_port_that_another_program_takes_at_the_last_moment_is_an_error(running, options):
    taken = []
    before = threading.enumerate()
    running.server.when_closed(lambda: taken.append(bind("127.0.0.1", running.server.port, explicit=True)))
    with pytest.raises(
        PortTakenError, match=rf"port {running.server.port} .*; the lab at {running.url} has ended, call launch"
    ):
        lmx_lab.launch("other", slots=3, **{**options, "port": running.server.port})
    taken[0].close()
    assert lmx_lab.current() is None
    assert not [each.name for each in threading.enumerate() if each not in before and each.name == "lmx-lab-models"]

"""Test labs in real kernels on both loops, on MLX where it matters. Tests that do not stop a kernel share it."""

import http.client
import re
import socket
import subprocess
import sys
from queue import Empty

import httpx2
import pytest

from tests.support.kernels import Notebook, healthz

SETUP = """
import asyncio, os, signal, threading, psutil, lmx_lab
from lmx_lab.notebook import local
from lmx_lab.engine import ModelManager

hi = "hi " * 4000  # echo repeats it for some seconds
first_handler = signal.getsignal(signal.SIGINT)

def listening():
    return [c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"]

def threads():
    "The names of the threads of labs, without the one that all labs and clients of the process share."
    return {t.name for t in threading.enumerate() if t.name.startswith("lmx-lab")} - {"lmx-lab-background"}

def settled():
    "Whether the slots become free: the engine needs a step to see that a reader has left."
    deadline = threading.Event()
    for _ in range(400):
        if lab.server.engine.snapshot.active_requests + lab.server.engine.snapshot.queued_requests == 0:
            return True
        deadline.wait(0.01)
    return False
"""
LAUNCH = "lab = lmx_lab.launch('echo', loop={mode!r}, port=0, echo_tokens_per_s=1000); print(lab.server.port)"
WITHOUT_BAR = (
    "import functools; from lmx_lab.notebook import loading; "
    "loading.RunningChange = functools.partial(loading.RunningChange, shown_s=60)"
)
"""Prevents a bar for loads without progress, even on a busy machine."""
LAUNCH_TINY = "lab = lmx_lab.launch('tiny', loop={mode!r}, port=0); print(lab.server.port)"
HOSTILE = "<img src=x onerror=alert(1)> and some words"
# Except "never awaited", which an interrupt between the creation and the start of a coroutine causes.
UNREST = ("was destroyed", "never retrieved", "Exception ignored", "Traceback")


@pytest.fixture(scope="module", params=["kernel", "thread"])
def running(request, tiny_home):
    notebook = Notebook(tiny_home)
    notebook.mode = request.param
    notebook.run(SETUP)
    yield notebook
    notebook.run("import gc; lab = None; gc.collect()")
    stderr = notebook.stderr
    notebook.close()
    assert not [word for word in UNREST if word in stderr], stderr


@pytest.fixture
def notebook(running):
    """A kernel without a lab."""
    running.run("lab = lmx_lab.current()\nif lab: lab.stop()")
    return running


@pytest.fixture
def lab(running):
    """A kernel with a lab and its model; the lab of the previous test, if it has the same arguments."""
    running.port = int(running.run(LAUNCH.format(mode=running.mode)))
    return running


def launch(notebook, arguments="port=0"):
    return f"lab = lmx_lab.launch(loop={notebook.mode!r}, {arguments}); print(lab.server.port)"


def test_the_kernels_loop_serves_on_loopback_and_on_the_lan(notebook):
    assert notebook.run("lab = lmx_lab.launch(port=0); print(lab.server.mode, lab.lan_url)") == "kernel None"
    assert notebook.run("lab = lmx_lab.launch(port=0, lan=True); print(lab.server.mode)") == "kernel"
    assert healthz(int(notebook.run("print(lab.server.port)"))) == 200


def test_changed_arguments_restart_in_place_on_the_same_port(lab):
    assert int(lab.run("old = lab\n" + launch(lab, "port=0, slots=2"))) == lab.port
    assert lab.run("print(old.running, lab.settings.slots, listening().count(lab.server.port), sorted(threads()))") == (
        "False 2 1 ['lmx-lab-server']"
    )
    assert healthz(lab.port) == 200


@pytest.mark.parametrize("form", ["{}", "await {}", "async with {}: pass"])
def test_a_launch_that_cannot_load_its_model_leaves_the_lab_as_it_is(lab, form):
    lab.run("stream = iter(lab.chat(hi, stream=True)); first = next(stream); before = lab.server.engine.main")
    output = lab.fail(form.format(f"lmx_lab.launch('ecko', loop={lab.mode!r}, port=0, slots=3)"))
    assert (output.error, "did you mean 'echo'" in output.message) == ("ModelNotFoundError", True)
    check_unchanged(lab)


def check_unchanged(lab):
    """Check that a launch has not changed the lab, its model or its running answer."""
    unchanged = "lmx_lab.current() is lab, lab.server.engine.main is before, bool(next(stream))"
    assert lab.run(f"print({unchanged})") == "True True True"
    assert healthz(lab.port) == 200
    lab.run("stream = None")


def test_the_stop_button_during_the_checks_of_a_launch_leaves_the_lab_as_it_is(lab):
    lab.run("""
        from lmx_lab.engine.echo.engine import EchoEngine
        check, before = EchoEngine.check, lab.server.engine.main
        async def hang(engine, entry, spec, **options):
            print("started", flush=True)
            await asyncio.Event().wait()
        EchoEngine.check = hang
        stream = iter(lab.chat(hi, stream=True)); first = next(stream)
    """)
    output = lab.interrupt(f"lmx_lab.launch('echo', loop={lab.mode!r}, port=0, slots=3)")
    assert output.error == "KeyboardInterrupt"
    lab.run("EchoEngine.check = check")
    check_unchanged(lab)


def test_the_error_for_a_taken_port_names_the_lab_that_holds_it(lab):
    # From another process, while this kernel is idle.
    source = f"import lmx_lab; lmx_lab.launch(port={lab.port})"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "PortTakenError" in result.stderr
    assert "another LMX Lab server" in result.stderr


@pytest.mark.parametrize(
    "fault",
    [
        "real, ModelManager.start = ModelManager.start, lambda self: 1 / 0",
        "real, local.serve = local.serve, lambda app, sock, **k: real(broken, sock, **k)",
    ],
    ids=["engine", "lifespan"],
)
def test_a_failing_start_is_an_error_in_the_cell_and_releases_everything(notebook, fault):
    notebook.run("async def broken(scope, receive, send): raise ValueError('no')\nbefore = sorted(listening())")
    notebook.run(fault)
    assert notebook.fail(launch(notebook)).error in ("ZeroDivisionError", "HostingError")
    notebook.run("local.serve = real" if "local.serve" in fault else "ModelManager.start = real")
    assert notebook.run("print(lmx_lab.current(), threads(), sorted(listening()) == before)") == "None set() True"
    assert healthz(int(notebook.run(launch(notebook)))) == 200


def test_a_request_during_the_blocking_launch_cell_is_answered(notebook):
    notebook.start(f"""
        from lmx_lab.notebook import launcher
        def bind_and_tell(*args, real=launcher.bind, **kwargs):
            sock = real(*args, **kwargs)
            print(sock.getsockname()[1], flush=True)
            input()
            return sock
        launcher.bind, kept = bind_and_tell, launcher.bind
        lmx_lab.launch(loop={notebook.mode!r}, port=0)
        launcher.bind = kept
    """)
    port = int(notebook.read(until="\n").text)
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    client.request("GET", "/healthz")
    notebook.client.get_stdin_msg(timeout=30)
    notebook.client.input("go")
    assert notebook.read().error is None
    assert client.getresponse().status == 200
    client.close()


def test_the_verbs_work_blocking(lab):
    lab.run("lab.unload()")
    assert lab.run("print(lab.load('echo').model, [m.id for m in lab.models() if m.loaded])") == "echo ['echo']"
    assert lab.run("print(lab.chat(hi, max_tokens=3, temperature=0).usage.completion_tokens)") == "3"
    assert lab.run("s = lab.chat(hi, stream=True, max_tokens=9); print(''.join(s) == s.reply.text)") == "True"
    assert lab.run("print(lab.unload() >= 0, lab.server.engine.snapshot.model)") == "True None"


def test_leaving_a_stream_early_frees_its_slot(lab):
    assert lab.run("""
        stream = lab.chat(hi, stream=True)
        for piece in stream:
            break
        print(settled(), stream.reply)
    """) == "True None"  # fmt: skip
    assert lab.run("""
        stream = await lab.astream(hi)
        async for piece in stream:
            break
        print(settled(), stream.reply)
    """) == "True None"  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        "lab.chat(long)",
        "''.join(lab.chat(long, stream=True))",
        "await lab.achat(long)",
        "[piece async for piece in await lab.astream(long)]",
    ],
)
def test_the_stop_button_ends_the_generation_and_the_next_one_works(notebook, body):
    # The complete answer takes 100 s; only the stop button ends it in time.
    notebook.run(launch(notebook, "model='echo', port=0, echo_tokens_per_s=20"))
    output = notebook.interrupt(f"long = 'word ' * 1000\nprint('started', flush=True)\nwhile True:\n    {body}")
    # ipykernel cancels a cell that awaits.
    assert output.error in ({"CancelledError", "KeyboardInterrupt"} if "await lab" in body else {"KeyboardInterrupt"})
    assert notebook.run("print(settled(), lab.chat('hi', max_tokens=2).usage.completion_tokens)") == "True 2"


def test_the_stop_button_cancels_a_blocking_call_after_an_await(lab):
    output = lab.interrupt("""
        async def forever():
            print("started", flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                print("cancelled", flush=True)
        await asyncio.sleep(0)
        lab.server.thread.run(forever())
    """)
    assert ("cancelled" in output.text, output.error) == (True, "KeyboardInterrupt")
    assert healthz(lab.port) == 200


def test_the_kernel_keeps_its_handler_of_sigint(lab):
    assert lab.run("print(signal.getsignal(signal.SIGINT) == first_handler)") == "True"
    assert lab.interrupt("print('started', flush=True)\nwhile True: pass").error == "KeyboardInterrupt"


def test_nothing_is_logged_into_cells(lab):
    healthz(lab.port)
    with socket.create_connection(("127.0.0.1", lab.port)) as client:
        client.sendall(b"not http\r\n\r\n")
        client.recv(65536)
    lab.run("lab.stop()")
    with pytest.raises(Empty):
        lab.client.get_iopub_msg(timeout=0.2)
    assert "Invalid HTTP" in lab.run("from lmx_lab.http.uvicorn_server import recent_logs; print(recent_logs())")


def test_the_stop_button_ends_the_wait_for_an_unload_which_continues(notebook):
    # The complete answer takes minutes.
    notebook.run(launch(notebook, "model='echo', port=0, echo_tokens_per_s=20"))
    notebook.run("pieces = iter(lab.chat('word ' * 2000, stream=True)); next(pieces)")
    output = notebook.interrupt("""
        def watch():
            while lab.server.engine.snapshot.unloading is None:
                threading.Event().wait(0.01)
            print("started", flush=True)
        threading.Thread(target=watch).start()
        lab.unload()
    """)
    assert output.error == "KeyboardInterrupt"
    assert "lab.unload(wait=False) stops the answers" in output.message
    assert "unloading, 1 answer left (" in notebook.run("print(lab)")
    notebook.start("freed = lab.unload(wait=False)")
    output = notebook.read()
    assert output.error is None
    assert re.search(r"echo: unloaded, \d+ MB freed", output.shown[-2]["text/plain"])
    assert notebook.fail("list(pieces)").error == "NotLoadedError"
    assert notebook.run("print(lab.server.engine.snapshot.model, lab.unload())") == "None 0 bytes freed"


def test_a_lab_is_a_context_and_awaitable(notebook):
    arguments = f"loop={notebook.mode!r}, port=0"
    assert notebook.run(f"with lmx_lab.launch({arguments}) as lab: print(lab.running)") == "True"
    assert notebook.run(f"async with lmx_lab.launch({arguments}) as lab: print(lab.running)") == "True"
    assert notebook.run("print(lab.running, lmx_lab.current())") == "False None"
    assert notebook.run(f"lab = await lmx_lab.launch({arguments}); print(lab.running)") == "True"
    notebook.run("await lab.astop(); await lab.astop()")
    assert notebook.run("print(lab.running, threads())") == "False set()"


def test_the_last_value_of_a_cell_shows_addresses_mode_and_model(lab):
    lab.start("lab")
    widget, snapshot = lab.read().shown
    assert "application/vnd.jupyter.widget-view+json" in widget
    for look in (widget["text/plain"], snapshot["text/html"]):
        assert all(part in look for part in (f"http://127.0.0.1:{lab.port}", "running in", "echo ("))
    assert "<script" not in snapshot["text/html"]


@pytest.mark.long
def test_a_load_shows_its_download_in_the_calling_cell_only(lab):
    lab.run(f"{WITHOUT_BAR}; lab.unload()")
    lab.start("lab.load('echo')")
    assert [list(bundle) for bundle in lab.read().shown] == [["text/plain"]]  # The report, without a progress bar.
    lab.start("""
        from lmx_lab.weights.store import Progress
        resolve = lab.server.catalog.find_formats
        def absent(name, **options):
            raise lmx_lab.errors.ModelNotFoundError(name)
        def fetch(name, tell, format):
            tell(Progress(stage="download", done_bytes=1_000_000, total_bytes=2_000_000))
            tell(Progress(stage="download", done_bytes=2_000_000, total_bytes=2_000_000))
            return resolve(name)[0]
        lab.server.catalog.find_formats, lab.server.catalog.fetch = absent, fetch
        report = lab.load('tiny')
    """)
    output = lab.read()
    assert output.error is None, output.message
    assert all("text/html" in bundle for bundle in output.shown)
    texts = [bundle["text/plain"] for bundle in output.shown]
    assert texts.pop() == "", "the bar has left"
    assert [stage in text for stage, text in zip(("download", "download", "loaded"), texts, strict=True)] == [True] * 3
    assert (output.text, output.stderr) == ("", "")
    lab.run("lab.stop()")


@pytest.mark.parametrize("mode", ["kernel", "thread"])
def test_a_kernel_that_has_generated_exits_with_zero_and_frees_its_port(fresh_notebook, mode):
    fresh_notebook.run("import lmx_lab")
    port = int(fresh_notebook.run(LAUNCH_TINY.format(mode=mode)))
    fresh_notebook.run("stream = lab.chat('hi', stream=True); print(next(iter(stream)))")
    fresh_notebook.manager.shutdown_kernel()
    assert fresh_notebook.process.wait(60) == 0
    with pytest.raises(httpx2.ConnectError):
        healthz(port)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["kernel", "thread"])
def test_a_restarted_kernel_gets_its_port_back(fresh_notebook, mode):
    launch = f"import lmx_lab; lab = lmx_lab.launch(loop={mode!r}, port={{port}}); print(lab.server.port)"
    port = int(fresh_notebook.run(launch.format(port=0)))
    fresh_notebook.manager.restart_kernel()
    fresh_notebook.client.wait_for_ready(timeout=60)
    assert fresh_notebook.run(launch.format(port=port)) == str(port)
    assert healthz(port) == 200


# --- how answers are displayed


@pytest.mark.long
def test_a_stream_displays_its_text_and_then_the_reply(fresh_notebook):
    fresh_notebook.run("import lmx_lab; lab = lmx_lab.launch('echo', port=0, echo_tokens_per_s=100)")
    fresh_notebook.start(f"lab.chat({HOSTILE!r}, stream=True, logprobs=2)")
    shown = fresh_notebook.read().shown
    assert len(shown) >= 3
    assert all("<img" not in output.get("text/html", "") for output in shown)
    assert "white-space: pre-wrap" in shown[0]["text/html"]
    assert "text/markdown" in shown[-1]
    assert fresh_notebook.run("print(_.reply.text)") == HOSTILE
    fresh_notebook.start("_.reply.logprobs")
    assert "<table>" in fresh_notebook.read().shown[-1]["text/html"]
    fresh_notebook.start("stream = lab.chat('word ' * 400, stream=True); stream.show(); print(type(stream.reply))")
    assert "Reply" in fresh_notebook.read().text


def test_a_slow_launch_shows_where_the_time_went(fresh_notebook):
    fresh_notebook.run(f"import lmx_lab; {WITHOUT_BAR}")
    fresh_notebook.run("""
        from functools import partial
        from lmx_lab.notebook import launcher
        launcher.LaunchStages = partial(launcher.LaunchStages, slow_s=0, shown_s=0)
    """)
    fresh_notebook.start("lab = lmx_lab.launch('echo', port=0)")
    (shown,) = fresh_notebook.read().shown
    assert "The launch took" in shown["text/plain"]
    assert "the server" in shown["text/plain"]
    assert "echo" in shown["text/plain"]

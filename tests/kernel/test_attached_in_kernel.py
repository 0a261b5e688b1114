"""Test attached labs and the blocking clients in cells on both loops, in threads and in a script."""

import subprocess
import sys

import pytest

from tests.support.kernels import Notebook
from tests.support.labs import serving
from tests.support.models import write_tiny_llama
from tests.support.waiting import until

CODE = """
from lmx_lab.client.daemon import DaemonClient
from lmx_lab.client.lab import LabClient
from lmx_lab.wire.chat import ChatMessage, ChatRequest
from lmx_lab.wire.sessions import TurnOverrides

def ask(url, over="sse"):
    messages = [ChatMessage(role="user", content="hi")]
    request = ChatRequest(model="default", messages=messages, max_tokens=5, temperature=0)
    with LabClient(url) as client:
        chunks = list(client.stream(request, over=over))
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

def run(home):
    with DaemonClient.discover(home) as client:
        return client.session("s").run("hi", overrides=TurnOverrides(max_tokens=5, temperature=0)).stop_reason
"""
LAUNCH = "lab = lmx_lab.launch('tiny', port=0, daemon=True, daemon_port=0, loop={loop!r})"


@pytest.fixture(scope="module")
def lab(tmp_path_factory, smollm2):
    home = tmp_path_factory.mktemp("home")
    write_tiny_llama(home / "models" / "tiny", smollm2.path, seed=0, context=8192)
    with serving(home, "tiny") as lab:
        yield lab


@pytest.fixture(scope="module")
def notebook(lab, tiny_home):
    notebook = Notebook(tiny_home)
    notebook.run(f"import asyncio, lmx_lab; far = lmx_lab.attach({lab.url!r})")
    yield notebook
    stderr = notebook.stderr
    notebook.close()
    assert "Traceback" not in stderr
    assert "never" not in stderr


@pytest.mark.long
def test_blocking_and_awaited_verbs_and_streams_work_in_cells(lab, notebook):
    text = lab.chat("hi", max_tokens=5, temperature=0).text
    parameters = "'hi', max_tokens=5, temperature=0"
    assert notebook.run(f"print(repr(far.chat({parameters}).text))") == repr(text)
    assert notebook.run(f"print(repr((await far.achat({parameters})).text))") == repr(text)
    assert notebook.run(f"print(repr(''.join(far.chat({parameters}, stream=True))))") == repr(text)
    assert notebook.run("print(asyncio.get_running_loop().is_running(), far.models()[0].loaded)") == "True True"


def test_the_stop_button_ends_the_generation_on_the_server(lab, notebook):
    output = notebook.interrupt("""
        for piece in far.chat("hi", stream=True, max_tokens=7500, ignore_eos=True):
            print("started", end="")
        """)
    assert output.error == "KeyboardInterrupt"
    until(lambda: lab.server.engine.snapshot.active_requests == 0)
    assert lab.server.engine.snapshot.totals.output_tokens < 7500
    assert notebook.run("print(far.chat('hi', max_tokens=2).usage.completion_tokens)") == "2"


def test_a_cell_can_attach_to_the_lab_of_its_own_kernel(notebook):
    notebook.run("own = lmx_lab.launch(loop='kernel', port=0); near = lmx_lab.attach(own.url)")
    assert notebook.run("print(near.models() == own.models() == await near.amodels())") == "True"
    notebook.run("near.stop()")
    assert notebook.run("own.stop(); print(len(far.models()))") == "1"


@pytest.mark.long
def test_the_same_code_runs_in_cells_in_threads_and_in_a_script_and_can_be_stopped(fresh_notebook):
    notebook, home = fresh_notebook, str(fresh_notebook.home)
    notebook.run(f"import asyncio, lmx_lab; home = {home!r}\n%load_ext lmx_lab\n{CODE}")

    for loop in ("kernel", "thread"):
        notebook.run(f"if lmx_lab.current(): lab.stop()\n{LAUNCH.format(loop=loop)}")
        text = notebook.run("print(repr(ask(lab.url)))")
        assert notebook.run("print(repr(ask(lab.url, 'websocket')))") == text
        assert notebook.run("print(repr(await asyncio.to_thread(ask, lab.url)))") == text
        assert notebook.run("%%offload\nprint(repr(ask(lab.url, 'websocket')))") == text
        for cell in ("print(run(home))", "%%offload\nprint(run(home))"):
            assert notebook.run(cell) == "length"
        url = notebook.run("print(lab.url)")
        script = f"{CODE}\nprint(repr(ask({url!r})))\nprint(run({home!r}))"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split("\n")[:2] == [text, "length"]

    output = notebook.interrupt("""
        client = DaemonClient.discover(home)
        session = client.session("stopped")
        endless = TurnOverrides(max_tokens=2000, extra={"ignore_eos": True})
        for event in session.stream("hi", turn_id="t", overrides=endless):
            if event.event == "turn.token":
                print("started", end="", flush=True)
        """)
    assert output.error == "KeyboardInterrupt"
    assert notebook.run("print(session.turn('t', wait_s=20).stop_reason)") == "cancelled"

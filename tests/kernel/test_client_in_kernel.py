"""Test the blocking clients in cells on both loops, in threads and in a script."""

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    pass

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

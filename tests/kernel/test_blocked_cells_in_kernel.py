"""Test that the server answers while a cell blocks: blocking clients in the cell itself, and clients outside."""

import contextlib
import json
import re
import subprocess
import threading

import httpx2
import pytest
from websockets.sync.client import connect

from tests.support.docs import README, code_blocks
from tests.support.kernels import WAIT_S, Notebook
from tests.support.waiting import until

SETUP = """
import asyncio, json, pathlib, subprocess, threading, time, urllib.request
import lmx_lab
from openai import AsyncOpenAI, OpenAI

lab = lmx_lab.launch("echo", port=0, echo_tokens_per_s=200)
question = dict(model="default", messages=[{"role": "user", "content": "one two three"}])
healthz = lab.url + "/healthz"
interruptible = OpenAI(**lab.openai).chat.completions  # an interrupt in OpenAI() writes a traceback when it is freed
steps = lambda: (lab.server.thread.host_steps, lab.server.thread.thread_steps)
print(lab.server.port)
"""
BLOCKED = """
print("started", flush=True)
while not pathlib.Path({gate!r}).exists():
    time.sleep(0.01)
"""
"""A cell that blocks the kernel's loop until a file exists."""


@pytest.fixture(scope="module")
def running(tiny_home):
    notebook = Notebook(tiny_home)
    notebook.port = int(notebook.run(SETUP))
    yield notebook
    stderr = notebook.stderr
    notebook.close()
    assert not [word for word in ("was destroyed", "never retrieved", "Traceback") if word in stderr], stderr


@pytest.fixture
def notebook(running):
    """A kernel with a lab on its loop."""
    yield running
    assert running.run("print(lab.running, lab.chat('hi there').text)") == "True hi there"
    until(lambda: running.run("print(lab.server.engine.snapshot.active_requests)") == "0")


@contextlib.contextmanager
def clients(port, number):
    """Clients outside the kernel, each with a connection that is kept alive."""
    address = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(httpx2.Client(base_url=address, timeout=WAIT_S)) for _ in range(number)]


def healthz(client):
    return client.get("/healthz").status_code


def stream(client, words):
    """Start a streamed answer that repeats this number of words; yields its pieces."""
    messages = [{"role": "user", "content": " ".join(["word"] * words)}]
    body = {"model": "default", "stream": True, "messages": messages, "max_tokens": 10_000}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                yield from (choice["delta"].get("content") or "" for choice in event.get("choices", ()))
                if "error" in event:
                    yield event["error"]["code"]


@contextlib.contextmanager
def blocked(notebook, tmp_path, cell=BLOCKED):
    """Block the kernel's loop during the block."""
    gate = tmp_path / "gate"
    notebook.start(cell.format(gate=str(gate)))
    notebook.read(until="started")
    yield
    gate.touch()
    assert notebook.read().error is None


@pytest.mark.long
def test_the_examples_of_the_readme_run_in_one_notebook(starter_home):
    notebook = Notebook(starter_home)
    try:
        for block in code_blocks(README):
            if block.language == "python":
                # The comment names what to write in a notebook.
                text = re.sub(r"OpenAI\(base_url.*# in a notebook: (.*)", r"\1", block.text)
                assert "127.0.0.1" not in text
                printed = notebook.run(text)
                assert printed or "print" not in text
            elif block.text.startswith("curl"):
                url = notebook.run("print(lab.url)")
                command = block.text.replace("http://127.0.0.1:8400", url)
                assert '"choices"' in notebook.run(f"%%bash\n{command}")
                done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
                assert '"choices"' in done.stdout
        assert "OpenAI" in notebook.run("print(type(client).__name__)")
    finally:
        notebook.close()


@pytest.mark.parametrize(
    "code",
    [
        "OpenAI(**lab.openai).chat.completions.create(**question).choices[0].message.content",
        "''.join(it.choices[0].delta.content or '' for it in"
        " OpenAI(**lab.openai).chat.completions.create(**question, stream=True))",
        "(await AsyncOpenAI(**lab.openai).chat.completions.create(**question)).choices[0].message.content",
        "asyncio.run_coroutine_threadsafe(lab.achat('one two three'), lab.server.loop).result().text",
        "(await asyncio.to_thread(lab.chat, 'one two three')).text",
        "lmx_lab.attach(lab.url).chat('one two three').text",
        "''.join(lab.chat('one two three', stream=True))",
    ],
)
def test_clients_in_the_cell_get_their_answer(notebook, code):
    assert notebook.run(f"print({code})") == "one two three"
    # After an await, ipykernel's handler of interrupts does not say that the cell blocks.
    assert notebook.run(f"await asyncio.sleep(0)\nprint({code})") == "one two three"


@pytest.mark.parametrize(
    "code",
    [
        "import requests; print(requests.get(healthz).status_code)",
        "import httpx; print(httpx.get(healthz).status_code)",
        "import httpx2; print(httpx2.get(healthz).status_code)",
        "print(urllib.request.urlopen(healthz).status)",
        "print(subprocess.check_output(['curl', '-s', '-o', '/dev/null', '-w', '%{http_code}', healthz]).decode())",
        "import aiohttp\nasync with aiohttp.ClientSession() as s, s.get(healthz) as r: print(r.status)",
        """
        async def main():
            async with httpx2.AsyncClient() as client:
                print((await client.get(healthz)).status_code)
        thread = threading.Thread(target=asyncio.run, args=(main(),)); thread.start(); thread.join()
        """,
    ],
    ids=["requests", "httpx", "httpx2", "urllib", "curl", "aiohttp", "joined thread"],
)
def test_http_clients_in_the_cell_get_their_answer(notebook, code):
    notebook.run("import httpx2")
    assert notebook.run(code) == "200"


def test_clients_outside_are_answered_while_a_cell_blocks(notebook, tmp_path):
    with clients(notebook.port, 4) as (kept, streaming, *new):
        assert healthz(kept) == 200
        pieces = stream(streaming, 400)
        received = [next(pieces), next(pieces)]
        with connect(f"ws://127.0.0.1:{notebook.port}/v1/chat/stream") as socket:
            question = [{"role": "user", "content": " ".join(["word"] * 300)}]
            socket.send(json.dumps({"model": "default", "messages": question, "max_tokens": 10_000}))
            tokens = (message["token"] for message in map(json.loads, socket) if "token" in message)
            sent = [next(tokens)]
            # All of this ends while the cell still blocks.
            with blocked(notebook, tmp_path):
                received += pieces
                sent += tokens
                assert [healthz(kept) for _ in range(20)] == [200] * 20
                assert [healthz(client) for client in new] == [200] * len(new)
            assert healthz(kept) == 200
        assert "".join(received).split() == ["word"] * 400
        assert "".join(sent).split() == ["word"] * 300


def test_a_stream_that_begins_in_a_blocked_cell_ends_after_it(notebook, tmp_path):
    with clients(notebook.port, 1) as (client,):
        with blocked(notebook, tmp_path):
            pieces = stream(client, 300)
            received = [next(pieces), next(pieces)]
        received += pieces
        assert "".join(received).split() == ["word"] * 300


def test_requests_are_answered_by_the_kernels_loop_while_it_is_free(notebook):
    with clients(notebook.port, 1) as (client,):
        before = eval(notebook.run("print(steps())"))
        for _ in range(200):
            healthz(client)
        after = eval(notebook.run("print(steps())"))
    by_host, by_thread = (now - then for now, then in zip(after, before, strict=True))
    assert by_host > by_thread  # On a busy machine, the thread takes over some steps.


@pytest.mark.parametrize(
    "cell",
    [
        "time.sleep(1000)",
        "interruptible.create(**long)",
        "for _ in interruptible.create(**long, stream=True): pass",
        "lab.chat(text)",
        "await lab.achat(text)",
        "urllib.request.urlopen(lab.url + '/admin/events').read()",
    ],
    ids=["sleep", "openai", "openai stream", "verb", "awaited verb", "urllib"],
)
def test_an_interrupt_ends_the_cell_and_no_other_stream(notebook, cell):
    # The complete answer takes a minute, so that only the interrupt ends it in time.
    notebook.run("text = 'word ' * 12_000; long = {**question, 'messages': [{'role': 'user', 'content': text}]}")
    with clients(notebook.port, 1) as (client,):
        pieces = stream(client, 300)
        received = [next(pieces)]
        output = notebook.interrupt(f"print('started', flush=True)\n{cell}")
        assert output.error in ("KeyboardInterrupt", "CancelledError")
        received += pieces
    assert "".join(received).split() == ["word"] * 300


def test_interrupts_of_a_cell_that_nests_the_kernels_loop_fail_no_request(running):
    notebook = running
    notebook.run("import nest_asyncio2; nest_asyncio2.apply(asyncio.get_running_loop())")
    failed, stop = [], threading.Event()

    def ask():
        with clients(notebook.port, 1) as (client,):
            while not stop.is_set():
                if healthz(client) != 200:
                    failed.append(client)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    try:
        for _ in range(5):
            nested = "asyncio.get_running_loop().run_until_complete(asyncio.sleep(1000))"
            output = notebook.interrupt(f"print('started', flush=True)\n{nested}")
            assert output.error in ("KeyboardInterrupt", "CancelledError")
    finally:
        stop.set()
        for thread in asking:
            thread.join(WAIT_S)
    assert not failed
    assert notebook.run("print(lab.chat('hi').text)") == "hi"


@pytest.mark.long
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "blocked cell"])
def test_a_kernel_that_is_shut_down_during_a_stream_exits_with_zero(fresh_notebook, tmp_path, busy):
    notebook = fresh_notebook
    port = int(notebook.run(SETUP))
    with clients(port, 1) as (client,):
        pieces = stream(client, 10_000)
        next(pieces)
        if busy:
            notebook.start(BLOCKED.format(gate=str(tmp_path / "gate")))
            notebook.read(until="started")
        notebook.manager.shutdown_kernel()
        assert notebook.process.wait(WAIT_S) == 0
        assert list(pieces)[-1] == "internal-error"  # The engine was stopped.
    with pytest.raises(httpx2.ConnectError), clients(port, 1) as (client,):
        healthz(client)


@pytest.mark.long
def test_launches_leave_no_thread_and_no_descriptor(fresh_notebook):
    fresh_notebook.run(SETUP.replace("import asyncio", "import psutil, asyncio"))
    fresh_notebook.run("lab.stop()\nbefore = psutil.Process().num_fds(), threading.active_count()")
    fresh_notebook.run("for _ in range(8): lmx_lab.launch('echo', port=0).stop()")
    fresh_notebook.run("after = psutil.Process().num_fds(), threading.active_count()")
    assert fresh_notebook.run("print(after == before or (before, after))") == "True"

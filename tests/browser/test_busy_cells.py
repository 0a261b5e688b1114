"""Test panels and servers on both loops while a cell sleeps."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab import LAUNCH, SLEEP, chart_moves, model_button, model_row, sleeping

ANSWER = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def kernel_loop_notebook(tab, jupyterlab):
    jupyterlab.write("kernel-loop.ipynb", [LAUNCH.format(loop="kernel"), "lab.panel()", SLEEP])
    tab.open("kernel-loop.ipynb")
    tab.run(0)
    tab.run(1)
    yield
    tab.open("kernel-loop.ipynb")
    tab.close_notebook()


@pytest.fixture
def kernel_loop(tab, kernel_loop_notebook):
    """The same as ``panels``, but on the kernel's loop."""
    tab.open("kernel-loop.ipynb")
    tab.kernel("if lab.server.engine.snapshot.model != 'tiny': lab.load('tiny')")
    return tab


@pytest.fixture(params=["thread", "kernel"])
def busy(request):
    """One of these notebooks, with visible panels."""
    tab = request.getfixturevalue("panels" if request.param == "thread" else "kernel_loop")
    expect(tab.panel("Metrics").locator("canvas").first).to_be_visible()
    return tab


def test_the_chart_moves_and_unload_works(busy):
    with sleeping(busy):
        chart_moves(busy)
        model_button(busy, "Unload tiny").click()
        expect(model_row(busy, "tiny")).to_contain_text("on disk")
        chart_moves(busy)
    assert busy.kernel("print(lab.server.engine.snapshot.model)") == "None"


def test_other_clients_are_answered_and_the_panel_says_running(busy):
    url = busy.kernel("if lab.server.engine.snapshot.model != 'tiny': lab.load('tiny')\nprint(lab.url)")
    with ThreadPoolExecutor(1) as pool:
        started = threading.Event()
        streamed = pool.submit(stream, url, started)
        busy.wait(started.is_set, "the answer has started")
        with sleeping(busy):
            text = finished(busy, streamed)
            for _ in range(20):
                httpx2.get(f"{url}/healthz", timeout=60).raise_for_status()
            expect(busy.panel("Models").locator(".state")).to_have_text("running")
            expect(busy.panel("Models").locator(".shared")).to_be_empty()
        again = pool.submit(stream, url, threading.Event())
        assert text == finished(busy, again)


def finished(tab, streamed):
    tab.wait(streamed.done, "the answer has ended")
    return streamed.result()


def stream(url, started):
    """Stream an answer to a client outside the kernel."""
    text = ""
    body = {"model": "default", "stream": True, **ANSWER}
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=200) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                started.set()
    return text


def answers_unload(message):
    """Return whether this is the panel's reply to a click on Unload."""
    content = message["content"].get("data", {}).get("content", {})
    return message["header"]["msg_type"] == "comm_msg" and content.get("result") == {"model": "tiny"}


def test_unload_bypasses_a_kernel_that_does_not_answer(panels):
    url = panels.kernel("print(lab.url)")
    before = len(panels.messages)
    with panels.disconnected():
        model_button(panels, "Unload tiny").click()
        panels.wait(lambda: httpx2.get(f"{url}/readyz", timeout=60).status_code == 503, "the server has unloaded")
    expect(model_row(panels, "tiny")).to_contain_text("on disk")
    # The kernel receives the request late, which has no effect.
    panels.wait(lambda: any(answers_unload(each) for _, each in panels.messages[before:]), "the kernel has received it")
    panels.kernel("lab.load('tiny')")
    assert panels.kernel("print(lab.server.engine.snapshot.model)") == "tiny"

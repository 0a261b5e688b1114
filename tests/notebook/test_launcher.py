"""Test ``launch()`` and ``current()``: which lab they return, what a changed launch replaces, and scripts."""

import os
import subprocess
import sys
import threading

import pytest

import lmx_lab
from lmx_lab.errors import HostingError, InvalidRequestError, ModelNotFoundError
from lmx_lab.notebook.launcher import exclusive_launch
from tests.support.waiting import until

WAIT_S = 60.0


def test_without_a_running_loop_a_thread_serves_and_the_same_launch_gives_the_same_lab(launched):
    assert launched.server.mode == "thread"
    for port in (0, launched.server.port):
        assert lmx_lab.launch(port=port, home=launched.settings.home, echo_tokens_per_s=1000) is launched
    assert lmx_lab.current() is launched


@pytest.mark.parametrize(
    "arguments",
    [
        *({"model": model} for model in (5, "", b"tiny", ["tiny"])),
        *({"lan": "no"}, {"lan": True, "host": "127.0.0.1"}, {"host": ""}),
    ],
)
def test_invalid_arguments_start_nothing(arguments, tmp_path):
    with pytest.raises(InvalidRequestError, match="model is" if "model" in arguments else None):
        lmx_lab.launch(port=0, home=tmp_path, **arguments)
    assert lmx_lab.current() is None


# --- plans


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_plan_without_a_lab_is_that_of_this_machine(tiny_home, monkeypatch):
    monkeypatch.setenv("LMX_LAB_HOME", str(tiny_home))
    # The default limit changes with what else this process uses.
    monkeypatch.setenv("LMX_LAB_MEMORY_LIMIT_BYTES", str(30 * 10**6))
    # In a cell, a loop is running.
    here = lmx_lab.plan("tiny", context_length=300)
    assert (here.model, here.engine, here.fits) == ("tiny", "mlx", "now")
    assert lmx_lab.plan(tiny_home / "models" / "tiny", context_length=300) == here
    with pytest.raises(ModelNotFoundError):
        lmx_lab.plan("absent")
    with pytest.raises(InvalidRequestError, match="contex_length"):
        lmx_lab.plan("tiny", contex_length=300)


@pytest.mark.slow
def test_a_plan_with_a_lab_is_that_of_the_lab(tiny_home):
    with lmx_lab.launch("tiny", port=0, home=tiny_home, memory_limit_bytes=30 * 10**6) as lab:
        there = lmx_lab.plan("tiny-two", context_length=300)
        assert there == lab.plan("tiny-two", context_length=300)
        assert there.limit_bytes == 30 * 10**6
    assert lmx_lab.current() is None


@pytest.mark.slow
def test_a_lab_keeps_its_port_unless_another_one_is_given(tmp_path):
    with lmx_lab.launch(port=0, home=tmp_path) as first:
        url = first.url
        assert lmx_lab.launch(home=tmp_path) is first
        with lmx_lab.launch("echo", home=tmp_path, slots=2) as second:
            assert second.url == url


# --- panels of the next lab


@pytest.mark.slow
def test_the_next_lab_is_displayed_by_the_panels_of_the_last_one(tmp_path):
    first = lmx_lab.launch(port=0, home=tmp_path)
    workbench = first.workbench
    first.stop()
    assert workbench.backend.state().state == "stopped"
    with lmx_lab.launch(port=0, home=tmp_path) as second:
        assert second.workbench is workbench
        assert workbench.backend.state().url == second.url
        with lmx_lab.launch(port=0, home=tmp_path, slots=2) as third:
            assert third.workbench is workbench
            assert workbench.backend.state().state == "running"


@pytest.mark.slow
def test_a_replaced_lab_does_not_change_the_panels_of_the_next_one(tmp_path):
    first = lmx_lab.launch("echo", port=0, home=tmp_path)
    with lmx_lab.launch(port=0, home=tmp_path, slots=2) as second:
        workbench = second.workbench
        first.stop()
        assert first.workbench is not workbench
        assert first.snapshot().server.state == "stopped"
        count = len(workbench.history.samples)
        until(lambda: len(workbench.history.samples) > count)
        assert second.snapshot().server.state == "running"


# --- several launches at once


def test_threads_that_launch_at_once_get_one_lab(tmp_path):
    labs = []
    threads = [threading.Thread(target=lambda: labs.append(lmx_lab.launch(port=0, home=tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with labs[0]:
        assert labs.count(labs[0]) == 3


def test_a_launch_that_waits_too_long_for_another_one_fails():
    locked, release = threading.Event(), threading.Event()

    def lock():
        with exclusive_launch():
            locked.set()
            release.wait(WAIT_S)

    other = threading.Thread(target=lock)
    other.start()
    locked.wait(WAIT_S)
    try:
        with pytest.raises(HostingError, match="another launch"), exclusive_launch(0.05):
            pass
    finally:
        release.set()
        other.join()


# --- scripts


SCRIPT = """
import lmx_lab
lab = lmx_lab.launch("tiny", port=0)
print(lab.chat("hi", max_tokens=3).usage.completion_tokens)
stream = iter(lab.chat("hi", stream=True))
next(stream)
{end}
"""
ASYNC_SCRIPT = """
import asyncio, lmx_lab
async def main():
    lab = await lmx_lab.launch("tiny", port=0)
    print((await lab.achat("hi", max_tokens=3)).usage.completion_tokens)
    {end}
asyncio.run(main())
"""


TWO_LAUNCHES = """
import asyncio, lmx_lab
from lmx_lab.errors import HostingError

async def launch():
    return lmx_lab.launch(port=0, loop="kernel")

async def main():
    results = await asyncio.gather(launch(), launch(), return_exceptions=True)
    labs = [result for result in results if isinstance(result, lmx_lab.Lab)]
    assert len(labs) == 1 or labs[0] is labs[1], results
    assert all(isinstance(result, lmx_lab.Lab | HostingError) for result in results), results
    await labs[0].astop()

asyncio.run(main())
"""
SCRIPTS = {
    "stopped": SCRIPT.format(end="lab.stop()").replace("tiny", "echo").replace("hi", "hi " * 9),
    "left": SCRIPT.format(end=""),
    "async, stopped": ASYNC_SCRIPT.format(end="await lab.astop()").replace("tiny", "echo").replace("hi", "hi " * 9),
    "async, left": ASYNC_SCRIPT.format(end=""),
    # A nested loop patches asyncio for the whole process.
    "two launches": TWO_LAUNCHES,
}


@pytest.fixture(scope="module")
def scripts(tiny_home):
    """Run the scripts at the same time, because most of their time is the start of Python."""
    running = {
        name: subprocess.Popen(
            [sys.executable, "-W", "default::ResourceWarning", "-c", source],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "LMX_LAB_HOME": str(tiny_home)},
        )
        for name, source in SCRIPTS.items()
    }
    yield running
    for process in running.values():
        with process:
            process.kill()


@pytest.mark.parametrize("name", ["stopped", "left", "async, stopped", "async, left"])
def test_a_script_exits_with_zero_and_prints_no_warnings(scripts, name):
    output, errors = scripts[name].communicate(timeout=180)
    assert (scripts[name].returncode, output, errors) == (0, "3\n", "")


def test_two_launches_at_once_on_one_loop_start_one_lab(scripts):
    _, errors = scripts["two launches"].communicate(timeout=180)
    assert scripts["two launches"].returncode == 0, errors

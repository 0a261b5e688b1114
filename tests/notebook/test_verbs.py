"""Test the blocking and the awaited form of verbs, in programs with and without a running loop."""

from __future__ import annotations

import asyncio
import inspect
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

import pytest

import lmx_lab
from lmx_lab.errors import HostingError
from lmx_lab.notebook.verbs import LoopPortal, awaited, blocking, in_thread, on_loop
from lmx_lab.portal import LoopThread
from lmx_lab.values.models import LoadOptions
from tests.support.waiting import interrupt_when

WAIT_S = 60.0
DOCS = pathlib.Path(__file__).parents[2] / "docs"


class Result:
    """A result that has to be closed if no caller receives it."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Counter:
    """An object with verbs on the loop of a thread."""

    def __init__(self, thread: LoopThread) -> None:
        self._portal = LoopPortal(thread, check=self._check)
        self.in_use = True
        self.threads: list[str] = []
        self.started = threading.Event()
        self.cancelled = threading.Event()
        self.results: list[Result] = []

    def _check(self) -> None:
        if not self.in_use:
            raise HostingError("not in use")

    def _note_thread(self) -> None:
        self.threads.append(threading.current_thread().name)

    async def _double(self, number: int) -> int:
        self._note_thread()
        return 2 * number

    async def _compute(self, first: int, second: int = 1, *, fail: bool = False) -> int:
        """Add two numbers, and double the sum."""
        self._note_thread()
        result = await on_loop(self._double(first + second))
        self._note_thread()
        await in_thread(self._note_thread)
        if fail:
            raise ValueError("failed")
        return result

    compute = blocking(_compute)
    acompute = awaited(_compute)

    async def _never(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def _wait(self) -> str:
        try:
            await on_loop(self._never())
        except (KeyboardInterrupt, asyncio.CancelledError) as exc:
            return type(exc).__name__
        return ""

    wait = blocking(_wait)
    await_ = awaited(_wait)

    async def _interrupt_between(self) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return await on_loop(self._double(1))

    interrupt_between = blocking(_interrupt_between)

    async def _open(self) -> Result:
        result = await on_loop(self._make())
        # The last step has ended, therefore no step cancels and raises this.
        os.kill(os.getpid(), signal.SIGINT)
        return result

    async def _make(self) -> Result:
        self.results.append(Result())
        return self.results[-1]

    open = blocking(_open)


@pytest.fixture
def counter():
    thread = LoopThread("counter")
    thread.start()
    yield Counter(thread)
    thread.stop()


# --- forms


def test_the_blocking_form_runs_its_own_code_in_the_callers_thread(counter):
    assert counter.compute(2, second=3) == 10
    assert counter.threads == ["MainThread", "counter", "MainThread", "MainThread"]


def test_the_awaited_form_runs_its_own_code_on_the_callers_loop(counter):
    assert asyncio.run(counter.acompute(2)) == 6
    here, there, again, pool = counter.threads
    assert (here, there, again) == ("MainThread", "counter", "MainThread")
    assert pool.startswith("asyncio")


def test_an_error_is_raised_in_both_forms(counter):
    with pytest.raises(ValueError, match="failed"):
        counter.compute(1, fail=True)
    with pytest.raises(ValueError, match="failed"):
        asyncio.run(counter.acompute(1, fail=True))


def test_an_owner_that_is_not_in_use_runs_no_step(counter):
    counter.in_use = False
    with pytest.raises(HostingError, match="not in use"):
        counter.compute(1)
    with pytest.raises(HostingError, match="not in use"):
        asyncio.run(counter.acompute(1))
    assert counter.threads == ["MainThread"] * 2


def test_both_forms_have_the_name_the_signature_and_the_docstring_of_the_verb():
    for function, name in ((Counter.compute, "compute"), (Counter.acompute, "acompute")):
        assert (function.__name__, function.__qualname__) == (name, f"Counter.{name}")
        assert function.__doc__ == "Add two numbers, and double the sum."
        assert list(inspect.signature(function).parameters) == ["self", "first", "second", "fail"]
    assert inspect.iscoroutinefunction(Counter.acompute)
    assert not inspect.iscoroutinefunction(Counter.compute)


def test_the_signature_of_load_names_each_option_for_completion():
    assert list(inspect.signature(lmx_lab.Lab.load).parameters) == ["self", "model", *LoadOptions.__annotations__]


PAIRS = ["aload", "aunload", "amodels", "aembed", "arerank", "abench", "apin_encoders", "astart", "astop"]


@pytest.mark.parametrize("name", PAIRS)
def test_each_verb_of_a_lab_has_two_documented_forms_with_the_same_parameters(name):
    awaitable, plain = getattr(lmx_lab.Lab, name), getattr(lmx_lab.Lab, name[1:])
    assert (awaitable.__name__, plain.__name__) == (name, name[1:])
    assert inspect.signature(awaitable) == inspect.signature(plain)
    assert awaitable.__doc__
    assert inspect.iscoroutinefunction(awaitable)


# --- interrupts and cancellation


def test_an_interrupt_cancels_the_step_and_is_raised_in_the_verb(counter):
    interrupt_when(counter.started.is_set)
    assert counter.wait() == "KeyboardInterrupt"
    assert counter.cancelled.wait(WAIT_S)


def test_an_interrupt_between_two_steps_is_raised_instead_of_the_next_step(counter):
    with pytest.raises(KeyboardInterrupt):
        counter.interrupt_between()
    assert counter.threads == []


def test_a_result_that_no_caller_receives_is_closed(counter):
    with pytest.raises(KeyboardInterrupt):
        counter.open()
    assert [result.closed for result in counter.results] == [True]


def test_cancelling_the_awaited_form_cancels_its_step(counter):
    async def cancel() -> str:
        task = asyncio.create_task(counter.await_())
        await asyncio.to_thread(counter.started.wait, WAIT_S)
        task.cancel()
        return await task

    assert asyncio.run(cancel()) == "CancelledError"
    assert counter.cancelled.wait(WAIT_S)


# --- imports


def modules_after(code):
    """Run code in a new interpreter, and return the names of the modules that it has imported."""
    script = f"{code}\nimport sys; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=True)
    return set(done.stdout.split())


def imported(modules, *packages):
    return {name for name in modules for package in packages if name == package or name.startswith(f"{package}.")}


def test_importing_the_package_imports_only_the_package():
    assert imported(modules_after("import lmx_lab"), "lmx_lab") == {"lmx_lab"}


@pytest.mark.slow
def test_an_attached_lab_imports_neither_the_engine_nor_the_server(tmp_path):
    with lmx_lab.launch("echo", port=0, home=tmp_path) as lab:
        code = f"""
import lmx_lab
with lmx_lab.attach({lab.url!r}) as lab:
    assert lab.chat("hello", max_tokens=2).usage.completion_tokens == 2
    lab.models(), lab.snapshot(), repr(lab), lab._repr_html_()
"""
        modules = modules_after(code)
    assert imported(modules, "lmx_lab.engine", "lmx_lab.server", "mlx", "mlx_lm", "xllamacpp") == set()


def test_the_documentation_lists_all_awaited_methods_of_a_lab():
    public = {name for name in dir(lmx_lab.Lab) if not name.startswith("_")}
    methods = {name for name in public if name[0] == "a" and name[1:] in public} | {"astream"}
    (listed,) = re.findall(r"has a version for `await`:([^.]*)\.", (DOCS / "notebook.md").read_text(encoding="utf-8"))
    assert set(re.findall(r"`(\w+)`", listed)) == methods

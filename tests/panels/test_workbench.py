"""Test the workbench over labs of this process: its history, its timer, the end of its loop, and its grid of panels."""

import asyncio
import threading
import time

import pytest

import lmx_lab
from lmx_lab.errors import HostingError
from lmx_lab.panels.chat import ChatPanel
from lmx_lab.panels.layout import full_width
from lmx_lab.panels.workbench import Workbench
from lmx_lab.portal import BACKGROUND
from tests.support.panels import QUICK, Reader, ScriptedBackend, cost, delta, server_sample
from tests.support.waiting import until

WAIT_S = 60.0
WIDE, NARROW = True, False


def test_the_history_has_samples_and_requests(tiny_home):
    with lmx_lab.launch("tiny", port=0, home=tiny_home) as lab:
        # The panels of an earlier lab of this process, with its history, show this lab now.
        history = lab.workbench.history
        count = len(history.requests)
        lab.chat("hello", max_tokens=5, ignore_eos=True)
        until(lambda: len(history.requests) > count)
        until(lambda: bool(history.samples) and history.samples[-1].memory_active_gb > 0)
        assert history.requests[-1].event.completion_tokens == 5


def tasks():
    """Return the names of the tasks of the background loop, without the task of this function."""
    found = set()

    async def find():
        found.update(task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()})

    BACKGROUND.thread.submit(find()).result(WAIT_S)
    return found


def test_the_panels_of_a_stopped_lab_do_nothing_after_a_request(tmp_path):
    with lmx_lab.launch(port=0, home=tmp_path) as lab:
        until(lambda: "update panels" in tasks())
    assert not {"update panels", "read a lab's events"} & tasks()
    with pytest.raises(HostingError, match="launch"):
        lab.workbench.submit(lab.workbench.backend.unload()).result(WAIT_S)
    until(lambda: not {"update panels", "read a lab's events"} & tasks())


def test_a_backend_that_fails_once_does_not_stop_the_timer(workbench, backend):
    failed = threading.Event()

    def fail_once():
        if not failed.is_set():
            failed.set()
            raise RuntimeError("no sample")
        return server_sample(time.time())

    backend.sample = fail_once
    workbench.follow(backend)
    until(lambda: workbench.history.samples)
    assert failed.is_set()


def test_suspending_a_workbench_ends_only_its_own_work(workbench, backend):
    other = Workbench(ScriptedBackend(), **QUICK)
    readers = [Reader(ChatPanel(each)) for each in (workbench, other)]
    for reader in readers:
        reader.ask("send", text="Hello")
    other.suspend()
    readers[1].until(lambda panel: not panel.live and len(panel.messages) == 2)
    readers[0].give(backend.steps, delta("Hi"), cost())
    readers[0].until(lambda panel: not panel.live and panel.messages[-1]["text"] == "Hi")
    assert {"update panels", "read a lab's events"} <= tasks()


@pytest.mark.parametrize(
    ("panels", "spans"),
    [
        ([NARROW] * 4, [False] * 4),
        ([NARROW] * 3, [False, False, True]),
        ([NARROW] * 4 + [WIDE], [False] * 4 + [True]),
        ([NARROW, WIDE, NARROW, NARROW], [True, True, False, False]),
    ],
)
def test_no_cell_beside_a_panel_is_empty(panels, spans):
    assert full_width(panels) == spans

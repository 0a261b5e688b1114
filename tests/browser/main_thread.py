"""Measure the tasks on the main thread of a page."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from playwright.sync_api import Browser, Page

LONG_MS = 50.0
"""Duration from which a task is a long one."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of the main thread. Other programs delay it, but do not change its CPU time."""

    ms: float
    cpu_ms: float


@contextmanager
def traced_tasks(browser: Browser, page: Page) -> Iterator[list[Task]]:
    """Add the tasks that run within the block to the list, at its end. A browser records one trace at a time."""
    tasks: list[Task] = []
    browser.start_tracing(page=page, categories=["disabled-by-default-devtools.timeline"])
    try:
        yield tasks
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
    names = [it for it in events if it["name"] == "thread_name"]
    main = {(it["pid"], it["tid"]) for it in names if it["args"]["name"] == "CrRendererMain"}
    by_thread = defaultdict[tuple[int, int], list[Task]](list)
    for event in events:
        thread = event["pid"], event["tid"]
        if event["name"] == "RunTask" and event["ph"] == "X" and thread in main:
            by_thread[thread].append(Task(ms=event["dur"] / 1000, cpu_ms=event.get("tdur", event["dur"]) / 1000))
    # Other pages of the browser are idle.
    tasks += max(by_thread.values(), key=lambda found: sum(task.cpu_ms for task in found))


def described(tasks: list[Task]) -> str:
    """Return the figures of tasks in words."""
    wall, cpu = [task.ms for task in tasks], [task.cpu_ms for task in tasks]
    count, of_cpu = (sum(value > LONG_MS for value in values) for values in (wall, cpu))
    return (
        f"{len(tasks)} tasks with {sum(cpu) / 1000:.2f} s of CPU time; "
        f"longest {max(wall):.0f} ms, by CPU time {max(cpu):.0f} ms; "
        f"over {LONG_MS:.0f} ms: {count}, by CPU time {of_cpu}"
    )

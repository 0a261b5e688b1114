"""A progress bar for fetching and loading, in a terminal or a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


class Step(Protocol):
    """What a bar shows: ``weights.Progress`` and ``wire.admin.ModelEvent`` both are such."""

    @property
    def stage(self) -> str: ...
    @property
    def done_bytes(self) -> int | None: ...
    @property
    def total_bytes(self) -> int | None: ...


class Bar:
    """One line that shows the stage that runs now; nothing is drawn before the first step."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), transient=True
        )
        self._task = self._progress.add_task(title, total=None, start=True)
        self._shown = False

    def update(self, step: Step) -> None:
        if not self._shown:
            self._progress.start()
            self._shown = True
        description = f"{self._title}: {step.stage}"
        self._progress.update(
            self._task, description=description, completed=step.done_bytes or 0, total=step.total_bytes
        )

    def stop(self) -> None:
        if self._shown:
            self._progress.stop()


@contextmanager
def bar(title: str) -> Iterator[Bar]:
    shown = Bar(title)
    try:
        yield shown
    finally:
        shown.stop()

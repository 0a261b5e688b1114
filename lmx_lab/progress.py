"""A progress bar, in a terminal (on standard error) or a notebook; nowhere else, where it would be rubbish in a log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

TEXT = "{task.description}"


class Step(Protocol):
    """What a bar shows: ``weights.Progress`` and ``wire.admin.ModelEvent`` both are such."""

    @property
    def stage(self) -> str: ...
    @property
    def done_bytes(self) -> int | None: ...
    @property
    def total_bytes(self) -> int | None: ...


class Bar:
    """One line that shows the stage that runs now. Nothing is drawn before the first step, and only on the thread that
    calls ``update``: rich's own refreshing thread would draw into another cell.
    """

    def __init__(self, title: str, console: Console, columns: Sequence[ProgressColumn], *, wide: bool) -> None:
        self._title = title
        self._console = console
        self._progress = Progress(*columns, console=console, expand=wide, transient=True, auto_refresh=False)
        self._task = self._progress.add_task(title, total=None)
        self._display: Any = None

    def update(self, step: Step) -> None:
        self.show(step.stage, step.done_bytes or 0, step.total_bytes)

    def show(self, text: str, done: int, total: int | None) -> None:
        """The stage in words, and how much of it is done; a total of None is not known."""
        self._progress.update(self._task, description=f"{self._title}: {text}", completed=done, total=total)
        if self._console.is_jupyter:
            self._show_in_notebook()
        elif self._console.is_terminal:
            self._progress.start()
            self._progress.refresh()

    def stop(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def _show_in_notebook(self) -> None:
        # Not rich's own way, which needs ipywidgets and leaves an empty widget behind.
        if self._display is None:
            from IPython.display import display

            self._display = display(self._progress, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._display.update(self._progress)


@contextmanager
def bar(title: str, console: Console | None = None) -> Iterator[Bar]:
    """Of bytes."""
    columns = (TextColumn(TEXT, markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with _ending(Bar(title, console or Console(stderr=True), columns, wide=False)) as shown:
        yield shown


@contextmanager
def counter(title: str, console: Console | None = None) -> Iterator[Bar]:
    """Of things that are counted, such as requests. The text gets the room that the rest has left."""
    text = TextColumn(TEXT, markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), text)
    with _ending(Bar(title, console or Console(stderr=True), columns, wide=True)) as shown:
        yield shown


@contextmanager
def _ending(shown: Bar) -> Iterator[Bar]:
    try:
        yield shown
    finally:
        shown.stop()

"""Show progress bars in terminals (on standard error) and in notebooks; nothing is shown elsewhere, such as in logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

TEXT = "{task.description}"


class KnownBytes(DownloadColumn):
    """The bytes that are done and all bytes; empty while these are unknown."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class Step(Protocol):
    """A step of a download or a load: ``weights.store.Progress`` or ``ModelEvent``."""

    @property
    def stage(self) -> str: ...
    @property
    def done_bytes(self) -> int | None: ...
    @property
    def total_bytes(self) -> int | None: ...


class HasJob(Protocol):
    """A server whose panels show what uses it."""

    job: str


class ProgressBar:
    """One line with the current stage, which is removed at the end of a ``with`` block.

    It is drawn from the first step on, in the thread that calls ``update``, because the output of rich's own thread
    would appear in another cell.

    Args:
        console: By default that of standard error.
        job: Its ``job`` is also set to the progress, after the words ``doing``.
    """

    def __init__(
        self,
        title: str,
        console: Console | None,
        columns: Sequence[ProgressColumn],
        *,
        wide: bool = False,
        job: HasJob | None = None,
        doing: str = "",
    ) -> None:
        self._title = title
        self._job = job
        self._doing = doing
        self._console = console or Console(stderr=True)
        self._progress = Progress(*columns, console=self._console, expand=wide, transient=True, auto_refresh=False)
        self._task = self._progress.add_task(title, total=None)
        self._display: Any = None

    def update(self, step: Step) -> None:
        if step.done_bytes is None:  # An engine does not report how much it has loaded.
            self.show(step.stage, 0, None)
        else:
            self.show(step.stage, step.done_bytes, step.total_bytes)

    def show(self, text: str, done: int, total: int | None) -> None:
        """Show a text and the progress; None is an unknown total."""
        if self._job is not None:
            self._job.job = f"{self._doing}, {done} of {total}: {text}"
        self._progress.update(self._task, description=self._titled(text), completed=done, total=total)
        if self._console.is_jupyter and self._display is not None:
            self._display.update(self._progress)
        elif self._console.is_jupyter:
            # Rich's own display in notebooks needs ipywidgets, and leaves an empty widget.
            # Here, because IPython is only needed, and only installed, with notebooks.
            from IPython.display import display

            self._display = display(self._progress, display_id=True)  # type: ignore[no-untyped-call]
        elif self._console.is_terminal:
            self._progress.start()
            self._progress.refresh()

    def print_line(self, text: str) -> None:
        """Print a line of text where no bar is shown, such as in logs."""
        if not self._console.is_jupyter and not self._console.is_terminal:
            self._console.print(self._titled(text), markup=False, highlight=False, soft_wrap=True)

    def _titled(self, text: str) -> str:
        return f"{self._title}: {text}" if self._title else text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
        if self._display is not None:
            self._display.update({"text/html": "", "text/plain": ""}, raw=True)
        if self._job is not None:
            self._job.job = ""


def bar(title: str, console: Console | None = None) -> ProgressBar:
    """Show the progress of a number of bytes."""
    return ProgressBar(
        title, console, (TextColumn(TEXT, markup=False), BarColumn(), KnownBytes(), TimeRemainingColumn())
    )


def status(console: Console | None = None) -> ProgressBar:
    """Show a line of text that can be updated."""
    return ProgressBar("", console, (TextColumn(TEXT, markup=False),))


def counter(title: str, job: HasJob | None = None, *, doing: str = "", console: Console | None = None) -> ProgressBar:
    """Show the progress of a number of items, such as requests. The text takes the remaining width.

    Args:
        job: A server that the work uses. The panels of its lab show the progress, too.
        doing: The beginning of the text in the panels; by default the title.
    """
    text = TextColumn(TEXT, markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), text)
    return ProgressBar(title, console, columns, wide=True, job=job, doing=doing or title.capitalize())

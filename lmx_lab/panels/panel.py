"""Define the base class of all panels.

Python sends state to the views in traits. A view sends requests as messages, each of which has exactly one reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import traitlets

from lmx_lab.backend import Backend
from lmx_lab.errors import InvalidRequestError, LabError
from lmx_lab.panels.workbench import Workbench
from lmx_lab.values.models import ModelEvent
from lmx_lab.wire.admin import RequestEvent, Sample

log = logging.getLogger(__name__)
FOLDER = Path(__file__).parent
"""Folder with the panels' JavaScript and CSS, which are plain files without a bundler."""
MAX_REQUESTS = 16
"""Maximum number of running requests of one panel. Further requests are refused."""
BUG = "this failed because of a bug in the panel; the kernel's log has the details"


@cache
def script(*names: str, folder: Path = FOLDER) -> str:
    """Return one ES module: vendored files (in a folder of their own) unchanged, then the file in ``built/`` with the
    name of the last file, which contains all other files, minified.

    Every widget instance contains its code, which is also stored in saved notebooks. Therefore the code is minified:
    ``make panels`` writes ``built/`` from the files beside it, and a test fails if a file there is out of date. A new
    panel has no file in ``built/`` before ``make panels``, which imports its class; its files are not minified.
    """
    built = folder / "built" / names[-1]
    own = built.read_text(encoding="utf-8") if built.exists() else join_own_files(*names, folder=folder)
    return "\n".join([*(source(name, folder) for name in names if "/" in name), own])


@cache
def styles(*names: str) -> str:
    """Return one style sheet with the content of several files, without comments."""
    text = "\n".join(source(name) for name in names)
    return re.sub(r"/\*[\s\S]*?\*/|^[ \t]+|\n(?=\n)", "", text, flags=re.MULTILINE).strip()


def source(name: str, folder: Path = FOLDER) -> str:
    """Return the content of a file in the panels' folder."""
    return (folder / name).read_text(encoding="utf-8")


def join_own_files(*names: str, folder: Path = FOLDER) -> str:
    """Return the content of the files that are not vendored, as one module that is not minified."""
    return "\n".join(source(name, folder) for name in names if "/" not in name)


class Panel(anywidget.AnyWidget):
    """A widget that shows the workbench's lab.

    Traits are sent only to the views, never back. They are set on the workbench's loop, with ``show``. Therefore a view
    that is opened later, again or in a second tab shows the same as all others. A view sends ``{id, do, ...}`` and
    receives ``{id, ok, result}`` or ``{id, ok, error: {code, message, param}}``, where ``param`` names the wrong field.
    Messages may arrive on any thread.
    """

    SCRIPTS: ClassVar[tuple[str, ...]] = ()
    """Files of this folder that make up the panel's module; the last one is the panel's own."""
    STYLES: ClassVar[tuple[str, ...]] = ("panel.css",)
    REQUESTS: ClassVar[frozenset[str]] = frozenset()
    """Names of the requests that views may send: ``load`` calls the coroutine ``do_load(fields)``."""
    IN_REPORT: ClassVar[bool] = False
    """Whether ``lab.report`` includes the panel's snapshot."""
    NEEDS_DAEMON: ClassVar[bool] = False
    """Whether ``lab.panel()`` shows the panel only if there is a daemon."""
    BY_NAME_ONLY: ClassVar[bool] = False
    """Whether ``lab.panel()`` does not show the panel unless it is named."""
    FULL_WIDTH: ClassVar[bool] = False
    """Whether the panel has no other panel beside it in a grid."""

    server = traitlets.Dict().tag(sync=True)
    """The server's state (``ServerState``) as a dict."""
    wide = traitlets.Bool(False).tag(sync=True)
    """Whether the panel spans all columns of a grid."""
    revision = traitlets.Int().tag(sync=True)
    """Number of state messages so far. A view detects a missed message by a gap in it, or with ``compare``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # traitlets derives a class for each instance, in which these are traits already.
        if "SCRIPTS" in cls.__dict__:
            cls._esm = script(*cls.SCRIPTS)
            cls._css = styles(*cls.STYLES)
            cls.REQUESTS = frozenset(name[3:] for name in dir(cls) if name.startswith("do_"))
        super().__init_subclass__(**kwargs)

    def __init__(self, workbench: Workbench, **traits: Any) -> None:
        self.workbench = workbench
        self._pending: dict[str, Any] = {}
        """The values of traits that the next frame sets."""
        self._frame: asyncio.TimerHandle | None = None
        self._shown_at = -workbench.frame_s
        self._requests = 0
        """Number of running requests."""
        self.task: asyncio.Task[Any] | None = None
        """The job of the panel, such as the generation of an answer; None if it has none."""
        super().__init__(**{"server": asdict(workbench.backend.state()), **traits})
        # ipykernel sends a view's messages to the shell that the panel has used last. This is the shell of cells, in
        # which a click would wait for a cell that blocks. The shell that JupyterLab has opened for widgets does not.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _data, chosen: chosen
        self.on_msg(lambda _widget, content, _buffers: workbench.submit(self._answer(content)))
        workbench.watch(self)

    # State

    def show(self, **values: Any) -> None:
        """Set traits with the next frame. Call it on the workbench's loop."""
        self._pending |= values
        if self._frame is None:
            wait_s = self._shown_at + self.workbench.frame_s - time.monotonic()
            if wait_s <= 0:
                self.flush()
            else:
                self._frame = asyncio.get_running_loop().call_later(wait_s, self.flush)

    def flush(self) -> None:
        """Set the traits of the next frame now."""
        self._frame = None
        values, self._pending = self._pending, {}
        self._shown_at = time.monotonic()
        with self.hold_sync():
            self.revision += 1
            for name, value in values.items():
                setattr(self, name, value)

    def shown(self, name: str) -> Any:
        """Return the value that a trait has after the next frame."""
        return self._pending.get(name, getattr(self, name))

    @property
    def serves(self) -> bool:
        """Whether the server accepts requests, as far as the panel knows."""
        return self.shown("server")["state"] in ("running", "lagging")

    # Called by the workbench

    def tick(self, backend: Backend, sample: Sample | None) -> None:
        """Update the server's state. Called regularly; see ``Watcher``."""
        state = asdict(backend.state())
        if state != self.shown("server"):
            self.show(server=state)

    def model_event(self, event: ModelEvent) -> None:
        """Handle an event of a model. Does nothing by default; panels that show models override it."""

    def request_ended(self, event: RequestEvent) -> None:
        """Handle the end of a request. Does nothing by default; panels that show requests override it."""

    def backend_changed(self) -> None:
        """Called when another lab is shown. Does nothing by default; panels whose state belongs to one lab override
        it."""

    # Requests

    async def do_compare(self, fields: Mapping[str, Any]) -> int:
        """Compare the revision of a view with the panel's, and send the complete state if they differ.

        Messages of the kernel are lost when its connection breaks, and the protocol of widgets does not detect this.

        Returns:
            The panel's revision.
        """
        if fields.get("revision") != self.revision:
            self.send_state([name for name in self.keys if not name.startswith("_")])
        return self.revision

    async def _answer(self, content: Any) -> None:
        number = content.get("id") if isinstance(content, dict) else None
        if not isinstance(number, str) or len(number) > 64:
            log.warning("a panel has received a message without an id: %.200r", content)
            return
        if self._requests >= MAX_REQUESTS:
            self._refuse(
                number, "queue-full", f"{MAX_REQUESTS} requests of this panel are running; wait for one to end"
            )
            return
        name = content.get("do")
        self._requests += 1
        try:
            if not isinstance(name, str) or name not in self.REQUESTS:
                raise InvalidRequestError(
                    f"this panel has no request {name!r:.40}; it has {', '.join(sorted(self.REQUESTS))}"
                )
            result = await getattr(self, f"do_{name}")(content)
        except LabError as exc:
            self._refuse(number, exc.code, exc.message, exc.param)
        except Exception:
            log.exception("a panel's request failed")
            self._refuse(number, "internal-error", BUG)
        else:
            self.send({"id": number, "ok": True, "result": result})
            if name != "compare":
                self.workbench.static_views.mark_changed()
        finally:
            self._requests -= 1

    def _refuse(self, number: str, code: str, message: str, param: str | None = None) -> None:
        self.send({"id": number, "ok": False, "error": {"code": code, "message": message, "param": param}})

    # The panel's job

    def run_job(self, work: Coroutine[Any, Any, Any], ended: Callable[[str | None], None]) -> None:
        """Start the panel's job as ``task``, in place of the last one. Call it on the workbench's loop.

        Args:
            ended: Called at the end of the job, if it is still the panel's: with the message of its error, which is
                empty if there is none, or with None if the job was cancelled.
        """

        def end(task: asyncio.Task[Any]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, LabError):
                log.error("the job of a panel failed", exc_info=error)
            if task is self.task:
                self.task = None
                message = "" if error is None else error.message if isinstance(error, LabError) else BUG
                ended(None if task.cancelled() else message)

        self.task = self.workbench.create_task(work, f"job of {type(self).__name__}")
        # A callback, because a task that is cancelled before its first step never runs.
        self.task.add_done_callback(end)

    def close(self) -> None:
        """Close the widget, and cancel its job. Can be called from any thread."""
        if (task := self.task) is not None:
            with contextlib.suppress(RuntimeError):  # The loop is closed, because the process is about to end.
                task.get_loop().call_soon_threadsafe(task.cancel)
        super().close()

    # Saved notebooks

    def snapshot_html(self) -> str:
        """Return the panel's content as HTML without scripts and ids, for saved notebooks."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/html": self.snapshot_html()}, metadata

    def _ipython_display_(self) -> None:
        self.workbench.static_views.show(self._repr_mimebundle_(), self.snapshot_html)


def text_field(fields: Mapping[str, Any], name: str, *, limit: int = 4096) -> str:
    """Return a text of a request.

    Args:
        limit: Maximum number of characters.

    Raises:
        InvalidRequestError: the field is missing, blank, not a text, or too long.
    """
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequestError(f"{name} is {value!r:.40}; it must be a string", param=name)
    if len(value) > limit:
        raise InvalidRequestError(f"{name} has {len(value)} characters; the limit is {limit}", param=name)
    return value


def bool_field(fields: Mapping[str, Any], name: str, *, default: bool | None = None) -> bool:
    """Return whether a field of a request is true, or the default if it is missing.

    Raises:
        InvalidRequestError: the field is neither true nor false.
    """
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {value!r:.40}; it must be true or false", param=name)
    return value


def number_field(fields: Mapping[str, Any], name: str, *, low: float, high: float, default: float) -> float:
    """Return a number of a request, or the default if it is missing.

    Raises:
        InvalidRequestError: the field is not a number, or out of range.
    """
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} is {value!r:.40}; it must be between {low:,.10g} and {high:,.10g}", param=name
        )
    return value


def integer_field(fields: Mapping[str, Any], name: str, *, low: int, high: int, default: int | None) -> int | None:
    """Return a whole number of a request, or the default if it is missing.

    Raises:
        InvalidRequestError: the field is not a whole number, or out of range.
    """
    if fields.get(name) is None:
        return default
    value = number_field(fields, name, low=low, high=high, default=low)
    if value != int(value):
        raise InvalidRequestError(f"{name} is {value:g}; it must be a whole number", param=name)
    return int(value)

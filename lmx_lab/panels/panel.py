"""What all panels have in common: state down in traits, requests up as messages, one reply to each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import anywidget
import traitlets

from lmx_lab.backend import Source
from lmx_lab.errors import InvalidRequestError, LabError
from lmx_lab.panels import assets, static_fallback
from lmx_lab.panels.workbench import Workbench
from lmx_lab.wire.admin import ModelEvent, Sample

log = logging.getLogger(__name__)
FRAME_S = 0.3
"""Between two messages of state: under four a second whatever happens, and still alive to the eye."""
MOST_REQUESTS = 16
"""Of one panel at the same time; the next one is refused."""
LONGEST_ID = 64


class Panel(anywidget.AnyWidget):
    """A widget that shows the workbench's lab.

    Traits go one way, down. They are set on the workbench's loop only, through ``show``; a view that opens late, again
    or in a second tab therefore sees what all others see. A view asks with ``{id, do, ...}`` and is answered
    ``{id, ok, result}`` or ``{id, ok, error: {code, message}}``. Messages may arrive on any thread.
    """

    SCRIPTS: ClassVar[tuple[str, ...]] = ()
    """Files of this folder that make up the panel's module."""
    STYLES: ClassVar[tuple[str, ...]] = ("panel.css",)
    REQUESTS: ClassVar[frozenset[str]] = frozenset()
    """What a view may ask; for ``load`` there is the coroutine ``do_load(fields)``."""

    server = traitlets.Dict().tag(sync=True)
    """``ServerState`` as a dict."""
    revision = traitlets.Int().tag(sync=True)
    """Counts the messages of state; a view that has missed one sees a gap, or learns of it with ``compare``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Not in the classes that traitlets derives for each instance: there these are traits.
        if "SCRIPTS" in cls.__dict__:
            cls._esm = assets.script(*cls.SCRIPTS)
            cls._css = assets.styles(*cls.STYLES)
        super().__init_subclass__(**kwargs)

    def __init__(self, workbench: Workbench, **traits: Any) -> None:
        self.workbench = workbench
        self._waiting: dict[str, Any] = {}
        self._frame: asyncio.TimerHandle | None = None
        self._shown_at = -FRAME_S
        self._answering: set[asyncio.Task[None]] = set()
        super().__init__(**{"server": asdict(workbench.source.state()), **traits})
        # ipykernel takes a view's messages to the shell to which the panel has last spoken, which is the cell's: behind
        # one that blocks, a click would wait. The view's own choice is right, JupyterLab opens a shell for widgets.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda _data, chosen: chosen
        self.on_msg(self._received)
        workbench.watch(self)

    # Down

    def show(self, **values: Any) -> None:
        """Set traits, in the next frame; on the workbench's loop."""
        self._waiting |= values
        if self._frame is None:
            wait_s = self._shown_at + FRAME_S - time.monotonic()
            if wait_s <= 0:
                self.flush()
            else:
                self._frame = asyncio.get_running_loop().call_later(wait_s, self.flush)

    def flush(self) -> None:
        self._frame = None
        values, self._waiting = self._waiting, {}
        self._shown_at = time.monotonic()
        with self.hold_sync():
            self.revision += 1
            for name, value in values.items():
                setattr(self, name, value)

    def shown(self, name: str) -> Any:
        """A trait's value, or the one that it will have with the next frame."""
        return self._waiting.get(name, getattr(self, name))

    # The workbench's calls

    def tick(self, source: Source, sample: Sample | None) -> None:
        state = asdict(source.state())
        if state != self.shown("server"):
            self.show(server=state)

    def model_event(self, event: ModelEvent) -> None:
        """For panels that show models."""

    def changed_source(self) -> None:
        """For panels that keep what belongs to one lab."""

    # Up

    async def do_compare(self, fields: Mapping[str, Any]) -> int:
        """The revision that a view has against the panel's, which it gets, with all of the state where they differ.

        What a kernel says while its connection breaks is lost, and nothing in the widgets' protocol tells of it.
        """
        if fields.get("revision") != self.revision:
            self.send_state([name for name in self.keys if not name.startswith("_")])
        return self.revision

    def _received(self, _widget: Any, content: Any, _buffers: Any) -> None:
        self.workbench.submit(self._accept(content))

    async def _accept(self, content: Any) -> None:
        number = content.get("id") if isinstance(content, dict) else None
        if not isinstance(number, str) or len(number) > LONGEST_ID:
            log.warning("a panel's message has no id: %.200r", content)
            return
        if len(self._answering) >= MOST_REQUESTS:
            self._refuse(number, "queue-full", f"{MOST_REQUESTS} requests of this panel are under way; wait for one")
            return
        task = asyncio.create_task(self._answer(number, content), name=f"answer a panel's {content.get('do')!r:.40}")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, number: str, content: Mapping[str, Any]) -> None:
        what = content.get("do")
        try:
            known = self.REQUESTS | {"compare"}
            if not isinstance(what, str) or what not in known:
                raise InvalidRequestError(f"this panel cannot {what!r:.40}; it can {', '.join(sorted(known))}")
            result = await getattr(self, f"do_{what}")(content)
        except LabError as exc:
            self._refuse(number, exc.code, exc.message)
        except Exception:
            log.exception("a panel's request failed")
            self._refuse(number, "internal-error", "a bug in the panel; the kernel's log has the details")
        else:
            self.send({"id": number, "ok": True, "result": result})

    def _refuse(self, number: str, code: str, message: str) -> None:
        self.send({"id": number, "ok": False, "error": {"code": code, "message": message}})

    # Without a kernel

    def snapshot_html(self) -> str:
        """What the panel shows now, as HTML without scripts and ids; for saved notebooks."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return {**data, "text/html": self.snapshot_html()}, metadata

    def _ipython_display_(self) -> None:
        static_fallback.show(self._repr_mimebundle_())


def text_field(fields: Mapping[str, Any], name: str, *, most: int = 4096) -> str:
    """A text of a request.

    Raises:
        InvalidRequestError: it is missing, empty, no text or too long.
    """
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequestError(f"{name} is {value!r:.40}; it must be a text", param=name)
    if len(value) > most:
        raise InvalidRequestError(f"{name} has {len(value)} characters; at most {most} are taken", param=name)
    return value


def number_field(fields: Mapping[str, Any], name: str, *, low: float, high: float, default: float) -> float:
    """A number of a request, or the default where it is left out.

    Raises:
        InvalidRequestError: it is no number, or outside of its bounds.
    """
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} is {value!r:.40}; it must be between {low:,.10g} and {high:,.10g}", param=name
        )
    return value

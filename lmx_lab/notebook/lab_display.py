"""Display a lab: its panels, its description, snapshots and reports.

The widgets are optional, and are in ``notebook.display``.
"""

from __future__ import annotations

import functools
import html
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmx_lab.backend import Backend
from lmx_lab.errors import MissingPackageError
from lmx_lab.extras import optional_imports
from lmx_lab.notebook.lab_server import LabServer
from lmx_lab.notebook.report import Snapshot, report_html, take_snapshot, write_report
from lmx_lab.notebook.rerank_result import RerankResult
from lmx_lab.panels.workbench import Workbench

if TYPE_CHECKING:
    import ipywidgets

    from lmx_lab.notebook.display import LabDisplay
    from lmx_lab.panels.events import EventsPanel
    from lmx_lab.panels.metrics import MetricsPanel

MODELS_TIMEOUT_S = 30.0
"""Maximum time to list the models for a snapshot."""


class DisplayMethods:
    """The methods of ``Lab`` that display it."""

    _server: LabServer
    _backend: Backend
    _workbench: Workbench | None = None

    @property
    def workbench(self) -> Workbench:
        """The state that the lab's panels share."""
        if self._workbench is None or self._workbench.backend is not self._backend:
            # The panels of the previous workbench show another lab now.
            return self._use(Workbench(self._backend))
        return self._workbench

    def take_over(self, workbench: Workbench | None) -> Workbench:
        """Show this lab in the panels of another one, if there are any, and start to record its measurements."""
        workbench = workbench or Workbench(self._backend)
        workbench.follow(self._backend)
        return self._use(workbench)

    def _use(self, workbench: Workbench) -> Workbench:
        self._workbench = workbench
        # Without a reference to the lab, so that a remote connection is also closed when its lab is deleted.
        self._server.when_closed(functools.partial(workbench.suspend_if_shown, self._backend))
        return workbench

    def panel(self, *names: str) -> ipywidgets.DOMWidget:
        """Return the named panels as one widget.

        The panels are ``models``, ``metrics``, ``chat``, ``rerank``, ``lens``, ``timeline`` and ``events``; by default
        all of them except ``lens`` and ``timeline``, and ``events`` only if there is a daemon. Each panel exists once:
        displaying it again shows the same panel in another place.

        Raises:
            InvalidRequestError: there is no panel of this name.
            MissingPackageError: anywidget or ipywidgets is not installed.
        """
        widget = self._display().panel(names)
        self._server.panels_shown()
        return widget

    def metrics(self) -> MetricsPanel:
        """Return the live measurements; ``.df`` has those of the last 15 minutes as a data frame."""
        panel = self._display().metrics()
        self._server.panels_shown()
        return panel

    def _events_panel(self) -> EventsPanel:
        return self._display().events()

    def snapshot(self) -> Snapshot:
        """Return the lab at this moment: server, models, measurements, versions, machine."""
        samples = self.workbench.history.samples
        models = self.workbench.submit(self._backend.models()).result(MODELS_TIMEOUT_S)
        return take_snapshot(self._backend.state(), models, samples[-1] if samples else None)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML file: the snapshot, charts of the last 15 minutes, the requests, and the
        content of the chat and rerank panels.

        Raises:
            InvalidRequestError: the path cannot be written.
        """
        history = self.workbench.history
        sections = self._display().sections() if self.workbench.panels else []
        text = report_html(self.snapshot(), history.samples, history.requests, sections)
        return write_report(path, text)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._server.facts().items())

    def _repr_html_(self) -> str:
        return facts_html(self._server.facts()) + code_html(self._backend.state().phone_code)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Return the compact models panel, and the facts for other frontends and for saved notebooks."""
        facts = {"text/plain": repr(self), "text/html": self._repr_html_()}
        try:
            display = self._display()
        except MissingPackageError:
            return facts
        return display.card(facts, **options)

    def _ipython_display_(self) -> None:
        try:
            display = self._display()
        except MissingPackageError:
            raise NotImplementedError from None  # IPython then uses the MIME bundle.
        display.show(self._repr_mimebundle_(), self._repr_html_)

    def _show_ranking(self, result: RerankResult) -> None:
        """Display a ranking as a widget; raises as ``_display``."""
        self._display().show_ranking(result)

    def _display(self) -> LabDisplay:
        """Return the widgets of this lab.

        Raises:
            MissingPackageError: anywidget or ipywidgets is not installed.
        """
        with optional_imports("a panel"):
            # Imported here, because widgets are optional, and a server without a notebook does not need them.
            from lmx_lab.notebook.display import LabDisplay
        return LabDisplay(self.workbench)


def facts_html(facts: Mapping[str, str]) -> str:
    """Return the lines that describe a lab as a table in HTML."""
    left = "style='text-align:left'"
    rows = "".join(
        f"<tr><th {left}>{html.escape(name)}</th><td {left}><code>{html.escape(value)}</code></td></tr>"
        for name, value in facts.items()
    )
    return f"<table>{rows}</table>"


def code_html(code: str) -> str:
    """Return a collapsed QR code in HTML; empty if there is no code."""
    if not code:
        return ""
    image = f"<img alt='QR code of the LAN address' src='{html.escape(code)}' width='180' height='180'>"
    return f"<details><summary>QR code for phones</summary>{image}</details>"

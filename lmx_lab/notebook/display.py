"""Display a lab and its results with widgets.

Importing this module needs ipywidgets and anywidget, which are optional, and takes a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets

from lmx_lab.notebook.rerank_result import RerankResult
from lmx_lab.panels.events import EventsPanel
from lmx_lab.panels.layout import card, compose_panels, report_sections
from lmx_lab.panels.metrics import MetricsPanel
from lmx_lab.panels.rerank import RankingTable, RerankPanel
from lmx_lab.panels.workbench import Workbench


class LabDisplay:
    """The widgets of a workbench."""

    def __init__(self, workbench: Workbench) -> None:
        self._workbench = workbench

    def panel(self, names: Sequence[str]) -> ipywidgets.DOMWidget:
        """Return the named panels, by default all, as one widget.

        Raises:
            InvalidRequestError: there is no panel of this name.
        """
        return compose_panels(self._workbench, names)

    def metrics(self) -> MetricsPanel:
        panel = self.panel(["metrics"])
        assert isinstance(panel, MetricsPanel)
        return panel

    def events(self) -> EventsPanel:
        panel = self.panel(["events"])
        assert isinstance(panel, EventsPanel)
        return panel

    def sections(self) -> list[tuple[str, str]]:
        """Return the title and the static HTML of each panel that a report includes."""
        return report_sections(self._workbench)

    def card(self, facts: Mapping[str, str], **options: Any) -> Any:
        """Return the MIME bundle of the compact models panel.

        Args:
            facts: Text and HTML for frontends without widgets.
            options: Arguments of ``_repr_mimebundle_``.
        """
        widget, metadata = card(self._workbench)._repr_mimebundle_(**options) or ({}, {})
        return {**widget, **facts}, metadata

    def show(self, bundle: Any, render: Callable[[], str] | None = None) -> None:
        """Display a MIME bundle in the current cell; see ``StaticViews.show``."""
        self._workbench.static_views.show(bundle, render)

    def show_ranking(self, result: RerankResult) -> None:
        """Display a result as a table that can be sorted; the same widget each time."""
        if result.widget is None or result.widget.comm is None:
            table = RankingTable(
                query=result.query,
                order=[(row.index, row.score) for row in result],
                documents=[row.document for row in result],
                model=result.model,
                method=result.method,
            )
            result.widget = RerankPanel(self._workbench, result=table)
        widget, metadata = result.widget._repr_mimebundle_() or ({}, {})
        self.show(({**widget, "text/plain": repr(result), "text/html": result._repr_html_()}, metadata))

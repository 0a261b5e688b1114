"""What a lab shows in a notebook: its panels, its figures, a report."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmx_lab.notebook.rerank_result import RerankResult
from lmx_lab.panels.workbench import Workbench

if TYPE_CHECKING:
    # Widgets take a while to import, and a server without a notebook has none.
    import ipywidgets

    from lmx_lab.backend import Source
    from lmx_lab.notebook.report import Snapshot
    from lmx_lab.panels.metrics import MetricsPanel
    from lmx_lab.panels.panel import Panel

LOOK_S = 30.0
"""How long the list of models may take."""


class Showing(ABC):
    """Panels over a lab, in this process or elsewhere. They are made when they are first asked for."""

    _workbench: Workbench | None = None
    _seen_as: Source | None = None

    @abstractmethod
    def _source(self) -> Source:
        """This lab, as panels need it."""

    @property
    def workbench(self) -> Workbench:
        """What the panels share."""
        if self._workbench is None or not self._is_shown:
            # Its panels have gone on to the next lab.
            self._seen_as = self._source()
            self._workbench = Workbench(self._seen_as)
        return self._workbench

    @property
    def _is_shown(self) -> bool:
        """Whether its panels are still its own."""
        return self._workbench is not None and self._workbench.source is self._seen_as

    def take_over(self, workbench: Workbench | None) -> Workbench:
        """Show this lab in the panels that another one has left, and begin to remember what happens."""
        self._seen_as = self._source()
        self._workbench = workbench or Workbench(self._seen_as)
        self._workbench.follow(self._seen_as)
        return self._workbench

    def _rest(self) -> None:
        """End what the panels do, if they show this lab."""
        if self._workbench is not None and self._is_shown:
            self._workbench.rest()

    def panel(self, *names: str) -> ipywidgets.DOMWidget:
        """The panels, as one widget: ``models``, ``metrics``, ``chat``, ``rerank``, ``events`` if there is a daemon; or
        those that are named.

        There is one instance of each; shown again, it is the same one in another place.

        Raises:
            InvalidRequestError: there is no such panel.
            ImportError: anywidget or ipywidgets is not installed.
        """
        try:
            from lmx_lab.panels.layout import composed
        except ImportError as exc:
            raise ImportError(f"panels need {exc.name}, which is not installed: pip install 'lmx-lab[lab]'") from exc
        return composed(self.workbench, names)

    def metrics(self) -> MetricsPanel:
        """The live figures; ``.df`` is what they were in the last 15 minutes, as a data frame."""
        from lmx_lab.panels.metrics import MetricsPanel

        panel = self.panel("metrics")
        assert isinstance(panel, MetricsPanel)
        return panel

    def snapshot(self) -> Snapshot:
        """The lab as of now: server, models, figures, versions, machine."""
        from lmx_lab.notebook.report import taken

        source, samples = self.workbench.source, self.workbench.history.samples
        models = self.workbench.submit(source.models()).result(LOOK_S)
        return taken(source.state(), models, samples[-1] if samples else None)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML file that needs nothing else: the snapshot, the figures of the last 15 minutes as charts, the
        requests, and what the chat and rerank panels show.

        Raises:
            InvalidRequestError: the path cannot be written.
        """
        from lmx_lab.notebook.report import report_html, write_report

        history, sections = self.workbench.history, []
        if self.workbench.panels:
            from lmx_lab.panels.layout import shown_sections

            sections = shown_sections(self.workbench)
        text = report_html(self.snapshot(), history.samples, history.requests, sections)
        return write_report(path, text)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """In a notebook the models panel, folded; elsewhere, and in a saved notebook, the facts."""
        facts = {"text/plain": repr(self), "text/html": self._repr_html_()}
        try:
            from lmx_lab.panels.layout import card
        except ImportError:
            return facts
        widget, metadata = card(self.workbench)._repr_mimebundle_(**kwargs) or ({}, {})
        return {**widget, **facts}, metadata

    def _ipython_display_(self) -> None:
        from lmx_lab.panels import static_fallback

        static_fallback.show(self._repr_mimebundle_())

    @abstractmethod
    def _repr_html_(self) -> str: ...

    def _displayed(self, result: RerankResult) -> RerankResult:
        """The same, which a notebook shows as a table that sorts."""
        table: list[Panel] = []

        def display(result: RerankResult) -> None:
            try:
                from lmx_lab.panels import static_fallback
                from lmx_lab.panels.rerank import RerankPanel, Rows
            except ImportError:
                raise NotImplementedError from None
            # One widget however often it is shown.
            if not table or table[0].comm is None:
                rows = Rows(
                    query=result.query,
                    order=[(row.index, row.score) for row in result],
                    documents=[row.document for row in result],
                    model=result.model,
                    method=result.method,
                )
                table[:] = [RerankPanel(self.workbench, result=rows)]
            bundle, metadata = table[0]._repr_mimebundle_() or ({}, {})
            static_fallback.show(({**bundle, "text/plain": repr(result), "text/html": result._repr_html_()}, metadata))

        result.display_as = display
        return result

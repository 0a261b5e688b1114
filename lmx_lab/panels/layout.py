"""List the panels, and create and arrange the widgets of a workbench, which has one instance of each panel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets

from lmx_lab.errors import InvalidRequestError
from lmx_lab.panels.chat import ChatPanel
from lmx_lab.panels.events import EventsPanel
from lmx_lab.panels.lens import LensPanel
from lmx_lab.panels.metrics import MetricsPanel
from lmx_lab.panels.models import ModelsPanel
from lmx_lab.panels.panel import Panel
from lmx_lab.panels.rerank import RerankPanel
from lmx_lab.panels.timeline import TimelinePanel
from lmx_lab.panels.workbench import Workbench

PANELS: dict[str, type[Panel]] = {
    "models": ModelsPanel,
    "metrics": MetricsPanel,
    "chat": ChatPanel,
    "rerank": RerankPanel,
    "lens": LensPanel,
    "events": EventsPanel,
    "timeline": TimelinePanel,
}


class PanelGrid(ipywidgets.GridBox):  # type: ignore[misc]
    """A grid of several panels, which are side by side if there is room."""

    def __init__(self, panels: Sequence[Panel]) -> None:
        # At most two columns, so that only a panel without a neighbour could leave an empty cell; it then spans both.
        columns = "repeat(auto-fit, minmax(min(100%, max(26rem, 40%)), 1fr))"
        for panel, is_wide in zip(panels, full_width([panel.FULL_WIDTH for panel in panels]), strict=True):
            panel.wide = is_wide
        super().__init__(
            children=tuple(panels), layout=ipywidgets.Layout(grid_template_columns=columns, grid_gap="8px")
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**data, "text/html": self.snapshot_html()}, metadata

    def snapshot_html(self) -> str:
        """Return the content of all panels as HTML without scripts and ids."""
        return "".join(panel.snapshot_html() for panel in self.children)

    def _ipython_display_(self) -> None:
        self.children[0].workbench.static_views.show(self._repr_mimebundle_(), self.snapshot_html)


def full_width(wide: Sequence[bool]) -> list[bool]:
    """Return which panels of a grid with two columns span both columns: those that need the width, and those that
    would otherwise have an empty cell beside them."""
    spans: list[bool] = []
    at = 0
    while at < len(wide):
        is_pair = not any(wide[at : at + 2]) and at + 1 < len(wide)
        spans += [False, False] if is_pair else [True]
        at += 2 if is_pair else 1
    return spans


def compose_panels(workbench: Workbench, names: Sequence[str]) -> ipywidgets.DOMWidget:
    """Return the named panels as one widget; by default those of a lab, and those of a daemon if there is one.

    Raises:
        InvalidRequestError: there is no panel of this name.
    """
    for name in names:
        if name not in PANELS:
            raise InvalidRequestError(
                f"there is no panel {name!r:.40}; the panels are {', '.join(PANELS)}", param="names"
            )
    has_daemon = workbench.events is not None
    shown = [name for name, kind in PANELS.items() if not kind.BY_NAME_ONLY and (has_daemon or not kind.NEEDS_DAEMON)]
    panels = [panel(workbench, name, PANELS[name]) for name in names or shown]
    if len(panels) == 1:
        return panels[0]
    box = workbench.boxes.get(tuple(names))
    if box is None or box.comm is None or box.children != tuple(panels):
        box = workbench.boxes[tuple(names)] = PanelGrid(panels)
    return box


def card(workbench: Workbench, facts: Mapping[str, str], **options: Any) -> Any:
    """Return the MIME bundle of the compact models panel: the lab's addresses and its loaded model, with the list of
    models folded.

    Args:
        facts: Text and HTML for frontends without widgets.
        options: Arguments of ``_repr_mimebundle_``.
    """
    models = panel(workbench, "card", lambda bench: ModelsPanel(bench, compact=True))
    widget, metadata = models._repr_mimebundle_(**options) or ({}, {})
    return {**widget, **facts}, metadata


def panel(workbench: Workbench, name: str, make: Callable[[Workbench], Panel]) -> Panel:
    """Return the workbench's panel of this name, which is created if it does not exist or was closed."""
    found: Panel | None = workbench.panels.get(name)
    if found is None or found.comm is None:
        found = workbench.panels[name] = make(workbench)
    return found


def report_sections(workbench: Workbench) -> list[tuple[str, str]]:
    """Return the title and the static HTML of each existing panel that a report includes."""
    return [
        (name.title(), workbench.panels[name].snapshot_html())
        for name, panel in PANELS.items()
        if panel.IN_REPORT and name in workbench.panels
    ]

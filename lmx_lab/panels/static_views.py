"""Display widgets with static snapshots of their last state, which a notebook without its kernel shows instead."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lmx_lab.results.figures import format_time
from lmx_lab.urls import is_vscode

log = logging.getLogger(__name__)

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# If an output contains a widget, JupyterLab ignores the other representations in the output, and displays "Loading
# widget..." or "model not found" if the widget no longer exists. Therefore the snapshot is a separate output. It is
# hidden if the widget before it exists or was closed, and an output of plain text before a snapshot is hidden.
_STYLE = """\
<style>
.jp-OutputArea-child:has(section.lmx) + .jp-OutputArea-child:has(.lmx-snapshot),
.jp-OutputArea-child:has(> .lm-mod-hidden) + .jp-OutputArea-child:has(.lmx-snapshot),
.jp-OutputArea-child:has(+ .jp-OutputArea-child .lmx-snapshot) > .jp-OutputArea-output:not(:has(*)) { display: none; }
</style>
"""


class StaticViews:
    """The snapshots of displayed widgets. They are sent again after a change, so that a saved notebook is up to date.

    Snapshots are updated when a cell ends, at the next ``refresh`` after ``mark_changed(ended=True)``, and otherwise
    ten seconds after the last update if ``mark_changed`` was called since. Can be used from any thread.

    Args:
        check: Called when a cell ends; calls ``mark_changed`` for changes that cause no event.
        max_views: Maximum number of displayed widgets whose snapshots are updated; the newest are kept.
    """

    def __init__(self, check: Callable[[], object] = lambda: None, *, max_views: int = 32) -> None:
        self._check = check
        self._max_views = max_views
        self._views: dict[str, tuple[Callable[[], str], str, bool]] = {}
        """For each display id, the function that returns the current HTML, and the HTML that was sent last."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_changed = False
        self._due_at = 0.0
        self._shell: Any = None

    def show(self, bundle: Any, render: Callable[[], str] | None = None) -> None:
        """Display the result of a ``_repr_mimebundle_``.

        Args:
            render: Returns the current HTML of the bundle; None if it does not change.
        """
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        outputs = split_outputs(data, metadata, os.environ)
        name = f"lmx-lab-{os.getpid()}-{next(self._numbers)}" if render and len(outputs) > 1 else None
        # Imported when a widget is displayed, because a lab without a notebook does not need IPython.
        from IPython.core.getipython import get_ipython
        from IPython.display import display

        for output in outputs:
            shown_as = name if output is outputs[-1] else None
            display(output, metadata=metadata, raw=True, display_id=shown_as)  # type: ignore[no-untyped-call]
        if render is not None and name is not None:
            with self._lock:
                self._views[name] = render, data["text/html"], False
                while len(self._views) > self._max_views:
                    del self._views[next(iter(self._views))]
            if (shell := get_ipython()) is not None and shell is not self._shell:
                self._shell = shell
                shell.events.register("post_run_cell", self._after_cell)

    def mark_changed(self, *, ended: bool = False) -> None:
        """Schedule an update of the snapshots.

        Args:
            ended: Whether a turn, a load or a measurement has ended; the update is then due immediately.
        """
        self._is_changed = True
        if ended:
            self._due_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether ``refresh`` should be called."""
        return self._is_changed and bool(self._views) and time.monotonic() >= self._due_at

    def refresh(self, *, after_cell: bool = False) -> None:
        """Send the snapshots that have changed. Must not be called on the panels' loop, which the snapshots may use.

        Args:
            after_cell: Whether a cell has just ended. Snapshots that were sent at another time are then sent again,
                because nbconvert and papermill ignore messages between two cells.
        """
        from IPython.display import display  # As in show.

        with self._lock:
            self._is_changed, self._due_at = False, time.monotonic() + 10
            for name, (render, sent, again) in list(self._views.items()):
                try:
                    content = render()
                    if is_new := content != sent or (again and after_cell):
                        display({"text/html": _wrapped(content)}, raw=True, display_id=name, update=True)  # type: ignore[no-untyped-call]
                except Exception:
                    # An error in one panel must not stop the others, or make the user's cell fail.
                    log.exception("the snapshot of a panel could not be updated")
                else:
                    self._views[name] = render, content, (is_new or again) and not after_cell

    def _after_cell(self, _result: Any) -> None:
        self._check()
        if self._is_changed or any(again for _, _, again in list(self._views.values())):
            self.refresh(after_cell=True)


def split_outputs(
    data: Mapping[str, Any], metadata: Mapping[str, Any], environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Split a bundle into the two outputs that JupyterLab needs: the widget and its snapshot.

    A bundle without a widget, or for another frontend, is returned unchanged as the only output. nbconvert renders the
    empty HTML instead of the widget, and then the snapshot.
    """
    # Only in Colab does a widget's bundle have metadata.
    if WIDGET_VIEW not in data or "text/html" not in data or metadata or is_vscode(environ):
        return [dict(data)]
    return [{**data, "text/html": ""}, {"text/html": _wrapped(data["text/html"])}]


def _wrapped(content: str) -> str:
    return f'{_STYLE}<div class="lmx-snapshot"><div>as of {format_time(time.time())}</div>{content}</div>'

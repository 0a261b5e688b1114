"""What stands in a notebook where no kernel is left to bring a widget to life."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from IPython.display import display

from lmx_lab.urls import is_vscode

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# Of one output JupyterLab takes the widget, and if that is gone says "Loading widget..." or "model not found" and looks
# at no other form. So the snapshot is an output of its own, hidden behind a widget that lives or was closed; where
# there is nothing but text, that is hidden.
_STYLE = """\
<style>
.jp-OutputArea-child:has(section.lmx) + .jp-OutputArea-child:has(.lmx-snapshot),
.jp-OutputArea-child:has(> .lm-mod-hidden) + .jp-OutputArea-child:has(.lmx-snapshot),
.jp-OutputArea-child:has(+ .jp-OutputArea-child .lmx-snapshot) > .jp-OutputArea-output:not(:has(*)) { display: none; }
</style>
"""


def show(bundle: Any) -> None:
    """Display what a ``_repr_mimebundle_`` has returned."""
    data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
    for output in outputs(data, metadata, os.environ):
        display(output, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]


def outputs(data: Mapping[str, Any], metadata: Mapping[str, Any], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """The bundle as JupyterLab needs it; as it is where there is no widget, or in another frontend.

    What prints notebooks takes the empty text instead of the widget, and then the snapshot.
    """
    # Only in Colab has a widget's bundle metadata.
    if WIDGET_VIEW not in data or "text/html" not in data or metadata or is_vscode(environ):
        return [dict(data)]
    return [{**data, "text/html": ""}, {"text/html": f'{_STYLE}<div class="lmx-snapshot">{data["text/html"]}</div>'}]

"""Display a widget so that a notebook without its kernel shows a static snapshot instead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from IPython.display import display

from lmx_lab.urls import is_vscode

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# If an output has a widget, JupyterLab uses no other form of it, and displays "Loading widget..." or "model not found"
# when the widget is gone. Therefore the snapshot is an output of its own. It is hidden if the widget before it exists
# or was closed, and an output that is only text is hidden before a snapshot.
_STYLE = """\
<style>
.jp-OutputArea-child:has(section.lmx) + .jp-OutputArea-child:has(.lmx-snapshot),
.jp-OutputArea-child:has(> .lm-mod-hidden) + .jp-OutputArea-child:has(.lmx-snapshot),
.jp-OutputArea-child:has(+ .jp-OutputArea-child .lmx-snapshot) > .jp-OutputArea-output:not(:has(*)) { display: none; }
</style>
"""


def show(bundle: Any) -> None:
    """Display the result of a ``_repr_mimebundle_``."""
    data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
    for output in outputs(data, metadata, os.environ):
        display(output, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]


def outputs(data: Mapping[str, Any], metadata: Mapping[str, Any], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Split a bundle into the outputs that JupyterLab needs. Unchanged without a widget, and for other frontends.

    nbconvert uses the empty HTML instead of the widget, and then the snapshot.
    """
    # Only in Colab a widget's bundle has metadata.
    if WIDGET_VIEW not in data or "text/html" not in data or metadata or is_vscode(environ):
        return [dict(data)]
    return [{**data, "text/html": ""}, {"text/html": f'{_STYLE}<div class="lmx-snapshot">{data["text/html"]}</div>'}]

"""Display a widget so that a notebook without its kernel shows a static snapshot instead."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from IPython.display import display

from lmx_lab.urls import is_vscode

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


def show(bundle: Any) -> None:
    """Display the result of a ``_repr_mimebundle_``."""
    data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
    for output in split_outputs(data, metadata, os.environ):
        display(output, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]


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
    return [{**data, "text/html": ""}, {"text/html": f'{_STYLE}<div class="lmx-snapshot">{data["text/html"]}</div>'}]

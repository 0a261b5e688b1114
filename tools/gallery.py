"""Run notebooks and write them as web pages: ``python tools/gallery.py FOLDER [NOTEBOOK ...]``.

The pages need neither a kernel nor a network: they have static snapshots of widgets, and load no scripts. A notebook
with a failing cell is written with its error, and the exit status is 1.
"""

from __future__ import annotations

import html
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert.exporters import HTMLExporter

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
CELL_TIMEOUT_S = 1800
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# Without the scripts that nbconvert's template loads from other hosts; the pages do not need them.
TEMPLATE = """{% extends 'lab/index.html.j2' %}
{%- block html_head_js -%}{%- endblock html_head_js -%}
{%- block html_head_js_mathjax -%}{%- endblock html_head_js_mathjax -%}
{%- block html_head_js_mermaidjs -%}{%- endblock html_head_js_mermaidjs -%}
{%- block jupyter_widgets -%}{%- endblock jupyter_widgets -%}
{%- block body_header -%}{{ super() }}
<p style="padding: 0 1em"><a href="index.html">All notebooks</a></p>{%- endblock body_header -%}
"""
INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>LMX Lab: notebooks</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 46em; margin: 2em auto; padding: 0 1em; }}
pre {{ background: #f4f4f4; padding: .6em .8em; overflow-x: auto; }}
small {{ color: #666; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #161616; color: #ddd; }}
  pre {{ background: #262626; }}
  a {{ color: #7ab7ff; }}
  small {{ color: #999; }}
}}
</style>
</head>
<body>
<h1>LMX Lab: notebooks</h1>
<p>A course in {count} notebooks, each with its question and the last text that it has printed. Run on {machine}, with
lmx-lab {version}, on {day}.</p>
{pages}
</body>
</html>
"""
PAGE = """<h2><a href="{name}.html">{title}</a></h2>
<p><em>{question}</em></p>
<pre>{answer}</pre>
<p><small>{seconds:.0f} s{failed}</small></p>
"""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A notebook that was run."""

    name: str
    title: str
    question: str
    answer: str
    """The last text that the notebook has printed."""
    seconds: float
    failed: bool


def main(folder: Path, paths: Sequence[Path]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    pages = []
    for path in paths:
        print(f"running {path.name}", flush=True)
        pages.append(render(path, folder))
        # Written after each notebook, so that a long run can be interrupted.
        (folder / "index.html").write_text(render_index(pages), encoding="utf-8")
        print(f"  {pages[-1].seconds:.0f} s{', with an error' if pages[-1].failed else ''}", flush=True)
    print(f"open {folder / 'index.html'}")
    return int(any(page.failed for page in pages))


def render(path: Path, folder: Path) -> Page:
    """Run a notebook in a new kernel, and write it into the folder, together with web pages that it has written."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="lmx-lab-gallery-") as scratch:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            resources={"metadata": {"path": scratch}},
            extra_arguments=["--log-level=40"],
            store_widget_state=False,
            # As in JupyterLab, where pieces that are printed one after the other are one text.
            coalesce_streams=True,
        )
        began = time.monotonic()
        failed = False
        try:
            client.execute()
        except CellExecutionError:
            failed = True
        except (CellTimeoutError, DeadKernelError) as exc:
            failed = True
            print(f"  {type(exc).__name__}: {str(exc).strip().splitlines()[0]}", flush=True)
        seconds = time.monotonic() - began
        for written in Path(scratch).glob("*.html"):
            shutil.copy(written, folder)
    title, question = read_heading(notebook)
    page = Page(
        name=path.stem, title=title, question=question, answer=last_text(notebook), seconds=seconds, failed=failed
    )
    prepare_for_page(notebook)
    body, _ = HTMLExporter(raw_template=TEMPLATE).from_notebook_node(notebook, {"metadata": {"name": title}})
    (folder / f"{path.stem}.html").write_text(body, encoding="utf-8")
    return page


def read_heading(notebook: Any) -> tuple[str, str]:
    """Return the title and the question of the first cell."""
    title, _, rest = notebook.cells[0].source.partition("\n")
    return title.lstrip("# "), rest.strip().partition("\n")[0].strip("*")


def last_text(notebook: Any) -> str:
    """Return the last text or error that the notebook has printed."""
    texts = [
        output.text if output.output_type == "stream" else f"{output.ename}: {output.evalue}"
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type in ("stream", "error")
    ]
    return texts[-1].strip() if texts else ""


def prepare_for_page(notebook: Any) -> None:
    """Remove outputs that need a kernel, and change links to notebooks to links to their pages."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.html)", cell.source)
            # The pages of the documentation are not beside the gallery.
            cell.source = re.sub(r"\[([^]]+)\]\(\.\./docs/[^)]+\)", r"\1", cell.source)
        else:
            cell.outputs = [output for output in cell.outputs if WIDGET_VIEW not in output.get("data", ())]


def render_index(pages: Sequence[Page]) -> str:
    entries = (
        PAGE.format(
            name=page.name,
            title=html.escape(page.title),
            question=html.escape(page.question),
            answer=html.escape(page.answer),
            seconds=page.seconds,
            failed=", ended with an error" if page.failed else "",
        )
        for page in pages
    )
    return INDEX.format(
        count=len(pages),
        machine=html.escape(platform.platform()),
        version=metadata.version("lmx-lab"),
        day=time.strftime("%Y-%m-%d"),
        pages="".join(entries),
    )


if __name__ == "__main__":
    chosen = [Path(name) for name in sys.argv[2:]] or sorted(NOTEBOOKS.glob("*.ipynb"))
    sys.exit(main(Path(sys.argv[1]), chosen))

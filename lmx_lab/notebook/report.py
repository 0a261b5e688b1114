"""A lab on one page: what it was, what it did, as a single HTML file that needs no script and no network.

Nothing here asks a lab. ``Snapshot`` holds what was asked, ``report_html`` writes it down, ``write_report`` saves it.
"""

from __future__ import annotations

import os
import secrets
import stat
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from lmx_lab.errors import InvalidRequestError
from lmx_lab.notebook.charts import CSS as CHART_CSS
from lmx_lab.notebook.charts import Chart, Line, clock, number
from lmx_lab.notebook.snapshot import Snapshot, moment, safe
from lmx_lab.panels.history import EndedRequest
from lmx_lab.wire.admin import ModelRecord, RequestEvent, Sample

MOST_ROWS = 200
"""Of the table of requests."""
GENERATOR = '<meta name="generator" content="LMX Lab report">'
HEAD_BYTES = 2048
"""Where the line above is looked for in a file that would be overwritten."""
WELL = ("stop", "length", "tool_calls")

CSS = (
    """\
:root { color-scheme: light dark; --paper: #ffffff; --text: #1f2328; --muted: #57606a; --grid: #d0d7de;
  --line-0: #0550ae; --line-1: #9a3412; --line-2: #116329; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --text: #e6edf3; --muted: #9ba3ad; --grid: #3d444d;
    --line-0: #79c0ff; --line-1: #ffa657; --line-2: #7ee787; }
}
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--paper); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.2; break-after: avoid; }
h2 { margin-top: 2rem; border-bottom: 1px solid var(--grid); }
.wide { overflow-x: auto; margin-bottom: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top; overflow-wrap: break-word;
  max-width: 26rem; border-bottom: 1px solid var(--grid); unicode-bidi: isolate; }
.number { text-align: right; white-space: nowrap; }
figure { margin: 0 0 1rem; break-inside: avoid; }
footer, .quiet { color: var(--muted); }
tr { break-inside: avoid; }
@media print { body { max-width: none; padding: 0; font-size: 11px; } .wide { overflow: visible; } }
"""
    + CHART_CSS
)
# Whatever a section may hold: the page loads nothing and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


# The page


def report_html(
    snapshot: Snapshot,
    samples: Sequence[Sample],
    requests: Sequence[EndedRequest],
    sections: Sequence[tuple[str, str]] = (),
) -> str:
    """The whole page.

    Args:
        samples: Of any length and order; the charts show them by time.
        requests: The newest 200 by time have a row each, all of them count in the summary.
        sections: A title, which is escaped, and HTML, which is not.
    """
    parts = [
        ("Server", _table(_facts_rows(snapshot), head=())),
        ("Models", _models(snapshot.models.models)),
        ("Figures", _figures(sorted(samples, key=lambda sample: sample.at))),
        ("Requests", _requests(sorted(requests, key=lambda request: request.at, reverse=True))),
        *sections,
    ]
    body = "\n".join(f"<section>\n<h2>{safe(title)}</h2>\n{text or NOTHING}\n</section>" for title, text in parts)
    title = f"LMX Lab, {safe(moment(snapshot.at))}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{GENERATOR}
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{CSS}</style>
</head>
<body>
<header><h1>{title}</h1></header>
<main>
{body}
</main>
<footer><p>Times are local: {safe(time.strftime("%Z, UTC%z", time.localtime(snapshot.at)))}. GB are 10<sup>9</sup> \
bytes.</p></footer>
</body>
</html>
"""


NOTHING = '<p class="quiet">There is nothing to show.</p>'


def _facts_rows(snapshot: Snapshot) -> Iterable[str]:
    for name, value in snapshot.facts().items():
        yield f'<tr><th scope="row">{safe(name)}</th><td>{safe(value)}</td></tr>'


def _models(models: Sequence[ModelRecord]) -> str:
    if not models:
        return '<p class="quiet">No models are on this disk.</p>'
    head = ("model", "state", "kind", "format", "engine", "quantization", "#size GB", "#memory GB", "#context")
    return _table((_model_row(model) for model in models), head=head)


def _model_row(model: ModelRecord) -> str:
    state = "kept in memory" if model.pinned else "loaded" if model.loaded else ""
    texts = (model.id, state, model.kind, model.format, model.engine, model.quantization or "")
    memory = "" if model.vram_gb is None else f"{model.vram_gb:.3f}"
    context = "" if model.context_length is None else f"{model.context_length:,}"
    return _row(texts, (f"{model.size_gb:.3f}", memory, context))


# Figures


def _figures(samples: Sequence[Sample]) -> str:
    if not samples:
        return '<p class="quiet">No figures have been recorded yet.</p>'
    charts = _charts(samples)
    drawn = "\n".join(f"<figure>\n<h3>{safe(chart.title)}</h3>\n{chart.svg()}\n</figure>" for chart in charts)
    rows = (_figures_row(chart, line) for chart in charts for line in chart.lines)
    return f"{drawn}\n{_table(rows, head=('figure', 'unit', '#latest', '#median above 0', '#highest'))}"


def _charts(samples: Sequence[Sample]) -> list[Chart]:
    at = [sample.at for sample in samples]

    def line(name: str, field: str) -> Line:
        return Line(name=name, values=[float(getattr(sample, field)) for sample in samples])

    speed, counts, memory = "tokens/s", "requests", "GB"
    generated = [line("generated", "decode_tokens_per_second")]
    read = [line("prompts", "prompt_tokens_per_second"), line("embedded or scored", "encoded_tokens_per_second")]
    requests = [line("running", "active_requests"), line("waiting", "queued_requests")]
    used = [line(name, f"memory_{name}_gb") for name in ("active", "cache", "peak")]
    return [
        Chart(key="generated", title="Tokens generated", unit=speed, at=at, lines=generated),
        # Ten to a hundred times as many as are generated: on one axis these would lie on the ground.
        Chart(key="read", title="Tokens read", unit=speed, at=at, lines=read),
        Chart(key="requests", title="Requests at work", unit=counts, at=at, lines=requests, whole=True),
        Chart(key="memory", title="Memory", unit=memory, at=at, lines=used),
    ]


def _figures_row(chart: Chart, line: Line) -> str:
    figures = line.figures
    numbers = [number(value) for value in (figures.latest, figures.median, figures.highest)] if figures else [""] * 3
    return _row((f"{chart.title}: {line.name}", chart.unit), numbers)


# Requests


def _requests(newest: Sequence[EndedRequest]) -> str:
    if not newest:
        return '<p class="quiet">No request has ended yet.</p>'
    kinds = sorted({request.event.kind for request in newest})
    groups = [(kind, [request.event for request in newest if request.event.kind == kind]) for kind in kinds]
    head = ("kind", "#requests", "#failed", "#cancelled", "#prompt tokens", "#tokens", "#median tokens/s", "#median ms")
    summary = _table((_summary_row(kind, events) for kind, events in groups), head=head, caption="By kind")
    left_out = len(newest) - MOST_ROWS
    remark = f"The newest {MOST_ROWS}; {left_out:,} older ones are left out." if left_out > 0 else "The newest first."
    head = ("time", "kind", "model", "#prompt tokens", "#tokens", "#tokens/s", "#ms to first token", "end")
    return summary + _table((_request_row(request) for request in newest[:MOST_ROWS]), head=head, caption=remark)


def _summary_row(kind: str, events: Sequence[RequestEvent]) -> str:
    well = [event for event in events if event.finish_reason in WELL]
    reasons = [event.finish_reason for event in events]
    numbers = (
        f"{len(events):,}",
        f"{reasons.count('error'):,}",
        f"{reasons.count('cancelled'):,}",
        f"{sum(event.prompt_tokens for event in events):,}",
        f"{sum(event.completion_tokens for event in events):,}",
        _median([event.tokens_per_second for event in well]),
        _median([event.ttft_ms for event in well]),
    )
    return _row((kind,), numbers)


def _median(values: Sequence[float]) -> str:
    return number(statistics.median(values)) if values else ""


def _request_row(request: EndedRequest) -> str:
    event = request.event
    well = event.finish_reason in WELL
    iso = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(request.at))
    when = f'<td><time datetime="{iso}">{clock(request.at)}</time></td>'
    speed = (number(event.tokens_per_second), number(event.ttft_ms)) if well else ("", "")
    counts = (f"{event.prompt_tokens:,}", f"{event.completion_tokens:,}", *speed)
    end = f"{event.finish_reason}: {event.code}" if event.code else event.finish_reason
    cells = "".join([when, _cells((event.kind, event.model)), _cells(counts, "number"), _cells((end,))])
    return f"<tr>{cells}</tr>"


# Tables


def _table(rows: Iterable[str], *, head: Sequence[str], caption: str = "") -> str:
    """Columns whose name begins with ``#`` hold numbers."""
    names = "".join(
        f'<th scope="col" class="number">{safe(name[1:])}</th>'
        if name.startswith("#")
        else f'<th scope="col">{safe(name)}</th>'
        for name in head
    )
    above = f"<caption>{safe(caption)}</caption>\n" if caption else ""
    top = f"<thead><tr>{names}</tr></thead>\n" if head else ""
    body = "\n".join(rows)
    return f'<div class="wide"><table>\n{above}{top}<tbody>\n{body}\n</tbody>\n</table></div>\n'


def _row(texts: Iterable[str], numbers: Iterable[str]) -> str:
    return f"<tr>{_cells(texts)}{_cells(numbers, 'number')}</tr>"


def _cells(texts: Iterable[str], kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return "".join(f"<td{mark}>{safe(text)}</td>" for text in texts)


# The file


def write_report(path: str | os.PathLike[str], text: str) -> Path:
    """Save a report, whole or not at all; returns where it is. A report that is there already is overwritten.

    Raises:
        InvalidRequestError: the path names a folder, something in a folder that does not exist, a file that is no
            report, or a place that cannot be written.
    """
    target = _target(path)
    beside = target.with_name(f".lmx-report-{secrets.token_hex(6)}")
    try:
        try:
            # Not a temporary file of the library's, which nobody else could read.
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
                file.write(text.encode("utf-8", errors="replace"))
            beside.replace(target)
        finally:
            with suppress(FileNotFoundError):
                beside.unlink()
    except OSError as exc:
        raise _unwritable(target, f"cannot be written: {exc.strerror}; name another place") from exc
    return target


def _target(path: str | os.PathLike[str]) -> Path:
    try:
        target = Path(os.path.realpath(Path(path).expanduser()))
        mode = target.stat().st_mode if target.exists() else None
    except (TypeError, ValueError, RuntimeError, OSError) as exc:
        raise _unwritable(path, f"is no path of a file: {exc}") from exc
    if mode is None:
        if not target.parent.is_dir():
            raise _unwritable(target, f"cannot be written: there is no folder {str(target.parent)!r}; create it first")
    elif stat.S_ISDIR(mode):
        raise _unwritable(target, "is a folder; name a file in it, such as run.html")
    elif not stat.S_ISREG(mode):
        raise _unwritable(target, "is no ordinary file; name another one")
    else:
        _check_own(target)
    return target


def _check_own(target: Path) -> None:
    try:
        with target.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as exc:
        raise _unwritable(target, f"is there already and cannot be read: {exc.strerror}; name another file") from exc
    if head and GENERATOR.encode() not in head:
        raise _unwritable(target, "is there already and is no report; name another file, or delete that one first")
    if not os.access(target, os.W_OK):
        raise _unwritable(target, "is there already and may not be changed; name another file")


def _unwritable(path: object, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"the report {str(path)!r:.300} {why}", param="path")

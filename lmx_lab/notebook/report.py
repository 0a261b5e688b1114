"""Describe a lab at one moment: as a ``Snapshot``, and as a report, one HTML file without scripts and external files.

The functions here do not access a lab: they render a ``Snapshot`` and the workbench's history.
"""

from __future__ import annotations

import html
import os
import platform
import re
import secrets
import stat
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lmx_lab.backend import ServerState
from lmx_lab.errors import InvalidRequestError
from lmx_lab.extras import installed_version
from lmx_lab.panels.summary import MODEL_COLUMNS, describe_server, line_charts, model_row
from lmx_lab.panels.workbench import EndedRequest
from lmx_lab.results.figures import CSS as CHART_CSS
from lmx_lab.results.figures import format_clock, format_number, format_time
from lmx_lab.results.pages import Displayed, html_of, page, path_of
from lmx_lab.results.tables import Html, html_table
from lmx_lab.sanitize import UNSAFE
from lmx_lab.wire.admin import ModelRecords, Sample

MAX_REQUEST_ROWS = 200
"""Maximum number of rows of the table of requests."""
GENERATOR = '<meta name="generator" content="LMX Lab report">'
"""The line by which a report is recognized."""
SUCCESSFUL = ("stop", "length", "tool_calls")
"""Finish reasons of the requests whose speed is shown and included in medians."""

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


# The page


@dataclass(frozen=True, kw_only=True, repr=False)
class Snapshot(Displayed):
    """The state of a lab at one time. Machine and versions are those of the process that took the snapshot."""

    at: float
    """Seconds since 1970."""
    server: ServerState
    models: ModelRecords
    sample: Sample | None
    """The latest measurements; None if there are none."""
    versions: Mapping[str, str]
    """Versions of packages and of Python, by name."""
    machine: str
    """Operating system, architecture, cores, and total memory in units of 10^9 bytes."""

    def facts(self) -> dict[str, str]:
        """Return short descriptions by their names, without empty ones."""
        compute, preference = self.models.compute, self.models.preference
        facts = {
            "time": format_time(self.at),
            **describe_server(self.server),
            "models on disk": str(len(self.models.models)),
            "MLX matrix multiplication": f"{compute.blas}: {compute.detail}" if compute else "",
            "faster engine": preference.detail if preference else "",
            **self._measurements(),
            "machine": self.machine,
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        }
        return {name: value for name, value in facts.items() if value}

    def _measurements(self) -> dict[str, str]:
        now = self.sample
        if now is None:
            return {}
        generated, prompts = format_number(now.decode_tokens_per_second), format_number(now.prompt_tokens_per_second)
        encoded = format_number(now.encoded_tokens_per_second)
        return {
            "tok/s": f"{generated} generated, {prompts} of prompts, {encoded} embedded or scored",
            "requests": f"{now.active_requests} running, {now.queued_requests} waiting",
            "memory": f"{now.memory_active_gb:.2f} GB in use ({now.memory_cache_gb:.2f} GB for cached prompts), "
            f"{now.memory_peak_gb:.2f} GB at the peak, {now.memory_total_gb:.1f} GB in total",
        }

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.facts().items())

    def _repr_html_(self) -> str:
        return html_table((), ((name, _replace_unsafe(value)) for name, value in self.facts().items()), row_names=True)


def take_snapshot(server: ServerState, models: ModelRecords, sample: Sample | None) -> Snapshot:
    """Return a snapshot of the given state, with the current time, this machine and the installed versions."""
    return Snapshot(
        at=time.time(),
        server=server,
        models=models,
        sample=sample,
        versions={
            **{name: installed_version(name) or "not installed" for name in ("lmx-lab", "mlx", "mlx-lm", "xllamacpp")},
            "python": platform.python_version(),
        },
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count() or 1} cores, "
        f"{psutil.virtual_memory().total / 1e9:.1f} GB",
    )


def _replace_unsafe(text: str) -> str:
    """Replace characters that a page must not contain, or that change the direction of text."""
    return UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


def report_html(
    snapshot: Snapshot,
    samples: Sequence[Sample],
    requests: Sequence[EndedRequest],
    sections: Sequence[tuple[str, str]] = (),
    results: Sequence[object] = (),
) -> str:
    """Return the HTML of a report.

    Args:
        samples: Measurements for the charts, in any order.
        requests: Requests that have ended, in any order. The 200 newest have one row each; the summary counts all.
        sections: The title and HTML of each additional section. The title is escaped, the HTML is not.
        results: Objects that are shown first, as notebooks display them. A text is the title of the next result, whose
            default is its class.
    """
    parts, title = list[tuple[str, str]](), ""
    for result in (*results, ""):
        if not isinstance(result, str):
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(result).__name__).capitalize()
            parts.append((title or words, f'<div class="wide">{html_of(result)}</div>'))
        elif title:
            # A title without a result is the heading of an empty section.
            parts.append((title, " "))
        title = result if isinstance(result, str) else ""
    models = f'<p class="quiet">There are no models on {html.escape(snapshot.server.disk)}.</p>'
    if snapshot.models.models:
        server = snapshot.server
        serves = server.state in ("running", "lagging")
        leaving = server.model if server.unloading is not None else None
        listed = (model_row(each, serves=serves, unloading=each.id == leaving) for each in snapshot.models.models)
        models = _table(MODEL_COLUMNS, ([row["id"], *row["cells"]] for row in listed))
    parts += [
        ("Server", _table((), snapshot.facts().items(), row_names=True)),
        ("Models", models),
        ("Measurements", _measurements(sorted(samples, key=lambda sample: sample.at))),
        ("Requests", _requests(sorted(requests, key=lambda request: request.at, reverse=True))),
        *sections,
    ]
    empty = '<p class="quiet">There is nothing to show.</p>'
    body = "\n".join(f"<section>\n<h2>{html.escape(title)}</h2>\n{text or empty}\n</section>" for title, text in parts)
    title = f"LMX Lab, {format_time(snapshot.at)}"
    zone = time.strftime("%Z, UTC%z", time.localtime(snapshot.at))
    body = f"""<header><h1>{title}</h1></header>
<main>
{body}
</main>
<footer><p>Times are local: {html.escape(zone)}. GB are 10<sup>9</sup> bytes.</p></footer>"""
    return _replace_unsafe(page(title, body, CSS, GENERATOR))


def _measurements(samples: Sequence[Sample]) -> str:
    if not samples:
        return '<p class="quiet">No measurements have been recorded yet.</p>'
    charts = line_charts(samples)
    figures = "\n".join(f"<figure>\n{chart.svg()}\n</figure>" for chart in charts)
    rows = []
    for chart in charts:
        for series in chart.series:
            summary = series.summary()
            values = (summary.latest, summary.median, summary.highest) if summary else ()
            cells = map(format_number, values) if values else [""] * 3
            rows.append((f"{chart.title}: {series.name}", chart.unit, *cells))
    names = ("measurement", "unit", "latest", "median above 0", "highest")
    return f"{figures}\n{_table(names, rows, numbers=range(2, 5))}"


def _requests(newest: Sequence[EndedRequest]) -> str:
    if not newest:
        return '<p class="quiet">No request has ended yet.</p>'
    kinds = []
    for kind in sorted({request.event.kind for request in newest}):
        events = [request.event for request in newest if request.event.kind == kind]
        successful = [event for event in events if event.finish_reason in SUCCESSFUL]
        reasons = [event.finish_reason for event in events]
        kinds.append(
            (
                kind,
                f"{len(events):,}",
                f"{reasons.count('error'):,}",
                f"{reasons.count('cancelled'):,}",
                f"{sum(event.prompt_tokens for event in events):,}",
                f"{sum(event.completion_tokens for event in events):,}",
                _median([event.tokens_per_second for event in successful]),
                _median([event.ttft_ms for event in successful]),
            )
        )
    names = ("kind", "requests", "failed", "cancelled", "prompt tokens", "tokens", "median tok/s", "median ms")
    summary = _table(names, kinds, numbers=range(1, 8), caption="By kind")
    omitted = len(newest) - MAX_REQUEST_ROWS
    note = f"The {MAX_REQUEST_ROWS} newest; {omitted:,} older ones are omitted." if omitted > 0 else "The newest first."
    names = ("time", "kind", "model", "prompt tokens", "tokens", "tok/s", "ms to first token", "finish reason")
    rows = map(_request_row, newest[:MAX_REQUEST_ROWS])
    return summary + _table(names, rows, numbers=range(3, 7), caption=note)


def _median(values: Sequence[float]) -> str:
    return format_number(statistics.median(values)) if values else ""


def _request_row(request: EndedRequest) -> tuple[str, ...]:
    event = request.event
    iso = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(request.at))
    when = Html(f'<time datetime="{iso}">{format_clock(request.at)}</time>')
    is_successful = event.finish_reason in SUCCESSFUL
    speed = (format_number(event.tokens_per_second), format_number(event.ttft_ms)) if is_successful else ("", "")
    end = f"{event.finish_reason}: {event.code}" if event.code else event.finish_reason
    return (when, event.kind, event.model, f"{event.prompt_tokens:,}", f"{event.completion_tokens:,}", *speed, end)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]], **options: Any) -> str:
    """Return a table with the styles of the page. The options are those of ``html_table``."""
    return f'<div class="wide">{html_table(names, rows, style="", **options)}</div>\n'


# The file


def write_report(path: str | os.PathLike[str], text: str) -> Path:
    """Write a report atomically, and return its path. An older report is overwritten.

    Raises:
        InvalidRequestError: the path has the suffix of another format, is a folder, is in a folder that does not exist,
            is a file that is not a report, or cannot be written.
    """
    target = Path(os.path.realpath(path_of(path, "the report")))
    if target.suffix.lower() not in ("", ".html", ".htm"):
        raise _unwritable(target, f"has the suffix {target.suffix}, and a report is an HTML file; use .html")
    mode = target.stat().st_mode if target.exists() else None
    if mode is None:
        if not target.parent.is_dir():
            raise _unwritable(target, f"cannot be written: there is no folder {str(target.parent)!r}; create it first")
    elif stat.S_ISDIR(mode):
        raise _unwritable(target, "is a folder; give the path of a file in it, such as run.html")
    elif not stat.S_ISREG(mode):
        raise _unwritable(target, "is not a regular file; use another path")
    else:
        try:
            with target.open("rb") as existing:
                head = existing.read(2048)  # ``GENERATOR`` is near the start of each report.
        except OSError as exc:
            raise _unwritable(target, f"exists and cannot be read: {exc.strerror}; use another path") from exc
        if head and GENERATOR.encode() not in head:
            raise _unwritable(target, "exists and is not a report; use another path, or delete that file first")
        if not os.access(target, os.W_OK):
            raise _unwritable(target, "exists and is read-only; use another path")
    temporary = target.with_name(f".lmx-report-{secrets.token_hex(6)}")
    try:
        try:
            # Not created with ``tempfile``, whose files only this user can read.
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
                file.write(text.encode("utf-8", errors="replace"))
            temporary.replace(target)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
    except OSError as exc:
        raise _unwritable(target, f"cannot be written: {exc.strerror}; use another path") from exc
    return target


def _unwritable(path: object, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the report {str(path)!r:.300} {reason}", param="path")

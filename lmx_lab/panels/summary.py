"""Describe a lab: its state in words, its models as rows, and its measurements as charts. Uses no widgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

from lmx_lab.backend import ServerState
from lmx_lab.errors import counted, format_bytes
from lmx_lab.results.figures import LineChart, Series
from lmx_lab.values.plan import Fit
from lmx_lab.wire.admin import ModelRecord, Sample


def describe_server(server: ServerState) -> dict[str, str]:
    """Return the state of a server as short descriptions by their names, without empty ones."""
    described = {
        "server": f"{server.state} {server.place}".rstrip(),
        "note": server.note,
        "address": server.url,
        "LAN address": server.lan_url or "",
        "browser address": server.proxy_url or "",
        "model": ", ".join(map(str, filter(None, (server.model or "none loaded", server.unloading)))),
        "also loaded": ", ".join(server.others),
    }
    return {name: value for name, value in described.items() if value}


# Models

MODEL_COLUMNS = ("model", "kind", "format", "engine", "size", "quantization", "context", "fits", "state")
FITS: Mapping[Fit | None, str] = {"now": "yes", "after-unloading": "if others leave", "not-here": "no", None: ""}
"""Whether a model that is not loaded fits in memory, for display."""


def model_row(record: ModelRecord, *, serves: bool, unloading: bool) -> dict[str, Any]:
    """Return a row of the table. Without a running server, no model is loaded."""
    memory = "" if record.vram_gb is None else f", {format_bytes(record.vram_gb * 1e9)}"
    state, action = ("needs " + record.engine, "") if record.problem else ("on disk", "Load")
    if serves and record.pinned:
        state, action = f"kept loaded{memory}", ""
    elif serves and record.loaded:
        state, action = f"{'unloading' if unloading else 'loaded'}{memory}", ""
    context = format_context(record, serves=serves)
    size = format_bytes(record.size_gb * 1e9)
    others = [format_ for format_ in record.formats if format_ != record.format]
    formats = ", ".join([record.format, *others])
    copy = record.quantized_copy
    quantization = record.quantization or "" if copy is None else copy.title
    cells = [record.kind, formats, record.engine, size, quantization, context, FITS[record.fits], state]
    return {"id": record.id, "cells": cells, "action": action}


def format_context(record: ModelRecord, *, serves: bool) -> str:
    """Format the context of a model: as it is loaded, with the number of slots, or else as it was trained."""
    if serves and (loaded := record.loaded_context_length) is not None and record.slots is not None:
        return f"{loaded:,} in {counted(record.slots, 'slot')}"
    return "" if record.context_length is None else f"{record.context_length:,}"


# Measurements


@dataclass(frozen=True, kw_only=True)
class MetricChart:
    """One chart of the panel, and the values above it."""

    title: str
    unit: str
    digits: int
    """Decimal places of the values."""
    least: float
    """Minimum value at the upper end of the axis."""
    fields: Mapping[str, str]
    """The field of ``Sample`` for each name."""
    lines: int = 3
    """Maximum number of lines, for the first names; the others are shown only as a value."""

    def shown(self) -> dict[str, Any]:
        """Return the chart as a view shows it."""
        title = f"{self.title}, {self.unit}" if self.unit else self.title
        return {**asdict(self), "title": title, "names": [*self.fields]}


CHARTS = (
    # Prefill is so much faster than decoding that one axis for both would hide the latter.
    MetricChart(title="Decode", unit="tok/s", digits=1, least=1, fields={"all requests": "decode_tokens_per_second"}),
    MetricChart(
        title="Prefill",
        unit="tok/s",
        digits=1,
        least=1,
        fields={"prompts": "prompt_tokens_per_second", "embeddings": "encoded_tokens_per_second"},
    ),
    MetricChart(
        title="Requests", unit="", digits=0, least=3, fields={"active": "active_requests", "queued": "queued_requests"}
    ),
    MetricChart(
        title="Memory",
        unit="GB",
        digits=2,
        least=0.01,
        fields={name: f"memory_{name}_gb" for name in ("active", "cache", "peak", "total")},
    ),
)
FIELDS = tuple(field for chart in CHARTS for field in chart.fields.values())
values_of = attrgetter(*FIELDS)


def line_charts(samples: Sequence[Sample]) -> list[LineChart]:
    """Return the charts of samples, which are in ascending order of time."""
    return [
        LineChart(
            key=next(iter(chart.fields.values())),
            title=chart.title,
            unit=chart.unit or chart.title.lower(),
            at=[sample.at for sample in samples],
            series=[
                Series(name=name, values=list(map(attrgetter(field), samples)))
                for name, field in islice(chart.fields.items(), chart.lines)
            ],
            whole=not chart.digits,
        )
        for chart in CHARTS
    ]

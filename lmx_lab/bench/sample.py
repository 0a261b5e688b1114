"""The measurement of one request, which is a row of the table."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from lmx_lab.frames import pandas_for

if TYPE_CHECKING:
    import pandas as pd

CountedBy = Literal["usage", "chunks"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The measurement of one request. Unknown values are ``None``.

    The server reported ``server_*`` and ``queue_ms``; this process measured the other figures.
    """

    run: str = ""
    """Id of the run, which is the name of its file."""
    started_at: str
    """Time when the request was sent, from ``RunClock``: ISO 8601, UTC, microseconds."""
    target: str
    engine: str | None = None
    model: str | None = None
    quantization: str | None = None
    device: str | None = None
    threads: int | None = None
    blas: str | None = None

    case: str
    """``Case.name``."""
    prompt_tokens_wanted: int
    output_tokens_wanted: int
    concurrency: int
    arrival: str
    """``str(case.arrival)``."""
    cache: str
    seed: int
    repeat: int
    """Counted from 0."""
    request: int
    """Number within the repeat, counted from 0; warm-up requests are counted separately."""
    warm_up: bool = False

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server found in its cache."""
    output_tokens: int | None = None
    counted_by: CountedBy | None = None
    """Source of ``output_tokens``: the server's usage, or the number of chunks with text, of several tokens each."""

    pieces: int | None = None
    """Number of pieces of the answer: chunks with text, or steps of an engine without a server."""
    ttft_ms: float | None = None
    """Time to the first token since sending; with Poisson arrivals, since the time when the request was due."""
    itl_ms_p50: float | None = None
    """Time between two pieces. Like ``decode_tok_s``, only known if pieces have at most two tokens on average."""
    itl_ms_p95: float | None = None
    itl_ms_p99: float | None = None
    prefill_tok_s: float | None = None
    """Prompt tokens that were not cached, divided by the time from sending to the first token (queueing included)."""
    decode_tok_s: float | None = None
    """Number of tokens after the first, divided by the time from the first to the last."""
    e2e_ms: float | None = None
    """Time to the end of the answer or to the failure, since the same moment as ``ttft_ms``."""
    queue_ms: float | None = None
    """Time in the server's queue, as reported by the server."""
    late_ms: float | None = None
    """Delay between due time and sending, because ``concurrency`` was reached or the client was busy."""
    server_ttft_ms: float | None = None
    server_prefill_tok_s: float | None = None
    server_decode_tok_s: float | None = None
    peak_memory_gb: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    """``code: message`` of a failed request. Only the failure and its duration count then."""
    prompt_hash: str | None = None
    """Hash of the prompt without its first words, which are unique for each request."""


COLUMNS = tuple(field.name for field in fields(Sample))
"""Columns of the table, in order."""
INTEGER_LIMIT = 2**63
_TYPES = {str(field.name): str(field.type) for field in fields(Sample)}
_OPTIONAL = frozenset(name for name in COLUMNS if hasattr(Sample, name))
_KINDS = {
    "bool": "bool",
    "int": "int64",
    "int | None": "Int64",
    "float | None": "float64",
    "str": "str",
    "str | None": "str",
    "CountedBy | None": "str",
}
"""pandas dtypes of the field types."""


def new_run() -> str:
    """Make an id for a run, such as ``20260102T030405Z-1f2e3d``. Ids sort by time."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"


class RunClock:
    """Wall-clock times of a run. The wall clock is read once, so that changes to it do not affect later samples."""

    def __init__(self) -> None:
        self._day_s = time.time() - time.perf_counter()

    def stamp(self, at_s: float) -> str:
        """The wall-clock time, ISO 8601, when ``time.perf_counter()`` was ``at_s``."""
        moment = datetime.fromtimestamp(self._day_s + at_s, UTC)
        return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def row(sample: Sample) -> dict[str, Any]:
    """The fields of a sample in column order, valid in JSON: NaN and infinity are ``None``."""
    return {name: _finite(getattr(sample, name)) for name in COLUMNS}


def read_row(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Make a row of stored values. Unknown fields are dropped; missing ones and those of a wrong type are ``None``.

    Returns:
        ``None`` if a required field is missing or has a wrong type.
    """
    found = {name: values.get(name) if _has_type(values.get(name), _TYPES[name]) else None for name in COLUMNS}
    found["warm_up"] = bool(found["warm_up"])
    complete = all(found[name] is not None for name in COLUMNS if name not in _OPTIONAL)
    return (
        {name: _finite(value) for name, value in found.items()} if complete and _is_time(found["started_at"]) else None
    )


def frame(samples: Iterable[Sample], provenance: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """The table of samples, warm-up included, with a row for each. ``.attrs["provenance"]`` is the provenance.

    Raises:
        ImportError: pandas is not installed.
    """
    table = table_of([row(sample) for sample in samples], COLUMNS)
    table.attrs["provenance"] = dict(provenance or {})
    return table


def table_of(rows: list[dict[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    """The rows as a data frame. Absent fields are missing values; the types of columns do not depend on the rows.

    Raises:
        ImportError: pandas is not installed.
    """
    pandas = pandas_for("a table of requests")
    table = pandas.DataFrame(rows, columns=list(columns))
    table = table.astype({name: _KINDS[kind] for name, kind in _TYPES.items()})
    table["started_at"] = pandas.to_datetime(table["started_at"], utc=True, format="ISO8601").dt.as_unit("us")
    return table


def _has_type(value: Any, kind: str) -> bool:
    match kind.removesuffix(" | None"):
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool) and abs(value) < INTEGER_LIMIT
        case "float":
            return isinstance(value, float) or _has_type(value, "int")
        case _:
            return isinstance(value, str)


def _is_time(text: Any) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Define the measurement of one request, and tables of such measurements."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from lmx_lab.frames import dtypes_of, make_table

if TYPE_CHECKING:
    import pandas as pd

CountedBy = Literal["usage", "chunks"]


@dataclass(frozen=True, kw_only=True)
class RequestSample:
    """The measurement of one request. Values that are not known are ``None``.

    ``server_*`` and ``queue_ms`` are reported by the server; the other values are measured in this process.
    """

    # The fields have the order of the table's columns, with the most important ones on the left.

    case: str
    """The case's name."""
    decode_tok_s: float | None = None
    """Number of tokens after the first one, divided by the time from the first to the last token."""
    ttft_ms: float | None = None
    """Time to the first token, from sending; with Poisson arrivals, from the time at which the request was due."""
    itl_ms_p99: float | None = None
    """99th percentile of the time between two tokens. Like ``decode_tok_s``, it is only known if pieces have at most 2
    tokens on average."""
    prefill_tok_s: float | None = None
    """Prompt tokens that were not cached, divided by the time from sending to the first token, queueing included."""
    e2e_ms: float | None = None
    """Time to the end of the answer or to the failure, from the same moment as ``ttft_ms``."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server found in its cache."""
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    """``code: message`` of a failed request, of which only the failure and its duration count."""
    warm_up: bool = False
    repeat: int
    """Number of the repeat, starting at 0."""
    request: int
    """Number of the request within the repeat, starting at 0. Warm-up requests have separate numbers."""

    itl_ms_p50: float | None = None
    itl_ms_p95: float | None = None
    queue_ms: float | None = None
    """Time in the server's queue, as reported by the server."""
    late_ms: float | None = None
    """Time from the due time to sending, because ``concurrency`` requests were running or the client was busy."""
    server_ttft_ms: float | None = None
    server_prefill_tok_s: float | None = None
    server_decode_tok_s: float | None = None
    peak_memory_gb: float | None = None
    drafted_tokens: int | None = None
    """Tokens that the server drafted and verified, as reported by the server."""
    accepted_tokens: int | None = None
    """Drafted tokens that became part of the answer."""
    pieces: int | None = None
    """Number of pieces of the answer: chunks with text, or steps of an engine that is measured without HTTP."""
    counted_by: CountedBy | None = None
    """Source of ``output_tokens``: the server's usage, or the number of chunks, which may have several tokens each."""

    prompt_tokens_wanted: int
    output_tokens_wanted: int
    concurrency: int
    arrival: str
    """The case's arrival as text."""
    cache: str
    seed: int
    target: str
    engine: str | None = None
    model: str | None = None
    quantization: str | None = None
    device: str | None = None
    threads: int | None = None
    blas: str | None = None
    prompt_hash: str | None = None
    """Hash of the prompt without its first words, which are unique for each request."""
    started_at: str
    """Time at which the request was sent: ISO 8601, UTC, with microseconds, from ``RunClock``."""
    run: str = ""
    """Id of the run, which is also the name of its file."""


Sample = RequestSample
"""The former name of ``RequestSample``."""

COLUMNS = tuple(field.name for field in fields(RequestSample))
"""Columns of the table, in order."""
MAX_INTEGER = 2**63
_TYPES = {str(field.name): str(field.type) for field in fields(RequestSample)}
_OPTIONAL = frozenset(name for name in COLUMNS if hasattr(RequestSample, name))


def new_run() -> str:
    """Return a new id for a run, such as ``20260102T030405Z-1f2e3d``. Ids sort by time."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"


class RunClock:
    """Wall-clock times of a run. The wall clock is read once, so that setting it does not affect later samples."""

    def __init__(self) -> None:
        self._day_s = time.time() - time.perf_counter()

    def stamp(self, at_s: float) -> str:
        """Return the wall-clock time at which ``time.perf_counter()`` was ``at_s``, in ISO 8601."""
        moment = datetime.fromtimestamp(self._day_s + at_s, UTC)
        return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def row(sample: RequestSample) -> dict[str, Any]:
    """Return the fields of a sample in column order, with values that are valid in JSON: NaN and infinity are
    ``None``."""
    return {name: _finite(getattr(sample, name)) for name in COLUMNS}


def read_row(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert stored values to a row. Unknown fields are dropped; missing ones and those of a wrong type are ``None``.

    Returns:
        ``None`` if a required field is missing or has a wrong type.
    """
    fields_read = {name: values.get(name) if _has_type(values.get(name), _TYPES[name]) else None for name in COLUMNS}
    fields_read["warm_up"] = bool(fields_read["warm_up"])
    is_complete = all(fields_read[name] is not None for name in COLUMNS if name not in _OPTIONAL)
    return (
        {name: _finite(value) for name, value in fields_read.items()}
        if is_complete and _is_time(fields_read["started_at"])
        else None
    )


def frame(samples: Iterable[RequestSample], provenance: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """Return the samples as a table with a row for each, warm-up included. ``.attrs["provenance"]`` is the provenance.

    Raises:
        MissingPackageError: pandas is not installed.
    """
    table = table_of([row(sample) for sample in samples])
    table.attrs["provenance"] = dict(provenance or {})
    return table


def table_of(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows with the fields of ``RequestSample`` as a data frame.

    Raises:
        MissingPackageError: pandas is not installed.
    """
    dtypes = {**dtypes_of(RequestSample), "started_at": "time"}
    table: pd.DataFrame = make_table(rows, dtypes, needed_by="a table of requests")
    return table


def _has_type(value: Any, kind: str) -> bool:
    match kind.removesuffix(" | None"):
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_INTEGER
        case "float":
            return isinstance(value, float) or _has_type(value, "int")
        case _:
            return isinstance(value, str)


def _is_time(text: Any) -> bool:
    try:
        moment = datetime.fromisoformat(text)
        # Fails if the time in UTC is before the year 1 or after 9999.
        moment.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return False
    return moment.tzinfo is not None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

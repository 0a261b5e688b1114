"""What was measured of one request: a row of the tidy table."""

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
    """One request. ``None`` is what nobody could say.

    ``server_*`` are the server's own words about this request, the other figures what this process saw.
    """

    run: str = ""
    """Its id, which names the file where it is kept."""
    started_at: str
    """When the request was sent: ISO 8601, UTC, microseconds; from ``RunClock``."""
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
    """From 0."""
    request: int
    """Within the repeat, from 0; warm-up requests are counted by themselves."""
    warm_up: bool = False

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that the server did not have to compute."""
    output_tokens: int | None = None
    counted_by: CountedBy | None = None
    """Where ``output_tokens`` is from: the server's usage, or chunks that had text, which may hold several tokens."""

    pieces: int | None = None
    """In how many the answer came: chunks that had text, or the bare engine's steps."""
    ttft_ms: float | None = None
    """To the first token, from sending; of Poisson arrivals from when the request was due, as its user would wait."""
    itl_ms_p50: float | None = None
    """Between two pieces, where they have two tokens at most on average; so with ``decode_tok_s``."""
    itl_ms_p95: float | None = None
    itl_ms_p99: float | None = None
    prefill_tok_s: float | None = None
    """Tokens of the prompt that were not cached, over the time from sending to the first token, queue and all."""
    decode_tok_s: float | None = None
    """Tokens after the first, over the time from the first to the last."""
    e2e_ms: float | None = None
    """To the end of the answer, or of the failure; from where ``ttft_ms`` counts."""
    queue_ms: float | None = None
    """Waiting in the server; by the server."""
    late_ms: float | None = None
    """Sent so much later than due: the client was at its limit, or busy."""
    server_ttft_ms: float | None = None
    server_prefill_tok_s: float | None = None
    server_decode_tok_s: float | None = None
    peak_memory_gb: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    """``code: message``; then nothing of the request counts but that it failed, and how long that took."""
    prompt_hash: str | None = None
    """Of the prompt without its first words, which are each request's own."""


COLUMNS = tuple(field.name for field in fields(Sample))
"""Of the tidy table, in their order."""
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
"""What pandas calls the types of the fields."""


def new_run() -> str:
    """An id for a run, which sorts by time, such as ``20260102T030405Z-1f2e3d``."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"


class RunClock:
    """Times of day in one run: the wall clock is read once and counted on, so that nobody who sets it moves a row."""

    def __init__(self) -> None:
        self._day_s = time.time() - time.perf_counter()

    def stamp(self, at_s: float) -> str:
        """The time of day at ``time.perf_counter()`` seconds ``at_s``, ISO 8601."""
        moment = datetime.fromtimestamp(self._day_s + at_s, UTC)
        return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def row(sample: Sample) -> dict[str, Any]:
    """The sample's fields in the table's order, as JSON can write them: a figure that is no number is ``None``."""
    return {name: _finite(getattr(sample, name)) for name in COLUMNS}


def fitting(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """A row from what was read: known fields alone, ``None`` for what is missing or of a wrong type; or no row at all,
    if that is a field that every sample has.
    """
    found = {name: values.get(name) if _fits(values.get(name), _TYPES[name]) else None for name in COLUMNS}
    found["warm_up"] = bool(found["warm_up"])
    whole = all(found[name] is not None for name in COLUMNS if name not in _OPTIONAL)
    return {name: _finite(value) for name, value in found.items()} if whole and _is_time(found["started_at"]) else None


def frame(samples: Iterable[Sample], provenance: Mapping[str, Any] | None = None) -> pd.DataFrame:
    """The tidy table: a row each, warm-up included; ``.attrs["provenance"]`` says what it was measured with.

    Raises:
        ImportError: pandas is not installed.
    """
    table = table_of([row(sample) for sample in samples], COLUMNS)
    table.attrs["provenance"] = dict(provenance or {})
    return table


def table_of(rows: list[dict[str, Any]], columns: Iterable[str]) -> pd.DataFrame:
    """The rows as a data frame; what a row has not is missing. Columns have the same type whatever is in them.

    Raises:
        ImportError: pandas is not installed.
    """
    pandas = pandas_for("a table of requests")
    table = pandas.DataFrame(rows, columns=list(columns))
    table = table.astype({name: _KINDS[kind] for name, kind in _TYPES.items()})
    table["started_at"] = pandas.to_datetime(table["started_at"], utc=True, format="ISO8601").dt.as_unit("us")
    return table


def _fits(value: Any, kind: str) -> bool:
    match kind.removesuffix(" | None"):
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool) and abs(value) < INTEGER_LIMIT
        case "float":
            return isinstance(value, float) or _fits(value, "int")
        case _:
            return isinstance(value, str)


def _is_time(text: Any) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

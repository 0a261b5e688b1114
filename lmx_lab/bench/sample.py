"""Measure one request: compute its metrics from the chunks of its answer, and write them as a row of a table."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lmx_lab.client.chat_format import Piece, TokenUsage, count, number
from lmx_lab.results.frames import dtypes_of, make_table

if TYPE_CHECKING:
    import pandas as pd

PERCENTILES = (50, 95, 99)
CountedBy = Literal["usage", "chunks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerMetrics:
    """Measurements that the server reports for the request; None for those that it does not report."""

    queue_ms: float | None = None
    ttft_ms: float | None = None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    peak_memory_gb: float | None = None
    cached_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The measurements in one chunk of an answer. A chunk without any only shows that the request is still running."""

    at_s: float
    """Time of arrival, from ``time.perf_counter``."""
    tokens: int = 0
    """Number of tokens. For a server this is 1 for each chunk with output, which may contain several tokens."""
    finish_reason: str | None = None
    usage: TokenUsage | None = None
    server: ServerMetrics | None = None


def measure_chunk(piece: Piece | None, at_s: float) -> Chunk:
    """Return the measurements in a piece of a server's answer that arrived at ``at_s``."""
    if piece is None:
        return Chunk(at_s=at_s)
    server, timings = None, piece.timings
    # llama.cpp has these fields; LMX Lab has more.
    if timings is not None:
        server = ServerMetrics(
            queue_ms=number(timings.get("queue_ms")),
            ttft_ms=number(timings.get("ttft_ms")),
            prefill_tok_s=number(timings.get("prompt_per_second")) or None,
            decode_tok_s=number(timings.get("predicted_per_second")) or None,
            peak_memory_gb=number(timings.get("peak_memory_gb")),
            cached_tokens=count(timings.get("cache_n")),
            drafted_tokens=count(timings.get("draft_n")),
            accepted_tokens=count(timings.get("draft_n_accepted")),
        )
    return Chunk(
        at_s=at_s,
        tokens=1 if piece.has_output else 0,
        finish_reason=piece.finish_reason[:40] if piece.finish_reason else None,
        usage=piece.usage,
        server=server,
    )


@dataclass(kw_only=True)
class Trace:
    """Times and token counts of one request, without its text. All times are from ``time.perf_counter``."""

    sent_at_s: float
    due_at_s: float | None = None
    """Time at which the request was due, if arrivals are scheduled."""
    ended_at_s: float
    """Time of the last chunk, or of the failure."""
    finished_at_s: float | None = None
    """Time of the finish reason, which is sent with or right after the last token."""
    finish_reason: str | None = None
    usage: TokenUsage | None = None
    server: ServerMetrics = field(default_factory=ServerMetrics)
    times_s: list[float] = field(default_factory=list)
    """Times of the chunks with tokens."""
    counts: list[int] = field(default_factory=list)
    """Number of tokens at each of these times."""

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk of the answer."""
        self.ended_at_s = chunk.at_s
        if chunk.tokens:
            self.times_s.append(chunk.at_s)
            self.counts.append(chunk.tokens)
        if chunk.finish_reason is not None:
            self.finish_reason, self.finished_at_s = chunk.finish_reason, chunk.at_s
        self.usage = chunk.usage or self.usage
        self.server = chunk.server or self.server

    def metrics(self) -> dict[str, Any]:
        """Return the fields of a ``RequestSample`` that are computed here."""
        usage, server, times_s, pieces = self.usage, self.server, self.times_s, sum(self.counts)
        prompt = usage.prompt if usage else None
        cached = server.cached_tokens if usage is None or usage.cached is None else usage.cached
        # A reported number of 0 is ignored if there was output.
        reported = usage.completion if usage and (usage.completion or not pieces) else None
        tokens = pieces if reported is None else reported
        began_s = self.sent_at_s if self.due_at_s is None else self.due_at_s
        prefill_s = times_s[0] - self.sent_at_s if times_s else None
        computed = None if prompt is None else max(0, prompt - (cached or 0))
        decode_tok_s: float | None = None
        gaps: dict[str, float] = {}
        # With more than two tokens in a piece on average, the times of single tokens are not known.
        if times_s and tokens <= 2 * pieces:
            # The last tokens may have no text, such as the end-of-text token.
            elapsed_s = max(times_s[-1], self.finished_at_s or 0.0) - times_s[0]
            if tokens > self.counts[0] and elapsed_s > 0:
                decode_tok_s = (tokens - self.counts[0]) / elapsed_s
            if len(times_s) > 1:
                # The tokens of a piece share the time before it.
                counts = np.asarray(self.counts[1:])
                found = np.percentile(np.repeat(np.diff(times_s) / counts, counts) * 1e3, PERCENTILES)
                gaps = {f"itl_ms_p{each}": float(value) for each, value in zip(PERCENTILES, found, strict=True)}
        return {
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "output_tokens": tokens,
            "counted_by": "chunks" if reported is None else "usage",
            "pieces": len(self.counts),
            "ttft_ms": (times_s[0] - began_s) * 1e3 if times_s else None,
            **gaps,
            "prefill_tok_s": computed / prefill_s if computed and prefill_s else None,
            "decode_tok_s": decode_tok_s,
            "e2e_ms": (self.ended_at_s - began_s) * 1e3,
            "queue_ms": server.queue_ms,
            "server_ttft_ms": server.ttft_ms,
            "server_prefill_tok_s": server.prefill_tok_s,
            "server_decode_tok_s": server.decode_tok_s,
            "peak_memory_gb": server.peak_memory_gb,
            "drafted_tokens": server.drafted_tokens,
            "accepted_tokens": server.accepted_tokens,
            "finish_reason": self.finish_reason,
        }


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Describes how a measured value is shown and compared."""

    label: str = ""
    """Label of an axis."""
    heading: str = ""
    """Heading of a column in a terminal, in two lines."""
    by_client: bool = True
    """Whether this process measures it, so that it is known for all servers. Only these are compared by default."""
    of_tokens: bool = False
    """Whether it counts pieces instead of tokens if the server does not report usage."""
    of_length: bool = False
    """Whether it depends on the length of the answers."""


def _metric(label: str, **options: Any) -> Any:
    """Return the dataclass field of a metric. Summaries, comparisons and plots show it."""
    return field(default=None, metadata={"metric": Metric(label=label, **options)})


_PIECES = "time between pieces, ms"


@dataclass(frozen=True, kw_only=True)
class RequestSample:
    """The measurement of one request. Values that are not known are ``None``.

    ``server_*`` and ``queue_ms`` are reported by the server; the other values are measured in this process.
    """

    # The fields have the order of the table's columns, with the most important ones on the left.

    case: str
    """The case's name."""
    decode_tok_s: float | None = _metric("decode per request, tok/s", heading="decode\ntok/s", of_tokens=True)
    """Number of tokens after the first one, divided by the time from the first to the last token."""
    ttft_ms: float | None = _metric("time to first token, ms", heading="first token\nms")
    """Time to the first token, from sending; with Poisson arrivals, from the time at which the request was due."""
    itl_ms_p99: float | None = _metric(f"{_PIECES} (99th percentile of each answer)", of_tokens=True)
    """99th percentile of the time between two tokens. Like ``decode_tok_s``, it is only known if pieces have at most 2
    tokens on average."""
    prefill_tok_s: float | None = _metric("prefill, tok/s")
    """Prompt tokens that were not cached, divided by the time from sending to the first token, queueing included."""
    e2e_ms: float | None = _metric("whole answer, ms", of_length=True)
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

    itl_ms_p50: float | None = _metric(f"{_PIECES} (median of each answer)", heading="next piece\nms", of_tokens=True)
    itl_ms_p95: float | None = _metric(f"{_PIECES} (95th percentile of each answer)", of_tokens=True)
    queue_ms: float | None = _metric("time in queue, ms", by_client=False)
    """Time in the server's queue, as reported by the server."""
    late_ms: float | None = _metric("delay of sending, ms", heading="late\nms", by_client=False)
    """Time from the due time to sending, because ``concurrency`` requests were running or the client was busy."""
    server_ttft_ms: float | None = _metric("time to first token (server), ms", by_client=False)
    server_prefill_tok_s: float | None = _metric("prefill (server), tok/s", by_client=False)
    server_decode_tok_s: float | None = _metric("decode (server), tok/s", by_client=False)
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


COLUMNS = tuple(field.name for field in fields(RequestSample))
"""Columns of the table, in order."""
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
    found: dict[str, Any] = {
        name: values.get(name) if _has_type(values.get(name), _TYPES[name]) else None for name in COLUMNS
    }
    found["warm_up"] = bool(found["warm_up"])
    if any(found[name] is None for name in COLUMNS if name not in _OPTIONAL):
        return None
    try:
        moment = datetime.fromisoformat(found["started_at"])
        # Fails if the time in UTC is before the year 1 or after 9999.
        moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return {name: _finite(value) for name, value in found.items()} if moment.tzinfo is not None else None


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
    return make_table(rows, dtypes, needed_by="a table of requests")


def _has_type(value: Any, kind: str) -> bool:
    match kind.removesuffix(" | None"):
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
        case "float":
            return isinstance(value, float) or _has_type(value, "int")
        case _:
            return isinstance(value, str)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

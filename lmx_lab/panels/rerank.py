"""The rerank panel: documents by relevance, as a table that can be sorted, read in full and copied."""

from __future__ import annotations

import asyncio
import html
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import traitlets

from lmx_lab.backend import Source
from lmx_lab.errors import InvalidRequestError, LabError, ModelBusyError
from lmx_lab.panels.panel import Panel, number_field, text_field
from lmx_lab.panels.workbench import Workbench
from lmx_lab.wire.admin import ModelEvent, Sample
from lmx_lab.wire.embeddings import INPUT_LIMIT

log = logging.getLogger(__name__)
PAGE_ROWS = 100
SHOWN_CHARACTERS = 300
LONGEST_SHOWN = 100_000
"""Characters of one document when it is asked for in full."""
LONGEST_QUERY = 10_000
MOST_CHARACTERS = 2_000_000
"""Of all documents together as the form sends them: a kernel's web socket takes 10 MB."""
MOST_TSV_CHARACTERS = 8_000_000
KEPT_CHARACTERS = 10_000
"""Documents up to here come back into the form of a view that opens later."""
SNAPSHOT_ROWS = 20
RANKING = "Ranking…"

# What a terminal or a page would obey instead of showing it. Joiners and marks of direction belong to their languages.
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# The second four are full-width, which some spreadsheets take for the same.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A ranking to be shown; the best document comes first."""

    query: str
    order: Sequence[tuple[int, float]]
    """Index among the documents that were given, from 0, and score."""
    documents: Sequence[str]
    """In the same order."""
    model: str
    method: str
    took_ms: float | None = None

    def change(self, at: int) -> int:
        """How many places the document rose against the order in which it was given."""
        return self.order[at][0] - at


# By column: what it is sorted by, and whether the first click sorts downwards.
_Key = Callable[[Rows, int], Any]
COLUMNS: dict[str, tuple[_Key, bool]] = {
    "rank": (lambda rows, at: at, False),
    "score": (lambda rows, at: -math.inf if math.isnan(score := rows.order[at][1]) else score, True),
    "document": (lambda rows, at: rows.documents[at].casefold(), False),
    "index": (lambda rows, at: rows.order[at][0], False),
    "change": (Rows.change, True),
}


class RerankPanel(Panel):
    """Ranks documents that are typed or pasted; or, made with a ``result``, the table of that alone.

    The rows stay in Python. A view gets a page of them, with the beginnings of long documents.
    """

    SCRIPTS = ("panel.js", "rerank.js")
    STYLES = ("panel.css", "rerank.css")
    REQUESTS = frozenset({"rank", "cancel", "sort", "page", "document", "tsv"})

    form = traitlets.Bool(True).tag(sync=True)
    asked = traitlets.Dict().tag(sync=True)
    """Query and documents as they were last asked with, for the form of a view that opens later."""
    busy = traitlets.Bool(False).tag(sync=True)
    doing = traitlets.Unicode().tag(sync=True)
    """What goes on while it is busy."""
    problem = traitlets.Unicode().tag(sync=True)
    """Why the last ranking has no result."""
    table = traitlets.Dict().tag(sync=True)
    """The page that is shown; empty before the first result."""

    def __init__(self, workbench: Workbench, *, result: Rows | None = None) -> None:
        self._rows = result
        self._sorted: Sequence[int] = range(len(result.order) if result else 0)
        self._sort, self._down, self._page = "rank", False, 0
        self._task: asyncio.Task[None] | None = None
        self._loading: str | None = None
        traits: dict[str, Any] = {"form": True} if result is None else {"form": False, "server": {}}
        super().__init__(workbench, table=self._shown_page(), **traits)

    def tick(self, source: Source, sample: Sample | None) -> None:
        # A result stays true whatever becomes of the server.
        if self.form:
            super().tick(source, sample)

    def model_event(self, event: ModelEvent) -> None:
        if self._task is None:
            return
        if event.stage == "load":
            self._loading = event.model
            self.show(doing=f"Loading {event.model}…")
        elif event.model == self._loading:
            self.show(doing=RANKING)

    # Ranking

    async def do_rank(self, fields: Mapping[str, Any]) -> None:
        """Begin to rank; what comes of it is told by ``busy``, ``table`` and ``problem``."""
        query = text_field(fields, "query", most=LONGEST_QUERY)
        text = fields.get("documents")
        documents = documents_in(text if isinstance(text, str) else "")
        top_n = _top_n(fields)
        if self._task is not None:
            raise ModelBusyError("this panel is ranking already; cancel that, or wait for its result")
        kept = text if isinstance(text, str) and len(text) <= KEPT_CHARACTERS else ""
        self.show(busy=True, doing=RANKING, problem="", asked={"query": _sendable(query), "documents": _sendable(kept)})
        self._task = asyncio.create_task(self._rank(query, documents, top_n), name="rank a panel's documents")
        self._task.add_done_callback(self._ended)

    async def _rank(self, query: str, documents: Sequence[str], top_n: int | None) -> None:
        ranked = await self.workbench.source.rerank(query, documents, top_n=top_n)
        self._take(
            Rows(
                query=query,
                order=ranked.order,
                documents=[documents[index] for index, _ in ranked.order],
                model=ranked.model,
                method=ranked.method,
                took_ms=ranked.took_ms,
            )
        )

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self.show(busy=False, problem=_problem(task))

    async def do_cancel(self, fields: Mapping[str, Any]) -> None:
        """Give the ranking up; nothing where there is none."""
        if self._task is not None:
            self._task.cancel()

    def _take(self, rows: Rows) -> None:
        self._rows, self._sorted, self._page = rows, range(len(rows.order)), 0
        self._sort, self._down = "rank", False
        self.show(table=self._shown_page())

    # The table

    async def do_sort(self, fields: Mapping[str, Any]) -> None:
        """By a column; by the same one again the other way round."""
        column = text_field(fields, "column")
        if column not in COLUMNS:
            raise InvalidRequestError(f"there is no column {column!r:.40}; there are {', '.join(COLUMNS)}")
        rows = self._result()
        key, down_first = COLUMNS[column]
        self._down = not self._down if column == self._sort else down_first
        self._sort, self._page = column, 0
        self._sorted = sorted(range(len(rows.order)), key=lambda at: key(rows, at), reverse=self._down)
        self.show(table=self._shown_page())

    async def do_page(self, fields: Mapping[str, Any]) -> None:
        """Show a page, from 0; beyond the last one, that."""
        pages = math.ceil(len(self._result().order) / PAGE_ROWS)
        self._page = int(number_field(fields, "page", low=-1, high=INPUT_LIMIT, default=0))
        self._page = max(0, min(self._page, pages - 1))
        self.show(table=self._shown_page())

    async def do_document(self, fields: Mapping[str, Any]) -> str:
        """A document in full, by its ``rank``."""
        rows = self._result()
        rank = number_field(fields, "rank", low=1, high=len(rows.order), default=1)
        return shown(rows.documents[int(rank) - 1], LONGEST_SHOWN)

    async def do_tsv(self, fields: Mapping[str, Any]) -> str:
        """All rows as they are sorted, with a head."""
        rows = self._result()
        size = sum(map(len, rows.documents))
        if size > MOST_TSV_CHARACTERS:
            raise InvalidRequestError(
                f"the documents have {size:,} characters; up to {MOST_TSV_CHARACTERS:,} can be copied. "
                "lab.rerank(...).df has them all"
            )
        return tsv(rows, self._sorted)

    def _result(self) -> Rows:
        if self._rows is None or not self._rows.order:
            raise InvalidRequestError("there is no result yet; rank some documents first")
        return self._rows

    def _shown_page(self) -> dict[str, Any]:
        rows = self._rows
        if rows is None:
            return {}
        start = self._page * PAGE_ROWS
        bar = bars([score for _, score in rows.order])
        took = "" if rows.took_ms is None else f" in {rows.took_ms:,.0f} ms"
        count = len(rows.order)
        return {
            "rows": [_cells(rows, at, bar) for at in self._sorted[start : start + PAGE_ROWS]],
            "caption": shown(
                f"{count:,} document{'s' * (count != 1)} by {rows.method}, {rows.model}{took}: {rows.query}",
                SHOWN_CHARACTERS,
            ),
            "range": f"{min(start + 1, count):,} to {min(start + PAGE_ROWS, count):,} of {count:,}",
            "page": self._page,
            "pages": math.ceil(count / PAGE_ROWS),
            "sort": self._sort,
            "down": self._down,
        }

    def snapshot_html(self) -> str:
        table = self.shown("table")
        if not table:
            return "<p>Rerank: no result yet</p>"
        left = "style='text-align:left'"
        head = "".join(f"<th {left}>{name}</th>" for name in COLUMNS)
        body = "".join(_snapshot_row(row) for row in table["rows"][:SNAPSHOT_ROWS])
        caption = html.escape(table["caption"])
        return f"<table><caption {left}>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _problem(task: asyncio.Task[None]) -> str:
    """What there is to say of a ranking that has ended; it may have been cancelled before its first step."""
    if task.cancelled():
        return "Cancelled; the table is as it was."
    error = task.exception()
    if error is None or isinstance(error, LabError):
        return error.message if error else ""
    log.error("a panel's ranking failed", exc_info=error)
    return "a bug in the panel; the kernel's log has the details"


def _snapshot_row(row: Mapping[str, Any]) -> str:
    cells = "".join(f"<td style='text-align:left'>{html.escape(str(cell))}</td>" for cell in row["cells"])
    return f"<tr>{cells}</tr>"


def _arrow(change: int) -> str:
    return f"▲{change}" if change > 0 else f"▼{-change}" if change else "\N{EN DASH}"


def _cells(rows: Rows, at: int, bar: Callable[[float], float]) -> dict[str, Any]:
    index, score = rows.order[at]
    document, change = rows.documents[at], rows.change(at)
    return {
        "cells": [at + 1, f"{score:.4f}", shown(document, SHOWN_CHARACTERS), index, _arrow(change)],
        "words": f"up {change}" if change > 0 else f"down {-change}" if change else "unchanged",
        "bar": bar(score),
        "more": len(document) > SHOWN_CHARACTERS,
    }


def bars(scores: Sequence[float]) -> Callable[[float], float]:
    """How long a score's bar is, 0 to 1; a longer one is always better.

    Scores between -1 and 1 (cosines, probabilities) keep their place below 1, so that nothing relevant looks like it:
    short bars throughout. Others (logits) spread between the lowest, or 0, and the highest.
    """
    finite = [score for score in scores if math.isfinite(score)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low >= -1 and high <= 1:
        high = 1.0
    low = min(low, 0.0)

    def length(score: float) -> float:
        if not math.isfinite(score):
            return 0.0
        return round((score - low) / (high - low), 3) if high > low else 1.0

    return length


def shown(text: str, characters: int) -> str:
    """The beginning of a text, with escapes for what a page would obey instead of showing it."""
    clipped = text[: characters - 1] + "…" if len(text) > characters else text
    return _UNSHOWN.sub(_escape, clipped)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _sendable(text: str) -> str:
    # Half a character, which JavaScript's texts may contain, cannot be sent back as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def tsv(rows: Rows, sorted_as: Sequence[int]) -> str:
    r"""A head and a line a row. In documents ``\t``, ``\n``, ``\r`` and ``\\`` stand for what they name.

    A spreadsheet computes what begins with ``=``, ``+``, ``-`` or ``@``, and such a formula can send the sheet away, so
    that a document that does gets an apostrophe, the spreadsheets' own mark of text, before it.
    """
    lines = ["\t".join(COLUMNS)]
    for at in sorted_as:
        index, score = rows.order[at]
        lines.append(f"{at + 1}\t{score:.6g}\t{_cell(rows.documents[at])}\t{index}\t{rows.change(at)}")
    return "\n".join(lines)


def _cell(document: str) -> str:
    text = document.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
    text = _UNSHOWN.sub(_escape, text)
    return "'" + text if text.lstrip().startswith(_FORMULA) else text


def documents_in(text: str) -> list[str]:
    """The documents of the form: a JSON list of texts (or of objects with a ``text``), else one a line.

    Raises:
        InvalidRequestError: there are none, or too many, or the JSON is no such list.
    """
    text = text.strip()
    if len(text) > MOST_CHARACTERS:
        raise InvalidRequestError(
            f"the documents have more than the {MOST_CHARACTERS:,} characters that are taken here; "
            "rank them with lab.rerank(query, documents)",
            param="documents",
        )
    is_json = text[:1] + text[-1:] in {"[]", "{}"}
    documents = _json_documents(text) if is_json else [line for line in re.split(r"\r\n?|\n", text) if line.strip()]
    if not documents:
        raise InvalidRequestError(
            "there are no documents; write one a line, or a JSON list of texts", param="documents"
        )
    if len(documents) > INPUT_LIMIT:
        raise InvalidRequestError(
            f"there are {len(documents):,} documents; up to {INPUT_LIMIT:,} are taken at a time", param="documents"
        )
    return documents


def _json_documents(text: str) -> list[str]:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(
            f"the documents stand in brackets but are no JSON: {exc}; write one a line, or a list of texts",
            param="documents",
        ) from exc
    items = items if isinstance(items, list) else []
    texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in items]
    if not texts or not all(isinstance(each, str) for each in texts):
        raise InvalidRequestError(
            f'the documents are JSON but no list of texts: {text:.40}; write them as ["one", "two"]',
            param="documents",
        )
    if blank := [number for number, each in enumerate(texts) if not each.strip()]:
        raise InvalidRequestError(f"text {blank[0]} of the list (from 0) is empty; leave it out", param="documents")
    return texts


def _top_n(fields: Mapping[str, Any]) -> int | None:
    if fields.get("top_n") is None:
        return None
    top_n = number_field(fields, "top_n", low=1, high=INPUT_LIMIT, default=1)
    if top_n != int(top_n):
        raise InvalidRequestError(f"top_n is {top_n}; it must be a whole number", param="top_n")
    return int(top_n)

"""The rerank panel: documents ranked by relevance, as a table that can be sorted, expanded and copied."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import traitlets

from lmx_lab.backend import Backend, Ranking
from lmx_lab.errors import InvalidRequestError, ModelBusyError
from lmx_lab.panels.panel import Panel, integer_field, number_field, text_field
from lmx_lab.panels.workbench import Workbench
from lmx_lab.results.tables import html_table
from lmx_lab.sanitize import clip, escape_text, replace_surrogates
from lmx_lab.values.models import ModelEvent
from lmx_lab.wire.admin import Sample
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.embeddings import INPUT_LIMIT
from lmx_lab.wire.errors import validated
from lmx_lab.wire.rerank import RerankBody

PAGE_ROWS = 100
CELL_CHARACTERS = 300
"""Maximum number of characters of a document in the table."""
MAX_CHARACTERS = 2_000_000
"""Maximum number of characters of all documents in the form. A kernel's WebSocket accepts 10 MB."""
MAX_TSV_CHARACTERS = 8_000_000
RANKING = "Ranking…"

# The last four are full-width variants, which some spreadsheets treat in the same way.
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def change_of(table: Ranking, at: int) -> int:
    """Return how many places higher the document at a rank is than in the given order. Ranks start at 0."""
    return table.order[at][0] - at


def document_at(table: Ranking, at: int) -> str:
    """Return the document at a rank, starting at 0."""
    return table.documents[table.order[at][0]]


# By column: the sort key, and whether the first click sorts in descending order.
_Key = Callable[[Ranking, int], Any]
COLUMNS: dict[str, tuple[_Key, bool]] = {
    "rank": (lambda table, at: at, False),
    "score": (lambda table, at: -math.inf if math.isnan(score := table.order[at][1]) else score, True),
    "document": (lambda table, at: document_at(table, at).casefold(), False),
    "index": (lambda table, at: table.order[at][0], False),
    "change": (change_of, True),
}


class RerankPanel(Panel):
    """Ranks documents that are typed or pasted into a form, or displays only the table of a given ``result``.

    The rows are kept in Python. A view receives one page of them, with the beginnings of long documents.
    """

    SCRIPTS = ("elements.js", "panel.js", "rerank.js")
    STYLES = ("panel.css", "rerank.css")
    IN_REPORT = True

    form = traitlets.Bool(True).tag(sync=True)
    request = traitlets.Dict().tag(sync=True)
    """Query and documents of the last request, for the form of a view that opens later."""
    busy = traitlets.Bool(False).tag(sync=True)
    activity = traitlets.Unicode().tag(sync=True)
    """The activity of the panel while ``busy`` is true."""
    error = traitlets.Unicode().tag(sync=True)
    """Why the last ranking has no result."""
    table = traitlets.Dict().tag(sync=True)
    """The current page; empty before the first result."""

    def __init__(self, workbench: Workbench, *, result: Ranking | None = None) -> None:
        self._result = result
        self._sorted: Sequence[int] = range(len(result.order) if result else 0)
        self._sort, self._descending, self._page = "rank", False, 0
        self._took_ms: float | None = None
        self._loading: str | None = None
        traits: dict[str, Any] = {"form": True} if result is None else {"form": False, "server": {}}
        super().__init__(workbench, table=self._page_shown(), **traits)

    # Called by the workbench

    def tick(self, backend: Backend, sample: Sample | None) -> None:
        # A given result does not depend on the server.
        if self.form:
            super().tick(backend, sample)

    def model_event(self, event: ModelEvent) -> None:
        if self.task is None:
            return
        if event.stage == "load":
            self._loading = event.model
            self.show(activity=f"Loading {event.model}…")
        elif event.model == self._loading:
            self.show(activity=RANKING)

    # Ranking

    async def do_rank(self, fields: Mapping[str, Any]) -> None:
        """Start to rank; ``busy``, ``table`` and ``error`` show its progress and result."""
        query = text_field(fields, "query", limit=10_000)
        text = fields.get("documents")
        documents = documents_in(text if isinstance(text, str) else "")
        top_n = integer_field(fields, "top_n", low=1, high=INPUT_LIMIT, default=None)
        if self.task is not None:
            raise ModelBusyError("this panel is ranking documents already; cancel that, or wait for its result")
        body = validated(
            RerankBody,
            {"model": ANY_MODEL, "query": query, "documents": documents, "top_n": top_n, "truncate": True},
        )
        # Long documents are not sent to the forms of views that are opened later.
        kept = text if isinstance(text, str) and len(text) <= 10_000 else ""
        self.show(
            busy=True,
            activity=RANKING,
            error="",
            request={"query": replace_surrogates(query), "documents": replace_surrogates(kept)},
        )
        cancelled = "Cancelled; the table has not changed."
        self.run_job(self._rank(body), lambda error: self.show(busy=False, error=cancelled if error is None else error))

    async def _rank(self, body: RerankBody) -> None:
        started = time.perf_counter()
        table = await self.workbench.backend.rerank(body)
        self._took_ms = (time.perf_counter() - started) * 1e3
        self._result, self._sorted, self._page = table, range(len(table.order)), 0
        self._sort, self._descending = "rank", False
        self.show(table=self._page_shown())

    async def do_cancel(self, fields: Mapping[str, Any]) -> None:
        """Cancel the ranking; does nothing if there is none."""
        if self.task is not None:
            self.task.cancel()

    # The table

    async def do_sort(self, fields: Mapping[str, Any]) -> None:
        """Sort by a column. Sorting by the same column again reverses the order."""
        column = text_field(fields, "column")
        if column not in COLUMNS:
            raise InvalidRequestError(f"there is no column {column!r:.40}; the columns are {', '.join(COLUMNS)}")
        table = self._existing_result()
        key, descending_first = COLUMNS[column]
        self._descending = not self._descending if column == self._sort else descending_first
        self._sort, self._page = column, 0
        self._sorted = sorted(range(len(table.order)), key=lambda at: key(table, at), reverse=self._descending)
        self.show(table=self._page_shown())

    async def do_page(self, fields: Mapping[str, Any]) -> None:
        """Show a page. Pages are counted from 0; a number beyond the last page shows the last one."""
        pages = math.ceil(len(self._existing_result().order) / PAGE_ROWS)
        self._page = int(number_field(fields, "page", low=-1, high=INPUT_LIMIT, default=0))
        self._page = max(0, min(self._page, pages - 1))
        self.show(table=self._page_shown())

    async def do_document(self, fields: Mapping[str, Any]) -> str:
        """Return the document at a ``rank``, which is cut after 100,000 characters."""
        table = self._existing_result()
        rank = number_field(fields, "rank", low=1, high=len(table.order), default=1)
        return clip(document_at(table, int(rank) - 1), 100_000)

    async def do_tsv(self, fields: Mapping[str, Any]) -> str:
        """Return all rows in their current order as tab-separated values, with a header."""
        table = self._existing_result()
        size = sum(len(document_at(table, at)) for at in range(len(table.order)))
        if size > MAX_TSV_CHARACTERS:
            raise InvalidRequestError(
                f"the documents have {size:,} characters; up to {MAX_TSV_CHARACTERS:,} can be copied. "
                "lab.rerank(...).df has all of them"
            )
        return tsv(table, self._sorted)

    def _existing_result(self) -> Ranking:
        if self._result is None or not self._result.order:
            raise InvalidRequestError("there is no result yet; rank some documents first")
        return self._result

    def _page_shown(self) -> dict[str, Any]:
        table = self._result
        if table is None:
            return {}
        start = self._page * PAGE_ROWS
        bar = bar_lengths([score for _, score in table.order])
        took = "" if self._took_ms is None else f" in {self._took_ms:,.0f} ms"
        count = len(table.order)
        rows = []
        for at in self._sorted[start : start + PAGE_ROWS]:
            (index, score), document, change = table.order[at], document_at(table, at), change_of(table, at)
            arrow = f"▲{change}" if change > 0 else f"▼{-change}" if change else "\N{EN DASH}"
            rows.append(
                {
                    "cells": [at + 1, f"{score:.4f}", clip(document, CELL_CHARACTERS), index, arrow],
                    "change": f"up {change}" if change > 0 else f"down {-change}" if change else "unchanged",
                    "bar": bar(score),
                    "more": len(document) > CELL_CHARACTERS,
                }
            )
        return {
            "model": clip(table.model, CELL_CHARACTERS),
            "rows": rows,
            "caption": clip(
                f"{count:,} document{'s' * (count != 1)} by {table.method}, {table.model}{took}: {table.query}",
                CELL_CHARACTERS,
            ),
            "range": f"{min(start + 1, count):,} to {min(start + PAGE_ROWS, count):,} of {count:,}",
            "page": self._page,
            "pages": math.ceil(count / PAGE_ROWS),
            "sort": self._sort,
            "descending": self._descending,
        }

    def snapshot_html(self) -> str:
        table = self.shown("table")
        if not table:
            return "<p>Rerank: no result yet</p>"
        rows = [row["cells"] for row in table["rows"][:20]]
        return html_table(tuple(COLUMNS), rows, caption=table["caption"])


def bar_lengths(scores: Sequence[float]) -> Callable[[float], float]:
    """Return a function that computes the length of a score's bar, from 0 to 1. A better score never has a shorter bar.

    If all scores are between -1 and 1 (cosines, probabilities), the full length stands for 1, so that low scores have
    short bars even if they are the best. Otherwise (logits) it stands for the highest score. Length 0 stands for the
    lowest score, or for 0 if all scores are positive.
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


def tsv(table: Ranking, order: Sequence[int]) -> str:
    r"""Return a header and one line for each row, as tab-separated values.

    In documents, tab, line feed, carriage return and backslash are escaped. Spreadsheets evaluate cells that begin with
    ``=``, ``+``, ``-`` or ``@`` as formulas, and a formula can send the sheet's content to another host. Therefore an
    apostrophe, by which spreadsheets recognize text, is put before documents that begin with one of these characters.

    Args:
        order: The indices of the rows, in the order of the lines.
    """
    lines = ["\t".join(COLUMNS)]
    for at in order:
        index, score = table.order[at]
        text = document_at(table, at).replace("\\", "\\\\")
        text = escape_text(text.replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r"))
        cell = "'" + text if text.lstrip().startswith(_FORMULA) else text
        lines.append(f"{at + 1}\t{score:.6g}\t{cell}\t{index}\t{change_of(table, at)}")
    return "\n".join(lines)


def documents_in(text: str) -> list[str]:
    """Parse the documents in the form: a JSON list of texts (or of objects with a ``text``), otherwise one per line.

    Raises:
        InvalidRequestError: there are none or too many, or the JSON is not such a list.
    """
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"the documents have more than {MAX_CHARACTERS:,} characters, the limit of this form; "
            "rank them with lab.rerank(query, documents)",
            param="documents",
        )
    if text[:1] + text[-1:] in {"[]", "{}"}:
        try:
            items = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequestError(
                f"the documents are in brackets but are not JSON: {exc}; write one per line, or a list of texts",
                param="documents",
            ) from exc
        items = items if isinstance(items, list) else []
        texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in items]
        if not texts or not all(isinstance(each, str) for each in texts):
            raise InvalidRequestError(
                f'the documents are JSON but not a list of texts: {text:.40}; write them as ["one", "two"]',
                param="documents",
            )
        if blank := [number for number, each in enumerate(texts) if not each.strip()]:
            raise InvalidRequestError(
                f"document {blank[0]} of the list (counted from 0) is empty; leave it out", param="documents"
            )
        documents = texts
    else:
        documents = [line for line in re.split(r"\r\n?|\n", text) if line.strip()]
    if not documents:
        raise InvalidRequestError(
            "there are no documents; write one per line, or a JSON list of texts", param="documents"
        )
    if len(documents) > INPUT_LIMIT:
        raise InvalidRequestError(
            f"there are {len(documents):,} documents; the limit is {INPUT_LIMIT:,} at a time", param="documents"
        )
    return documents

"""Define the answer to a row, and create the table of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from lmx_lab.batch.columns import TypedColumns
from lmx_lab.results.frames import Dtype, RowSource, make_table

DTYPES: Mapping[str, Dtype] = {
    "answer": "text",
    "reasoning": "text",
    "finish_reason": "text",
    "error": "text",
    "prompt_tokens": "Int64",
    "cached_tokens": "Int64",
    "output_tokens": "Int64",
    "ttft_s": "float64",
    "total_s": "float64",
    "request_id": "text",
}
"""The columns of each table of answers, with their types."""
SAMPLE = "sample"
"""Name of the column that numbers the answers to the same row."""
LOGPROBS = "logprobs"
"""Name of the column with the log-probabilities of the choices of a row."""


@dataclass(frozen=True, kw_only=True)
class RowAnswer:
    """The answer to a row, or the error that prevented it."""

    text: str | None = None
    reasoning: str = ""
    finish_reason: str | None = None
    error: str | None = None
    """The reason why there is no answer, or why its values do not match the schema."""
    code: str = ""
    """The code of the error (``LabError.code``)."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    """Time from sending the request to the end of the answer, including the wait in the queue."""
    request_id: str | None = None
    """Id of the request: ``lab.requests[request_id]`` returns its record. None for an attached lab."""
    logprobs: Sequence[float] | None = None
    """Log-probability of each choice after the prompt; None if the row has no choices."""


def answer_row(answer: RowAnswer, values: Mapping[str, Any], *, sample: int | None) -> dict[str, Any]:
    """Return the row of the table for an answer.

    Args:
        values: The values of the typed columns.
        sample: Number of the answer among the answers to the same row; None if each row has one answer.
    """
    row = {name: getattr(answer, name) for name in DTYPES if name != "answer"}
    return {**({} if sample is None else {SAMPLE: sample}), "answer": answer.text, **values, **row}


def answer_table(
    rows: Sequence[Mapping[str, Any]], source: RowSource, columns: TypedColumns | None, *, several: bool
) -> Any:
    """Create the table of answers, in the same library as that of the rows.

    Args:
        several: Whether each row has several answers.
    """
    first = [SAMPLE, "answer"] if several else ["answer"]
    typed: Mapping[str, Dtype] = columns.dtypes if columns is not None else {}
    names = list(rows[0]) if rows else [*first, *typed, *list(DTYPES)[1:]]
    known: dict[str, Dtype] = {SAMPLE: "int64", LOGPROBS: "object", **DTYPES, **typed}
    dtypes = {name: known[name] for name in names}
    index = None
    if source.library is not None:
        # Other libraries have no columns of Python objects.
        objects = [name for name, dtype in typed.items() if dtype in ("object", "text")]
        texts = TypeAdapter(list[dict[str, Any]]).dump_python(
            [{name: row[name] for name in objects} for row in rows], mode="json", fallback=str
        )
        rows = [{**row, **plain} for row, plain in zip(rows, texts, strict=True)]
    else:
        # With several answers to each row, labels are repeated.
        index = source.index if len(source.index) == len(rows) else source.index.repeat(len(rows) // len(source.index))
    return make_table(rows, dtypes, index=index, library=source.library, needed_by="map")

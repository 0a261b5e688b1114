"""Answer a prompt for each row of a table with a lab: ``lab.map``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lmx_lab.arguments import chat_request
from lmx_lab.backend import Backend, HasBackend
from lmx_lab.batch.answers import DTYPES, SAMPLE, Schema, TypedColumns, answer_table
from lmx_lab.batch.cache import AnswerCache
from lmx_lab.batch.prompts import PromptSource, RowPrompts
from lmx_lab.batch.run import BatchOptions, BatchRun, Errors, Retry
from lmx_lab.batch.servers import loaded_model, same_models
from lmx_lab.blocking import END, End, Portal, Stream, in_thread, on_loop
from lmx_lab.errors import BatchStoppedError, InvalidRequestError, counted
from lmx_lab.progress import counter
from lmx_lab.results.frames import RowSource, read_source
from lmx_lab.values.integers import whole_number

if TYPE_CHECKING:
    import pandas as pd

NOT_USED = {
    "response_format": "pass the JSON schema, or a pydantic model, as schema",
    "model": "rows are answered by the loaded model; load the other one",
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "rows are answered without tools; use lab.chat"),
    **dict.fromkeys(("logprobs", "top_logprobs", "logprob_tokens"), "the table has no column for them; use lab.chat"),
}
"""Parameters of ``chat`` that ``map`` does not accept, with the alternative to each."""


class RowAnswers(Stream[dict[str, Any]]):
    """An iterator over the answers to the rows of an iterable, as dictionaries, in the order of the rows.

    Use it with ``for`` or ``async for``. Rows are read as needed, a few hundred ahead of the answers. ``close()``
    cancels the running requests; deleting the iterator does the same.
    """

    def __init__(self, run: BatchRun, portal: Portal, cache: AnswerCache | None) -> None:
        self._run = run
        self._portal = portal
        self._cache = cache

    async def _next(self) -> dict[str, Any] | End:
        while (row := self._run.take()) is None:
            if not self._run.read():
                return END
            await on_loop(self._portal, self._run.step())
        return row

    def close(self) -> None:
        """Cancel the running requests. Returns immediately; can be called from any thread. Idempotent."""
        self._run.close()
        if self._cache is not None:
            self._cache.close(wait=False)


async def map_rows(
    backend: Backend,
    /,
    frame: Any,
    prompt: PromptSource,
    *,
    schema: Schema | None = None,
    n: int = 1,
    seed: int | None = None,
    errors: Errors = "row",
    cache: str | os.PathLike[str] | None = None,
    retry: Retry | None = None,
    labs: Sequence[HasBackend] = (),
    **parameters: Any,
) -> pd.DataFrame | RowAnswers:
    """Answer a prompt for each row of a table, and return a table of the answers with the same index.

    The columns are ``answer``, ``reasoning``, ``finish_reason``, ``error``, token counts, and times. An interrupted
    ``map`` returns the answers that are complete, and sets ``.attrs["interrupted"]`` to True.

    Args:
        frame: A data frame, a series, a text, or a list of dictionaries or texts (the column ``text``). The rows of
            any other iterable are read as needed, and the result is an iterator over the answers as dictionaries.
        prompt: A template such as ``"Summarise: {text}"``, which inserts the value of the column ``text``; messages
            whose texts are templates; or a function that is called with a row and returns a text or messages.
        schema: Adds typed columns: a JSON schema, a pydantic model, or a dictionary such as ``{"days": int}``.
        n: Number of answers for each row. With more than one, labels are repeated, and ``sample`` numbers them.
        seed: A number from which the seed of each answer is derived.
        errors: ``row`` reports the error of a row in the column ``error``; ``raise`` raises the first error.
        cache: An SQLite file for the answers. A later run with the same file computes only missing answers.
        retry: ``errors`` recomputes the answers in the cache that have an error.
        labs: Other labs with the same model, which also answer rows. ``.attrs["labs"]`` has the statistics of each.
        parameters: ``system``, and the sampling parameters of ``chat``.

    Raises:
        NotLoadedError: no model is loaded.
        InvalidRequestError: an argument is invalid, a column does not exist, or the schema cannot be enforced.
        BatchStoppedError: no further row can be answered. The attribute ``frame`` contains the complete answers.
        MissingPackageError: the answers are returned as a table, and pandas is not installed.
    """
    source, prompts = read_source(frame), RowPrompts(prompt)
    if source.columns is not None:
        prompts.check(source.columns)
    columns = None if schema is None else TypedColumns.of(schema)
    for name in () if columns is None else columns.dtypes:
        if name in DTYPES or name == SAMPLE:
            raise InvalidRequestError(
                f"the schema has a column {name!r}, but each table of answers already has one; rename it",
                param="schema",
            )
    run, stored = await prepare_run(
        backend,
        source,
        prompts,
        columns,
        n=n,
        seed=seed,
        errors=errors,
        cache=cache,
        retry=retry,
        labs=labs,
        **parameters,
    )
    if source.index is None:
        return RowAnswers(run, backend.portal, stored)
    interrupted = await answer_all(backend, run, source, columns, stored)
    table = _answers_of(run, source, columns)
    if source.library is None:
        table.attrs["interrupted"] = interrupted
    return table


async def prepare_run(
    backend: Backend,
    source: RowSource,
    prompts: RowPrompts,
    columns: TypedColumns | None,
    scoring: Mapping[str, Any] | None = None,
    /,
    *,
    n: int = 1,
    seed: int | None = None,
    errors: Errors = "row",
    cache: str | os.PathLike[str] | None = None,
    retry: Retry | None = None,
    labs: Sequence[HasBackend] = (),
    **parameters: Any,
) -> tuple[BatchRun, AnswerCache | None]:
    """Check the arguments of ``map``, and return the run and its cache. Has steps.

    Args:
        scoring: The options ``choices`` and ``chat_template`` of a run that scores choices.

    Raises:
        InvalidRequestError: an argument is invalid for any row.
    """
    n, seed = whole_number(n, "n", low=1), None if seed is None else whole_number(seed, "seed")
    for name, remedy in NOT_USED.items():
        if name in parameters:
            raise InvalidRequestError(f"map and evaluate have no parameter {name}: {remedy}", param=name)
    if errors not in ("row", "raise"):
        raise InvalidRequestError(f"errors is {errors!r:.40}; it must be 'row' or 'raise'", param="errors")
    if retry not in (None, "errors"):
        raise InvalidRequestError(f"retry is {retry!r:.40}; it must be 'errors' or None", param="retry")
    find = partial(loaded_model, hashed=cache is not None)
    loaded, others = await on_loop(backend.portal, same_models(backends_of(backend, labs), find))
    if columns is not None:
        schema = {"name": "row", "schema": dict(columns.json_schema)}
        parameters["response_format"] = {"type": "json_schema", "json_schema": schema}
    fields = {**parameters, "model": loaded.id}
    # Sampling parameters are invalid for any prompt.
    chat_request("x", fields)
    options = BatchOptions(
        prompts=prompts,
        make_request=lambda prompt: chat_request(prompt, fields),
        parameters=frozenset(parameters),
        columns=columns,
        n=n,
        seed=seed,
        errors=errors,
        retry=retry,
        **(scoring or {}),
    )
    stored = None if cache is None else await in_thread(lambda: AnswerCache(cache))
    return BatchRun(backend, loaded, source, options, cache=stored, others=others), stored


async def answer_all(
    backend: Backend, run: BatchRun, source: RowSource, columns: TypedColumns | None, cache: AnswerCache | None
) -> bool:
    """Answer all rows, close the cache, and return whether the run was interrupted. Has steps."""
    started_at, total = time.monotonic(), len(source.index) * run.options.n
    try:
        with counter("map", backend) as bar:
            while run.read():
                await on_loop(backend.portal, run.step())
                elapsed_s = max(time.monotonic() - started_at, 1e-3)
                errors = f", {counted(run.errors, 'error')}" if run.errors else ""
                text = f"{run.done / elapsed_s:.1f} answers/s, {run.output_tokens / elapsed_s:.0f} tok/s{errors}"
                bar.show(text, run.done, total)
    except KeyboardInterrupt:
        return True
    except BatchStoppedError as exc:
        exc.frame = _answers_of(run, source, columns)
        raise
    finally:
        try:
            await on_loop(backend.portal, run.stop())
        finally:
            if cache is not None:
                await in_thread(cache.close)
    return False


def _answers_of(run: BatchRun, source: RowSource, columns: TypedColumns | None) -> Any:
    table = answer_table(run.rows(), source, columns, several=run.options.n > 1)
    if source.library is None:
        table.attrs["labs"] = run.figures()
    return table


def backends_of(backend: Backend, labs: Sequence[HasBackend]) -> list[Backend]:
    """Return the servers that answer rows, ``backend`` first, without duplicate addresses.

    Raises:
        InvalidRequestError: ``labs`` is not a list of labs.
    """
    if not isinstance(labs, Sequence) or not all(isinstance(each, HasBackend) for each in labs):
        raise InvalidRequestError(
            f"labs is {labs!r:.80}; it must be a list of labs: [lmx_lab.attach('http://192.168.1.20:8400')]",
            param="labs",
        )
    backends = {backend.url: backend}
    for each in labs:
        backends.setdefault(each.backend.url, each.backend)
    return list(backends.values())

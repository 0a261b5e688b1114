"""Define ``map``, the method of a lab that answers a prompt for each row of a table, and show its progress."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lmx_lab.backend import Backend, HasBackend
from lmx_lab.batch.answers import answer_table, check_names
from lmx_lab.batch.cache import AnswerCache
from lmx_lab.batch.columns import Schema, TypedColumns
from lmx_lab.batch.prompts import Prompt, PromptSource, RowPrompts
from lmx_lab.batch.run import BatchOptions, BatchRun, Errors, MakeRequest, Retry
from lmx_lab.batch.servers import loaded_model, same_models
from lmx_lab.blocking import Portal, both, in_thread, on_loop
from lmx_lab.errors import BatchStoppedError, InvalidRequestError
from lmx_lab.notebook.arguments import chat_request
from lmx_lab.panels.workbench import Workbench
from lmx_lab.progress import counter
from lmx_lab.results.frames import RowSource, read_source
from lmx_lab.wire.chat import ChatRequest

if TYPE_CHECKING:
    import pandas as pd

NOT_USED = {
    "response_format": "pass the JSON schema, or a pydantic model, as schema",
    "model": "map uses the loaded model; load the other one",
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "map does not call tools; use lab.chat"),
    **dict.fromkeys(("logprobs", "top_logprobs", "logprob_tokens"), "the table has no column for them; use lab.chat"),
}
"""Parameters of ``chat`` that ``map`` does not accept, with the alternative to each."""


class MapOwner(HasBackend, Protocol):
    """A lab."""

    @property
    def url(self) -> str: ...
    @property
    def workbench(self) -> Workbench: ...


class RowAnswers:
    """An iterator over the answers to the rows of an iterable, as dictionaries, in the order of the rows.

    Use it with ``for`` or ``async for``. Rows are read as needed, a few hundred ahead of the answers. ``close()``
    cancels the running requests; deleting the iterator does the same.
    """

    def __init__(self, run: BatchRun, portal: Portal, cache: AnswerCache | None) -> None:
        self._run = run
        self._portal = portal
        self._cache = cache

    def __iter__(self) -> RowAnswers:
        return self

    def __next__(self) -> dict[str, Any]:
        try:
            while (row := self._run.take()) is None:
                if not self._run.read():
                    raise StopIteration
                self._portal.run(self._run.step())
        except BaseException:
            self.close()
            raise
        return row

    def __aiter__(self) -> RowAnswers:
        return self

    async def __anext__(self) -> dict[str, Any]:
        try:
            while (row := self._run.take()) is None:
                if not self._run.read():
                    raise StopAsyncIteration
                await self._portal.call(self._run.step())
        except BaseException:
            self.close()
            raise
        return row

    def close(self) -> None:
        """Cancel the running requests. Returns immediately; can be called from any thread. Idempotent."""
        self._run.close()
        if self._cache is not None:
            self._cache.close(wait=False)

    def __del__(self) -> None:
        self.close()


class MapVerbs:
    """The methods of ``Lab`` that answer a prompt for each row of a table."""

    async def _map(
        self: MapOwner,
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
        labs: Sequence[MapOwner] = (),
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
        if columns is not None:
            check_names(columns)
        run, stored = await prepare_run(
            self,
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
            return RowAnswers(run, self._portal, stored)
        interrupted = await answer_all(self, run, source, columns, stored)
        table = _answers_of(run, source, columns)
        if source.library is None:
            table.attrs["interrupted"] = interrupted
        return table

    map, amap = both(_map)


async def prepare_run(
    owner: MapOwner,
    source: RowSource,
    prompts: RowPrompts,
    columns: TypedColumns | None,
    /,
    *,
    n: int = 1,
    seed: int | None = None,
    errors: Errors = "row",
    cache: str | os.PathLike[str] | None = None,
    retry: Retry | None = None,
    labs: Sequence[MapOwner] = (),
    **parameters: Any,
) -> tuple[BatchRun, AnswerCache | None]:
    """Check the arguments of ``map``, and return the run and its cache. Has steps."""
    check_parameters(parameters, n=n, seed=seed, errors=errors, retry=retry)
    find = partial(loaded_model, hashed=cache is not None)
    loaded, others = await on_loop(owner._portal, same_models(backends_of(owner, labs), find))
    if columns is not None:
        schema = {"name": "row", "schema": dict(columns.json_schema)}
        parameters["response_format"] = {"type": "json_schema", "json_schema": schema}
    options = BatchOptions(
        prompts=prompts,
        make_request=request_maker({**parameters, "model": loaded.id}),
        parameters=frozenset(parameters),
        columns=columns,
        n=n,
        seed=seed,
        errors=errors,
        retry=retry,
    )
    stored = None if cache is None else await in_thread(lambda: AnswerCache(cache))
    return BatchRun(owner._backend, loaded, source, options, cache=stored, others=others), stored


async def answer_all(
    owner: MapOwner, run: BatchRun, source: RowSource, columns: TypedColumns | None, cache: AnswerCache | None
) -> bool:
    """Answer all rows, close the cache, and return whether the run was interrupted. Has steps."""
    started_at, total, workbench = time.monotonic(), len(source.index) * run.options.n, owner.workbench
    try:
        with counter("map") as bar:
            while run.read():
                await on_loop(owner._portal, run.step())
                elapsed_s = max(time.monotonic() - started_at, 1e-3)
                errors = f", {run.errors} errors" if run.errors else ""
                text = f"{run.done / elapsed_s:.1f} answers/s, {run.output_tokens / elapsed_s:.0f} tok/s{errors}"
                bar.show(text, run.done, total)
                workbench.job = f"Map, {run.done} of {total}: {text}"
    except KeyboardInterrupt:
        return True
    except BatchStoppedError as exc:
        exc.frame = _answers_of(run, source, columns)
        raise
    finally:
        workbench.job = ""
        try:
            await on_loop(owner._portal, run.stop())
        finally:
            if cache is not None:
                await in_thread(cache.close)
    return False


def _answers_of(run: BatchRun, source: RowSource, columns: TypedColumns | None) -> Any:
    table = answer_table(run.rows(), source, columns, several=run.options.n > 1)
    if source.library is None:
        table.attrs["labs"] = run.figures()
    return table


def backends_of(lab: MapOwner, others: Sequence[MapOwner]) -> list[Backend]:
    """Return the servers that answer rows, that of ``lab`` first, without duplicate addresses.

    Raises:
        InvalidRequestError: ``others`` is not a list of labs.
    """
    if not isinstance(others, Sequence) or not all(isinstance(each, MapVerbs) for each in others):
        raise InvalidRequestError(
            f"labs is {others!r:.80}; it must be a list of labs: [lmx_lab.attach('http://192.168.1.20:8400')]",
            param="labs",
        )
    backends = {lab.url: lab._backend}
    for each in others:
        backends.setdefault(each.url, each._backend)
    return list(backends.values())


def request_maker(fields: Mapping[str, Any]) -> MakeRequest:
    """Return the function that creates the request for a prompt.

    Raises:
        InvalidRequestError: a parameter is invalid for any prompt.
    """

    def make_request(prompt: Prompt) -> ChatRequest:
        return chat_request(prompt, fields)

    make_request("x")
    return make_request


def check_parameters(
    parameters: Mapping[str, Any], *, n: object = 1, seed: object = None, errors: object, retry: object
) -> None:
    """Check the arguments of ``map`` that are the same for all rows, except sampling parameters.

    Raises:
        InvalidRequestError: one of them is invalid.
    """
    for name, remedy in NOT_USED.items():
        if name in parameters:
            raise InvalidRequestError(f"map has no parameter {name}: {remedy}", param=name)
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InvalidRequestError(f"n is {n!r:.40}; it must be a whole number, 1 or more", param="n")
    if seed is not None and not isinstance(seed, int):
        raise InvalidRequestError(f"seed is {seed!r:.40}; it must be a whole number", param="seed")
    if errors not in ("row", "raise"):
        raise InvalidRequestError(f"errors is {errors!r:.40}; it must be 'row' or 'raise'", param="errors")
    if retry not in (None, "errors"):
        raise InvalidRequestError(f"retry is {retry!r:.40}; it must be 'errors' or None", param="retry")

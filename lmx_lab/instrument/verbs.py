"""Define the methods of a lab that compare settings and show timelines."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument.access import LabAccess
from lmx_lab.instrument.compare import Comparison, ComparisonRun, Prompt
from lmx_lab.instrument.timeline import Timeline
from lmx_lab.progress import counter
from lmx_lab.values.timeline import ServerTimeline

Settings = Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]
DEFAULT_TIMELINE_S = 60.0


class InstrumentOwner(Protocol):
    """An object with access to a lab."""

    @property
    def _access(self) -> LabAccess: ...


class InstrumentVerbs:
    """The methods of ``Lab`` that compare settings and show timelines."""

    def timeline(self: InstrumentOwner, last_s: float = DEFAULT_TIMELINE_S) -> Timeline:
        """Return the timeline of the requests of all clients, and of loads, in the last ``last_s`` seconds.

        The server keeps the last 256 requests, including running ones, and the last 64 loads and unloads. A timeline
        contains neither texts nor tokens.

        Raises:
            InvalidRequestError: ``last_s`` is not a number of seconds.
        """
        _check_seconds(last_s)
        return _timeline(self._access.run(lambda backend: backend.timeline(last_s)))

    async def atimeline(self: InstrumentOwner, last_s: float = DEFAULT_TIMELINE_S) -> Timeline:
        """Return the same as ``timeline``, for use in a coroutine."""
        _check_seconds(last_s)
        return _timeline(await self._access.call(lambda backend: backend.timeline(last_s)))

    def compare(
        self: InstrumentOwner,
        prompts: Sequence[Prompt],
        settings: Settings,
        *,
        path: str | os.PathLike[str] | None = None,
        all_scores: bool = False,
    ) -> Comparison:
        """Answer prompts under several settings, and compare the answers.

        A setting contains parameters of ``chat``, such as ``system`` and ``temperature``, and may name a ``model`` with
        options of ``load``. Models are loaded one after the other; the last one stays loaded. Each answer is
        scored under the settings of its own model, and of models that are loaded later.

        Args:
            prompts: Texts, or conversations.
            settings: A dictionary of settings by their names, or a list of settings.
            path: An SQLite file for answers and scores. Another run with the same file continues an interrupted one.
            all_scores: Whether to load models a second time, to score the answers of models that were loaded later.

        Raises:
            InvalidRequestError: a prompt or a setting is invalid, or the server runs in another process.
            NotLoadedError: no setting names a model, and none is loaded.
        """
        access = self._access
        run = ComparisonRun(access.backend, prompts, settings, path=path, all_scores=all_scores)
        with run, counter("compare") as shown:
            for text, work in run.remaining():
                shown.show(text, run.done, run.total)
                access.run(work)
        return Comparison(run, access)

    async def acompare(
        self: InstrumentOwner,
        prompts: Sequence[Prompt],
        settings: Settings,
        *,
        path: str | os.PathLike[str] | None = None,
        all_scores: bool = False,
    ) -> Comparison:
        """Return the same as ``compare``, for use in a coroutine."""
        access = self._access
        # In another thread, because opening and closing the file wait for the disk.
        run = await asyncio.to_thread(
            ComparisonRun, access.backend, prompts, settings, path=path, all_scores=all_scores
        )
        async with run:
            with counter("compare") as shown:
                for text, work in run.remaining():
                    shown.show(text, run.done, run.total)
                    await access.call(work)
        return Comparison(run, access)


def _check_seconds(last_s: object) -> None:
    if isinstance(last_s, bool) or not isinstance(last_s, int | float) or not 0 <= last_s < math.inf:
        raise InvalidRequestError(
            f"last_s is {last_s!r:.40}; it must be a number of seconds, 0 or more", param="last_s"
        )


def _timeline(found: ServerTimeline) -> Timeline:
    return Timeline(found.requests, found.models)

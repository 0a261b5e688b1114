"""Define the methods of a lab that compare settings and show timelines."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lmx_lab.backend import HasBackend, LabAccess
from lmx_lab.blocking import both, in_thread, on_loop
from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument.compare import Comparison, ComparisonRun, Prompt
from lmx_lab.instrument.timeline import Timeline
from lmx_lab.progress import counter

Settings = Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]
DEFAULT_TIMELINE_S = 60.0


class InstrumentVerbs:
    """The methods of ``Lab`` that compare settings and show timelines."""

    async def _timeline(self: HasBackend, last_s: float = DEFAULT_TIMELINE_S) -> Timeline:
        """Return the timeline of the requests of all clients, and of loads, in the last ``last_s`` seconds.

        The server keeps the last 256 requests, including running ones, and the last 64 loads and unloads. A timeline
        contains neither texts nor tokens.

        Raises:
            InvalidRequestError: ``last_s`` is not a number of seconds.
        """
        if isinstance(last_s, bool) or not isinstance(last_s, int | float) or not 0 <= last_s < math.inf:
            raise InvalidRequestError(
                f"last_s is {last_s!r:.40}; it must be a number of seconds, 0 or more", param="last_s"
            )
        found = await on_loop(self._portal, self._backend.timeline(last_s))
        return Timeline(found.requests, found.models)

    timeline, atimeline = both(_timeline)

    async def _compare(
        self: HasBackend,
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
        backend, portal = self._backend, self._portal
        # In another thread, because opening and closing the file wait for the disk.
        run = await in_thread(partial(ComparisonRun, backend, prompts, settings, path=path, all_scores=all_scores))
        async with run:
            with counter("compare") as shown:
                for text, work in run.remaining():
                    shown.show(text, run.done, run.total)
                    await on_loop(portal, work(backend))
        return Comparison(run, LabAccess(backend, portal))

    compare, acompare = both(_compare)

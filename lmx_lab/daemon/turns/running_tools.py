"""Run the tools of one turn, each in a task, and report exactly one end of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from lmx_lab.daemon.tools.tool import Toolbox
from lmx_lab.daemon.turns.turn import ToolEnded
from lmx_lab.wire.sessions import ToolCall, ToolStatus

log = logging.getLogger(__name__)


class RunningTools:
    """The tools of one turn that were started."""

    def __init__(
        self,
        toolbox: Toolbox,
        *,
        on_end: Callable[[ToolEnded], None],
        stopped_status: Callable[[], ToolStatus],
    ) -> None:
        """
        Args:
            on_end: Called with the end of each call.
            stopped_status: Returns the status of calls that are stopped.
        """
        self._toolbox = toolbox
        self._on_end = on_end
        self._stopped_status = stopped_status
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._started_s: dict[str, float] = {}

    def start(self, call: ToolCall, arguments: dict[str, Any], on_progress: Callable[[str], None]) -> None:
        """Start a call in a task."""
        loop = asyncio.get_running_loop()
        self._started_s[call.call_id] = loop.time()
        task = loop.create_task(self._run(call, arguments, on_progress))
        # A callback, because a task that is cancelled before its first step does not run any of its own code.
        task.add_done_callback(lambda ended: self._report_stopped(call.call_id) if ended.cancelled() else None)
        self._tasks[call.call_id] = task

    async def _run(self, call: ToolCall, arguments: dict[str, Any], on_progress: Callable[[str], None]) -> None:
        try:
            result = await self._toolbox.call(call.name, arguments, on_progress=on_progress)
            ended = ToolEnded(call_id=call.call_id, status=result.status, text=result.text)
        except Exception as exc:
            log.exception("tool %s raised an exception", call.name)
            ended = ToolEnded(call_id=call.call_id, status="error", text=f"the tool failed: {type(exc).__name__}")
        self._on_end(ended)

    def stop(self, call_id: str) -> None:
        """Cancel a call. One that was not started because of an error ends immediately."""
        if (task := self._tasks.get(call_id)) is not None:
            task.cancel()
        else:
            self._report_stopped(call_id)

    def _report_stopped(self, call_id: str) -> None:
        if call_id in self._started_s:
            text = "the turn was stopped while this tool was running; it is unknown whether the call had an effect"
        else:
            text = "the turn was stopped before this call started"
        self._on_end(ToolEnded(call_id=call_id, status=self._stopped_status(), text=text))

    def elapsed_s(self, call_id: str) -> float:
        """Return the seconds since a call was started, or 0 if it was not."""
        started_s = self._started_s.get(call_id)
        return 0.0 if started_s is None else round(asyncio.get_running_loop().time() - started_s, 6)

    def running_tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that have not ended."""
        return [task for task in self._tasks.values() if not task.done()]

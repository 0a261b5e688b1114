"""The tools of one turn that run: a task each, and of each task exactly one end that is told."""

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
    """
    Args:
        tell: Is told the end of each.
        stopped: The status of those that are stopped.
    """

    def __init__(
        self, toolbox: Toolbox, *, tell: Callable[[ToolEnded], None], stopped: Callable[[], ToolStatus]
    ) -> None:
        self._toolbox = toolbox
        self._tell = tell
        self._stopped = stopped
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._began_s: dict[str, float] = {}

    def start(self, call: ToolCall, arguments: dict[str, Any], note: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self._began_s[call.call_id] = loop.time()
        task = loop.create_task(self._run(call, arguments, note))
        # Not in the task: one that is cancelled before its first step runs no line of its own.
        task.add_done_callback(lambda ended: self._tell_stopped(call.call_id) if ended.cancelled() else None)
        self._tasks[call.call_id] = task

    async def _run(self, call: ToolCall, arguments: dict[str, Any], note: Callable[[str], None]) -> None:
        try:
            result = await self._toolbox.call(call.name, arguments, note=note)
            told = ToolEnded(call_id=call.call_id, status=result.status, text=result.text)
        except Exception as exc:
            log.exception("tool %s broke", call.name)
            told = ToolEnded(call_id=call.call_id, status="error", text=f"the tool failed: {type(exc).__name__}")
        self._tell(told)

    def stop(self, call_id: str) -> None:
        """Cancel it; one that could not be started ends at once."""
        if (task := self._tasks.get(call_id)) is not None:
            task.cancel()
        else:
            self._tell_stopped(call_id)

    def _tell_stopped(self, call_id: str) -> None:
        began = call_id in self._began_s
        said = "while this tool ran; whether it did its work is not known" if began else "before this call began"
        self._tell(ToolEnded(call_id=call_id, status=self._stopped(), text=f"the turn was stopped {said}"))

    def elapsed_s(self, call_id: str) -> float:
        """Since it began; 0 if it did not."""
        began_s = self._began_s.get(call_id)
        return 0.0 if began_s is None else round(asyncio.get_running_loop().time() - began_s, 6)

    def left(self) -> list[asyncio.Task[None]]:
        """Those that have not ended."""
        return [task for task in self._tasks.values() if not task.done()]

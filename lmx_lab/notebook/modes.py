"""Where a lab's server runs: on the kernel's loop, or on a thread of its own."""

from __future__ import annotations

import asyncio
from typing import Literal

from lmx_lab.errors import InvalidRequestError
from lmx_lab.notebook.addresses import is_lan
from lmx_lab.settings import Settings

LoopChoice = Literal["auto", "kernel", "thread"]
LoopMode = Literal["kernel", "thread"]


def choose_loop(loop: LoopChoice, settings: Settings) -> LoopMode:
    """The loop that ``auto`` means here.

    Raises:
        InvalidRequestError: ``kernel`` where no loop runs, or none of the three.
    """
    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if loop == "auto":
        # Blocking verbs nest the loop, which uvloop's cannot.
        nestable = isinstance(running, asyncio.BaseEventLoop)
        return "kernel" if nestable and not is_lan(settings.host) else "thread"
    if loop not in ("kernel", "thread"):
        raise InvalidRequestError(f"loop is {loop!r}; it can be auto, kernel or thread", param="loop")
    if loop == "kernel" and running is None:
        raise InvalidRequestError(
            "loop='kernel' needs a running event loop, as in a notebook; use loop='thread'", param="loop"
        )
    return loop

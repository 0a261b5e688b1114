"""Choose the event loop on which a server runs: the kernel's own, or one in a thread."""

from __future__ import annotations

import asyncio
from typing import Literal

from lmx_lab.errors import InvalidRequestError
from lmx_lab.notebook.addresses import is_lan
from lmx_lab.settings import Settings

LoopChoice = Literal["auto", "kernel", "thread"]
LoopMode = Literal["kernel", "thread"]


def choose_loop(loop: LoopChoice, settings: Settings) -> LoopMode:
    """Return the loop to use. ``auto`` selects the running loop, unless other hosts can reach the server.

    Raises:
        InvalidRequestError: ``kernel`` was given and no loop runs, or the value is not one of the three.
    """
    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if loop == "auto":
        # Blocking verbs run a nested loop, which uvloop does not support.
        nestable = isinstance(running, asyncio.BaseEventLoop)
        return "kernel" if nestable and not is_lan(settings.host) else "thread"
    if loop not in ("kernel", "thread"):
        raise InvalidRequestError(f"loop is {loop!r}; it can be auto, kernel or thread", param="loop")
    if loop == "kernel" and running is None:
        raise InvalidRequestError(
            "loop='kernel' needs a running event loop, as in a notebook; use loop='thread'", param="loop"
        )
    return loop

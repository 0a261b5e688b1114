"""SIGINT and SIGTERM for commands that run until a signal: an orderly end or, if that hangs, a hard one."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence

STOP_S = 4.7
"""From the first signal to the end of the process at the latest. A service manager or a user waits 5 to 10 s."""
LATE = b"a load, a step or a disk that hangs did not end in time; the process ends without it\n"


def stop_on_signals(
    stop: Callable[[int], object],
    *,
    numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    most: int = 1,
) -> None:
    """Call ``stop`` at the first signal. ``STOP_S`` later the process ends, whatever it is doing. Main thread only.

    Args:
        stop: Called in the signal handler with the number of signals so far. It begins the end and returns at once.
        numbers: The signals; those that are ignored stay so.
        most: After this many calls, the next signal ends the process as it would any other.
    """
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            # A thread, since the main one may wait for something that never ends.
            threading.Thread(target=_end_late, name="lmx-lab-stop", daemon=True).start()
        if len(received) >= most:
            for each in handled:
                signal.signal(each, signal.SIG_DFL)
        stop(len(received))

    for number in handled:
        signal.signal(number, handle)


def _end_late() -> None:
    threading.Event().wait(STOP_S)
    with contextlib.suppress(OSError, ValueError):
        # Not to a pipe that is full: writing would block.
        if select.select([], [2], [], 0)[1]:
            os.write(2, LATE)
    os._exit(0)

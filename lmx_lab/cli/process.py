"""Set up the process of a command that runs until a signal: stopping, memory, garbage collection and logging."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from lmx_lab.cli.terminal import print_line
from lmx_lab.sanitize import LogFormatter

STOP_S = 4.7
"""Maximum time from the first signal to the end of the process. Service managers and users wait 5 to 10 s."""


def stop_on_signals(
    stop: Callable[[int], object],
    *,
    numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    most: int = 1,
) -> None:
    """Call ``stop`` on the first signal. The process ends at most ``STOP_S`` later, even if it is blocked.

    This function has to be called in the main thread.

    Args:
        stop: Called in the signal handler with the number of signals so far. It starts the shutdown and returns at
            once.
        numbers: The signals to handle. Those that are ignored stay ignored.
        most: Maximum number of calls. The next signal then has its default action, which ends the process.
    """
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            # On another thread, because the main thread may wait for something that never ends.
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
        # Not to a full pipe, where writing would block.
        if select.select([], [2], [], 0)[1]:
            os.write(2, b"stopping immediately: a load, a generation step or a disk access did not end in time\n")
    os._exit(0)


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause garbage collection within the block, or until ``freeze_objects``.

    While a server starts, the collector would take a tenth of the time and find nothing: modules and routes are kept.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_objects() -> None:
    """Exclude all existing objects from garbage collection, because a collection over all modules stops the process for
    50 ms. They include the garbage so far, some 1,000 objects after the start of a server."""
    gc.freeze()
    gc.enable()


class _LineHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # If the reader has closed the output, the request must not fail.
        with contextlib.suppress(OSError, ValueError):
            print_line(f"{time.strftime('%H:%M:%S', time.localtime(record.created))}  {record.getMessage()}")


@contextlib.contextmanager
def print_requests() -> Iterator[None]:
    """Within the block, print one line to standard output whenever a request to the server ends."""
    logger, handler = logging.getLogger("lmx_lab.server.requests"), _LineHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True


def start_logging(level: str) -> None:
    """Log records of this level and above to standard error. Libraries that log each request log only warnings."""
    logging.basicConfig(level=level.upper())
    for handler in logging.getLogger().handlers:
        handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # The server's own lines for requests are printed without --quiet, not logged.
    for name in ("httpx", "httpx2", "httpcore2", "filelock", "lmx_lab.server.requests"):
        logging.getLogger(name).setLevel(logging.WARNING)

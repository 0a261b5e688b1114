"""The ``lmx-lab`` script from its first moment to its exit status.

At its top it imports what comes with Python alone: the rest takes a quarter of a second, in which somebody may press
Ctrl-C, and is imported where that is caught.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import TextIO

from lmx_lab.cli.exit_status import FAILED, FINE, INTERRUPTED, USAGE
from lmx_lab.errors import InvalidRequestError, LabError

OLDEST = (3, 11)


def main() -> None:
    """Entry point of the script: runs what the arguments name, and ends the process."""
    if sys.version_info < OLDEST:  # A checkout can be run by any Python.
        sys.exit(f"lmx-lab needs Python 3.11 or newer, and {sys.executable} is {sys.version.partition(' ')[0]}")
    try:
        status = run()
    except KeyboardInterrupt:
        status = INTERRUPTED
    _leave(status)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; a deliberate error is one line, an interrupt none, and neither has a traceback.

    Args:
        arguments: By default those of the process.

    Returns:
        The exit status.
    """
    failure: OSError | None = None
    try:
        _open_streams()
        from lmx_lab.cli.commands import app

        app(arguments)
        status = FINE
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else FINE if exc.code is None else FAILED
    except KeyboardInterrupt:
        status = INTERRUPTED
    except LabError as exc:
        from lmx_lab.cli.app import complain

        with contextlib.suppress(OSError):
            complain(exc)
        status = USAGE if type(exc) is InvalidRequestError else FAILED
    except OSError as exc:
        failure, status = exc, FAILED
    return _flushed(status, failure)


def _open_streams() -> None:
    """What was closed (``>&-``) leads nowhere: else the next file to be opened would have its number, and the output in
    it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = sys.stdout or io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = sys.stderr or io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A letter that the terminal's encoding lacks is no reason to end.
        sys.stdout.reconfigure(errors="backslashreplace")


def _flushed(status: int, failure: OSError | None) -> int:
    """The exit status once all is written, or cannot be; that is said, unless the reader has gone, as ``head`` does."""
    try:
        sys.stdout.flush()
    except OSError as exc:
        _discard(sys.stdout)
        failure = failure or exc
    if failure is not None:
        status = status or FAILED
        with contextlib.suppress(OSError):
            _say(failure)
    try:
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)
    return status


def _say(failure: OSError) -> None:
    if os.environ.get("LMX_LAB_LOG_LEVEL") == "debug":
        traceback.print_exception(failure)
    if failure.errno == errno.EPIPE:
        return
    # Files are told by name; what writes models and logs has words of its own.
    is_output = failure.filename is None and failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    said = "the output cannot be written: " if is_output else ""
    where = f": {failure.filename}" if failure.filename else ""
    print(f"{said}{failure.strerror or failure}{where}", file=sys.stderr, flush=True)


def _discard(stream: TextIO) -> None:
    """What is left in it goes nowhere: Python would try again when it ends, and complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _leave(status: int) -> None:
    if any(thread.name.startswith("lmx-lab-hub") for thread in threading.enumerate()):
        # The threads of the download's library cannot be stopped, and Python would wait for them.
        os._exit(status)
    # Ctrl-C while Python ends would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)

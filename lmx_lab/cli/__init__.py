"""Run the ``lmx-lab`` command line: arguments, output and exit statuses. The work is done in other packages.

``app`` puts the commands together; each command has its own module.

``--help`` and the Tab key import the modules of all commands. The packages of the client, the lab, the daemon, the
engines and the model files take 0.3 to 2 s to import. Commands therefore import them in their functions.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from importlib import import_module

OLDEST_PYTHON = (3, 11)
STARTED_S = time.perf_counter()
"""The start of the process, by ``time.perf_counter``."""
SUCCESS = 0
FAILED = 1
USAGE = 2
"""Exit status if an argument, a setting or an environment variable is not valid. It is also typer's own status."""
INTERRUPTED = 130
"""Exit status after Ctrl-C. Shells report the same status for programs that SIGINT has ended."""


def main() -> None:
    """Run the command that the process's arguments name, and end the process."""
    if sys.version_info < OLDEST_PYTHON:  # Any Python can run a checkout of the repository.
        sys.exit(f"lmx-lab needs Python 3.11 or newer; {sys.executable} is {sys.version.partition(' ')[0]}")
    try:
        # Imported here, where Ctrl-C is handled, because typer and rich take 0.2 s to import.
        status = import_module("lmx_lab.cli.app").run()
    except KeyboardInterrupt:
        status = INTERRUPTED
    _exit(status)


def _exit(status: int) -> None:
    if any(thread.name.startswith("lmx-lab-hub") for thread in threading.enumerate()):
        # The threads of the library that downloads models cannot be stopped, and Python would wait for them.
        os._exit(status)
    # Ctrl-C while Python shuts down would print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(status)

"""The command line itself, and what all commands share: printing, exit codes, logging."""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
import threading
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from lmx_lab.cli.terminal import shown
from lmx_lab.errors import LabError

app = typer.Typer(
    name="lmx-lab",
    help="Local language models on MLX and llama.cpp: serve them, fetch them, see what is there.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)
FAILED = 1
INTERRUPTED = 130
"""What shells take for Ctrl-C."""


def say(text: str, *, style: str | None = None) -> None:
    """One line as it is: names and paths may contain what rich takes for markup."""
    out.print(text, style=style, markup=False, highlight=False)


def note(text: str) -> None:
    """What is about a command's output, and not of it."""
    err.print(text, style="dim", markup=False, highlight=False)


def main() -> None:
    """Entry point of the ``lmx-lab`` script: a deliberate error is one line, not a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A letter that the terminal's encoding lacks is no reason to end.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except LabError as exc:
        _fail(exc)
    finally:
        _leave_downloads()


def _leave_downloads() -> None:
    """End now if a download still runs: its library's threads cannot be stopped, and Python would wait for them."""
    if any(thread.name.startswith("lmx-lab-hub") for thread in threading.enumerate()):
        leaving = sys.exc_info()[1]
        code = leaving.code if isinstance(leaving, SystemExit) and isinstance(leaving.code, int) else FAILED
        sys.stdout.flush()
        os._exit(code if leaving is not None else 0)


def _fail(exc: LabError) -> NoReturn:
    # A server may have said it.
    err.print(Text.assemble((shown(exc.code), "bold red"), f": {shown(exc.message)}"), highlight=False)
    sys.exit(FAILED)


def start_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "httpx2", "httpcore2", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)


def keep_what_is_made() -> None:
    """Look for garbage only among what is made from here on: a full look at all modules stops everything for 50 ms."""
    gc.collect()
    gc.freeze()

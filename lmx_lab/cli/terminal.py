"""Print to and read from the terminal.

Texts of models, tools and servers could contain control characters, so they are escaped before they are printed.
"""

from __future__ import annotations

import contextlib
import sys
import termios

from rich.console import Console
from rich.text import Text

from lmx_lab.errors import LabError
from lmx_lab.sanitize import escape_text

out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)


def print_line(text: str, *, style: str | None = None) -> None:
    """Print a line to standard output. Names and paths in it may contain rich's markup, which is not interpreted."""
    out.print(escape_text(text), style=style, markup=False, highlight=False)


def print_note(text: str) -> None:
    """Print a hint to standard error."""
    err.print(escape_text(text), style="dim", markup=False, highlight=False)


def print_error(exc: LabError) -> None:
    """Print the error's code and message, which may come from a server, to standard error."""
    err.print(Text.assemble((escape_text(exc.code), "bold red"), f": {escape_text(exc.message)}"), highlight=False)


def is_interactive() -> bool:
    """Whether standard input is a terminal, so that a user can answer questions."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_line(prompt: str) -> str:
    """Read a line from standard input. The prompt is printed to standard error if standard output is not a terminal.

    Raises:
        EOFError: the input has ended.
    """
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return input()


def discard_typed_input() -> None:
    """Discard what was typed before a question, so that it does not answer the question."""
    with contextlib.suppress(termios.error):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)

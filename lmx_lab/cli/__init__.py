"""The command line: arguments, printing, exit codes. The work is done elsewhere.

A module for each command, in the order in which ``--help`` lists them.
"""

from lmx_lab.cli import serve, daemon, chat, events, bench, weights, doctor  # noqa: F401, I001
from lmx_lab.cli.app import app, main

__all__ = ["app", "main"]

"""All commands, a module for each, in the order in which ``--help`` lists them."""

from lmx_lab.cli import serve, daemon, chat, events, bench, models, doctor  # noqa: F401, I001
from lmx_lab.cli.app import app

__all__ = ["app"]

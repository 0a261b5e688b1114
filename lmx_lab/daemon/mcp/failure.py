"""Why a connection to an MCP server could not be made, or has ended."""

from __future__ import annotations

from lmx_lab.wire.mcp import ErrorKind

FINAL: frozenset[ErrorKind] = frozenset({"command-not-found", "invalid"})
"""Trying again would not help: something has to be changed first."""


class McpFailure(Exception):
    """Never leaves the daemon: it becomes a state, a test's answer or the text of a call."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message

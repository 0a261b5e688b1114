"""Failures of connections to MCP servers, and waiting for a server that can be interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import anyio

from lmx_lab.wire.mcp import ErrorKind

FINAL_KINDS: frozenset[ErrorKind] = frozenset({"command-not-found", "invalid"})
"""Failures after which a restart does not help, because the configuration has to be changed first."""


class McpFailure(Exception):
    """A connection to an MCP server could not be opened, or has ended.

    It never leaves the daemon: it becomes the state of a server, the result of a test or the text of a call.
    """

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class StopSignal:
    """Interrupts the wait for a server when that server is to be stopped. Used on one event loop."""

    def __init__(self) -> None:
        self._scope: anyio.CancelScope | None = None
        self.is_set = False
        """Whether the server is to be stopped."""

    def set(self) -> None:
        """Interrupt the current wait and all later ones. Called from a task other than the one that waits."""
        self.is_set = True
        if self._scope is not None:
            self._scope.cancel()

    @contextlib.contextmanager
    def timeout(self, seconds: float) -> Iterator[None]:
        """Limit the time of the block, which ends early when the signal is set.

        Raises:
            TimeoutError: The block took longer than ``seconds``.
            McpFailure: The signal was set.
        """
        with anyio.fail_after(seconds) as scope:
            self._scope = scope
            if self.is_set:
                scope.cancel()
            try:
                yield
            finally:
                self._scope = None
        if scope.cancelled_caught:
            raise McpFailure("exited", "the server was stopped")

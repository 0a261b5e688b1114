"""Define the interface of a lab to its server, except requests: its start and stop, its address, its description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from lmx_lab.blocking import Portal
from lmx_lab.values.models import LoadSpec


class LabServer(Protocol):
    """A server in this process (``LocalServer``), or the connection to one in another process (``RemoteServer``).

    ``start`` and ``stop`` have steps: see ``lmx_lab.blocking``.
    """

    @property
    def url(self) -> str: ...
    @property
    def api_key(self) -> str | None: ...
    @property
    def running(self) -> bool: ...
    @property
    def bench_folder(self) -> Path | None:
        """The folder in which runs of ``bench`` are stored; None selects the user's folder."""

    @property
    def portal(self) -> Portal:
        """The loop of the server or of the connection, which the portal keeps open."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Call a function when the server or the connection is stopped."""

    def facts(self) -> dict[str, str]:
        """Return the name and the value of each line that describes the lab."""

    def unpinned(self) -> Sequence[LoadSpec]:
        """Return the encoders that the settings name and that are not in memory."""

    def panels_shown(self) -> None:
        """Called when panels of the lab are displayed."""

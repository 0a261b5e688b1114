"""Where the daemon of this user is, and its token."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from lmx_lab.client.address import bearer, server_address
from lmx_lab.client.state_file import STATE, believed, state_file
from lmx_lab.settings import Settings
from lmx_lab.wire.daemon import StateFile


@dataclass(frozen=True, kw_only=True)
class DaemonEndpoint:
    """One daemon, from its start to its end."""

    url: str
    token: str | None = field(repr=False)
    daemon_id: str | None


class Credentials:
    """Where a daemon is, and its token, which is shown nowhere. Of a daemon that is started again, ``refresh`` gets the
    new ones.

    Args:
        url: With or without a slash or ``/v3`` at its end.
        token: None sends none.
        state_path: The state file that both are from.

    Raises:
        InvalidRequestError: an address or a token that could never do.
    """

    def __init__(self, url: str, token: str | None, *, state_path: Path | None = None) -> None:
        bearer(token, name="token")
        address = server_address(url).removesuffix("/v3")
        self._place = DaemonEndpoint(url=address, token=token, daemon_id=None)
        self._state_path = state_path

    @classmethod
    def from_home(cls, home: str | os.PathLike[str] | None = None) -> Self:
        """The daemon of this folder, by its state file; by default LMX_LAB_HOME, else ``~/.lmx-lab``. Asks nobody.

        Raises:
            UnreachableError: no daemon runs there, or nobody may trust what the file says.
        """
        path = Settings.read(home=None if home is None else Path(home)).daemon_folder / STATE
        state = believed(path)
        access = cls(state.url, state.token, state_path=path)
        access._place = _of(state)
        return access

    def __repr__(self) -> str:
        return f"<Credentials to {self.url}>"

    @property
    def place(self) -> DaemonEndpoint:
        """All at once: another thread may refresh."""
        return self._place

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def token(self) -> str | None:
        return self._place.token

    @property
    def daemon_id(self) -> str | None:
        """By the state file: who answers at this address must say that it is this one. None: nobody knows."""
        return self._place.daemon_id

    def refresh(self) -> bool:
        """Read the state file again. Whether the daemon is another one now; False without a file."""
        state = None if self._state_path is None else state_file(self._state_path)
        if state is None or _of(state) == self._place:
            return False
        self._place = _of(state)
        return True


def _of(state: StateFile) -> DaemonEndpoint:
    return DaemonEndpoint(url=state.url, token=state.token, daemon_id=state.daemon_id)

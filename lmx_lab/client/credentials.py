"""Provide the address and the token of the daemon, as given by the caller or as read from its state file."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from lmx_lab.client.connection import authorization_header, normalize_address
from lmx_lab.errors import InvalidRequestError, UnreachableError
from lmx_lab.settings import Settings
from lmx_lab.wire.daemon import StateFile

STATE = "state.json"
START = "start a daemon with lmx-lab daemon, or launch(daemon=True) in a notebook"


def find_state_file(path: Path) -> StateFile | None:
    """Read the state file; return None if there is none that can be trusted."""
    try:
        return read_state_file(path)
    except UnreachableError:
        return None


def read_state_file(path: Path) -> StateFile:
    """Read the state file.

    Raises:
        UnreachableError: the file does not exist, is not valid, or other users could have written it. The message says
            what to do.
    """
    try:
        state = _parse_state(_read_private_file(path))
    except FileNotFoundError:
        raise UnreachableError(
            f"no daemon of this user is running: {path} does not exist; {START}, or set LMX_LAB_HOME to the home of a "
            "running daemon"
        ) from None
    except OSError as exc:
        raise UnreachableError(f"{path} cannot be trusted: {exc.strerror}; {START}") from exc
    if state is None:
        raise UnreachableError(f"{path} is not a valid state file of a daemon; {START}")
    return state


def _parse_state(text: bytes) -> StateFile | None:
    # No exception leaves this function: a traceback with local variables would show the token.
    try:
        state = StateFile.model_validate_json(text)
        normalize_address(state.url)
        authorization_header(state.token)
    except (ValidationError, InvalidRequestError):
        return None
    return state


def _read_private_file(path: Path) -> bytes:
    """Return the content of a file that only this user can read and write.

    Raises:
        OSError: the file cannot be read, or other users have access to it.
    """
    # Non-blocking: opening a pipe of that name would wait for its writer.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        known = os.fstat(file)
        if not stat.S_ISREG(known.st_mode):
            raise OSError(0, "it is not a regular file")
        if known.st_uid != os.geteuid():
            raise OSError(0, "it belongs to another user")
        if known.st_mode & 0o077:
            raise OSError(0, f"other users have access to it (its mode is {stat.S_IMODE(known.st_mode):o}, not 600)")
        return os.read(file, 65_536)
    finally:
        os.close(file)


@dataclass(frozen=True, kw_only=True)
class DaemonEndpoint:
    """The address, token and id of one run of a daemon."""

    url: str
    token: str | None = field(repr=False)
    daemon_id: str | None
    """The id from the state file, which the server at this address has to confirm. None without a state file."""


class Credentials:
    """The address and the token of a daemon. ``refresh`` reads new ones after a restart. The token is never displayed.

    Args:
        url: The address, optionally with a trailing slash or ``/v3``.
        token: None sends no token.
        state_path: The state file that contained both.

    Raises:
        InvalidRequestError: the address or the token is not valid.
    """

    def __init__(self, url: str, token: str | None, *, state_path: Path | None = None) -> None:
        authorization_header(token, name="token")
        address = normalize_address(url).removesuffix("/v3")
        self.endpoint = DaemonEndpoint(url=address, token=token, daemon_id=None)
        """The current address, token and id as one value, because another thread may refresh them at any time."""
        self._state_path = state_path

    @classmethod
    def from_home(cls, home: str | os.PathLike[str] | None = None) -> Self:
        """Read the state file of this folder, by default LMX_LAB_HOME, else ``~/.lmx-lab``. Sends nothing.

        Raises:
            UnreachableError: there is no state file, or it cannot be trusted.
        """
        path = Settings.read(home=None if home is None else Path(home)).daemon_folder / STATE
        state = read_state_file(path)
        credentials = cls(state.url, state.token, state_path=path)
        credentials.endpoint = _endpoint_of(state)
        return credentials

    def __repr__(self) -> str:
        return f"<Credentials of {self.url}>"

    @property
    def url(self) -> str:
        return self.endpoint.url

    def has_moved(self, endpoint: DaemonEndpoint) -> bool:
        """Whether the daemon has another endpoint now, which another task may have read. May read the state file."""
        return self.endpoint != endpoint or self.refresh()

    def refresh(self) -> bool:
        """Read the state file again. Returns whether the endpoint has changed; False without a state file."""
        state = None if self._state_path is None else find_state_file(self._state_path)
        if state is None or _endpoint_of(state) == self.endpoint:
            return False
        self.endpoint = _endpoint_of(state)
        return True


def _endpoint_of(state: StateFile) -> DaemonEndpoint:
    return DaemonEndpoint(url=state.url, token=state.token, daemon_id=state.daemon_id)

"""The address and the token of the daemon, as given or as read from its state file."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from lmx_lab.client.address import bearer, server_address
from lmx_lab.errors import InvalidRequestError, UnreachableError
from lmx_lab.settings import Settings
from lmx_lab.wire.daemon import StateFile

STATE = "state.json"
START = "start a daemon with lmx-lab daemon, or launch(daemon=True) in a notebook"
STATE_BYTES = 65_536


def state_file(path: Path) -> StateFile | None:
    """Read the state file; returns None if there is none that can be trusted."""
    try:
        return believed(path)
    except UnreachableError:
        return None


def believed(path: Path) -> StateFile:
    """Read the state file.

    Raises:
        UnreachableError: it does not exist, or can be written by other users; the message says what to do.
    """
    try:
        state = _stated(_private_text(path))
    except FileNotFoundError:
        raise UnreachableError(
            f"no daemon of this user runs: there is no {path}; {START}, or set LMX_LAB_HOME to where one runs"
        ) from None
    except OSError as exc:
        raise UnreachableError(f"{path} is not believed: {exc.strerror}; {START}") from exc
    if state is None:
        raise UnreachableError(f"{path} is no state file of a daemon; {START}")
    return state


def _stated(text: bytes) -> StateFile | None:
    # No exception leaves this function: a traceback with values would show the token.
    try:
        state = StateFile.model_validate_json(text)
        server_address(state.url)
        bearer(state.token)
    except (ValidationError, InvalidRequestError):
        return None
    return state


def _private_text(path: Path) -> bytes:
    # Non-blocking: opening a pipe of that name would wait for its writer.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        known = os.fstat(file)
        if not stat.S_ISREG(known.st_mode):
            raise OSError(0, "it is no file")
        if known.st_uid != os.geteuid():
            raise OSError(0, "it belongs to another user")
        if known.st_mode & 0o077:
            raise OSError(0, f"others may read or write it (its mode is {stat.S_IMODE(known.st_mode):o}, not 600)")
        return os.read(file, STATE_BYTES)
    finally:
        os.close(file)


@dataclass(frozen=True, kw_only=True)
class DaemonEndpoint:
    """Address, token and id of one run of a daemon."""

    url: str
    token: str | None = field(repr=False)
    daemon_id: str | None


class Credentials:
    """The address and the token of a daemon; ``refresh`` reads new ones after a restart. The token is never displayed.

    Args:
        url: The address, optionally with a trailing slash or ``/v3``.
        token: None sends no token.
        state_path: The state file that both were read from.

    Raises:
        InvalidRequestError: the address or the token is not valid.
    """

    def __init__(self, url: str, token: str | None, *, state_path: Path | None = None) -> None:
        bearer(token, name="token")
        address = server_address(url).removesuffix("/v3")
        self._endpoint = DaemonEndpoint(url=address, token=token, daemon_id=None)
        self._state_path = state_path

    @classmethod
    def from_home(cls, home: str | os.PathLike[str] | None = None) -> Self:
        """Read the state file of this folder, by default LMX_LAB_HOME, else ``~/.lmx-lab``. Sends nothing.

        Raises:
            UnreachableError: there is no state file, or it cannot be trusted.
        """
        path = Settings.read(home=None if home is None else Path(home)).daemon_folder / STATE
        state = believed(path)
        credentials = cls(state.url, state.token, state_path=path)
        credentials._endpoint = _of(state)
        return credentials

    def __repr__(self) -> str:
        return f"<Credentials of {self.url}>"

    @property
    def endpoint(self) -> DaemonEndpoint:
        """Address, token and id at one moment; another thread may refresh them."""
        return self._endpoint

    @property
    def url(self) -> str:
        return self._endpoint.url

    @property
    def token(self) -> str | None:
        return self._endpoint.token

    @property
    def daemon_id(self) -> str | None:
        """The id from the state file, which the server at this address must confirm; None if it is not known."""
        return self._endpoint.daemon_id

    def refresh(self) -> bool:
        """Read the state file again. Returns whether the endpoint has changed; False without a file."""
        state = None if self._state_path is None else state_file(self._state_path)
        if state is None or _of(state) == self._endpoint:
            return False
        self._endpoint = _of(state)
        return True


def _of(state: StateFile) -> DaemonEndpoint:
    return DaemonEndpoint(url=state.url, token=state.token, daemon_id=state.daemon_id)

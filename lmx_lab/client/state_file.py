"""The daemon's state file, read by those who can trust it: it was written by their own user, and nobody else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pydantic import ValidationError

from lmx_lab.client.address import bearer, server_address
from lmx_lab.errors import InvalidRequestError, UnreachableError
from lmx_lab.wire.daemon import StateFile

STATE = "state.json"
START = "start a daemon with lmx-lab daemon, or launch(daemon=True) in a notebook"
STATE_BYTES = 65_536


def state_file(path: Path) -> StateFile | None:
    """What the file says; None if there is none that could be believed."""
    try:
        return believed(path)
    except UnreachableError:
        return None


def believed(path: Path) -> StateFile:
    """What the file says.

    Raises:
        UnreachableError: there is none, or not one that only this user can have written; it says what to do.
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
    # No error leaves this: a traceback with values would show the text, in which the token is.
    try:
        state = StateFile.model_validate_json(text)
        server_address(state.url)
        bearer(state.token)
    except (ValidationError, InvalidRequestError):
        return None
    return state


def _private_text(path: Path) -> bytes:
    # Not blocking: a pipe of that name would wait for its writer.
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

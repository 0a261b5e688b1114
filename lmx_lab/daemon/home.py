"""The daemon's folder: the lock that makes it the only one, the state file by which its user's programs find it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
import weakref
from pathlib import Path

from lmx_lab.client.credentials import STATE, find_state_file
from lmx_lab.errors import DaemonRunningError, HostingError
from lmx_lab.wire.daemon import StateFile

LOCK = "daemon.lock"
PATIENCE_S = 2.0
"""How long a start waits for another daemon that is just starting, or ending."""
LOOK_S = 0.02


class DaemonHome:
    """One daemon's hold on its folder, which nobody else may look into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None

    def acquire(self, patience_s: float = PATIENCE_S) -> None:
        """Make the folder where there is none, and take its lock for as long as this process lives.

        Raises:
            DaemonRunningError: another daemon has it; the message says where that is.
            HostingError: the folder is somebody else's, a symbolic link, or cannot be written.
        """
        deadline = time.monotonic() + patience_s
        lock = _open_lock(self.folder)
        try:
            while not _taken(lock, self.folder):
                state = _state_of_holder(lock, self.folder)
                if state is not None or time.monotonic() > deadline:
                    raise DaemonRunningError(_running(self.folder, state))
                time.sleep(LOOK_S)
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        except OSError as exc:
            os.close(lock)
            raise HostingError(f"{self.folder / LOCK} cannot be written: {exc.strerror}") from exc
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        _HELD.add(self)

    def release(self) -> None:
        """Let others have the lock. Idempotent."""
        _HELD.discard(self)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def publish(self, state: StateFile) -> None:
        """Write the state file, whole at once, for its user alone."""
        draft = self.folder / f"{STATE}.{secrets.token_hex(8)}"
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as writing:
                os.fchmod(writing.fileno(), 0o600)
                writing.write(state.model_dump_json(indent=1))
            draft.replace(self.folder / STATE)
        except OSError as exc:
            draft.unlink(missing_ok=True)
            raise HostingError(f"{self.folder / STATE} cannot be written: {exc.strerror}") from exc

    def withdraw(self, daemon_id: str) -> None:
        """Remove the state file, if it is still this daemon's."""
        state = find_state_file(self.folder / STATE)
        if state is not None and state.daemon_id == daemon_id:
            (self.folder / STATE).unlink(missing_ok=True)


def read_state(folder: Path) -> StateFile | None:
    """What the state file says, if only this user can have written it and the daemon of which it tells has the lock.

    Unlike a process's number or its start, the lock needs no clock and is never another's.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        # Shared, so that those who look do not take one another for a daemon.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _state_of_holder(lock, folder)
    finally:
        os.close(lock)
    return None


def _open_lock(folder: Path) -> int:
    try:
        _make_private(folder)
        # Programs that are started do not get it (O_CLOEXEC is Python's own way), forks close it: see _HELD.
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise HostingError(f"{folder} cannot be used: {exc.strerror}; LMX_LAB_HOME names another place") from exc


def _make_private(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as exc:
        if exc.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise HostingError(f"{folder} is no folder, or a symbolic link; move it, or set LMX_LAB_HOME") from exc
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise HostingError(f"{folder} belongs to another user; set LMX_LAB_HOME to a folder of your own")
        # Also where a umask has taken bits away, or an older folder is open to others.
        os.fchmod(handle, 0o700)
    finally:
        os.close(handle)


def _taken(lock: int, folder: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        raise HostingError(f"{folder} is on a file system without locks ({exc.strerror}); set LMX_LAB_HOME") from exc
    return True


def _state_of_holder(lock: int, folder: Path) -> StateFile | None:
    """An older file that nobody removed is that of another process, even if its number is a living one's again."""
    state = find_state_file(folder / STATE)
    return state if state is not None and os.pread(lock, 32, 0) == str(state.pid).encode() else None


def _running(folder: Path, state: StateFile | None) -> str:
    if state is None:
        return f"another daemon holds {folder / LOCK}, and is just starting or ending; try again"
    return (
        f"the daemon of {folder} runs already, at {state.url} (process {state.pid}); use that one, or end it first: "
        f"Ctrl-C where it runs, or POST /v3/daemon/shutdown"
    )


_HELD: weakref.WeakSet[DaemonHome] = weakref.WeakSet()


def _let_go() -> None:
    # Closed, not unlocked: the lock is that of the process before the fork, for which a child would keep it.
    for home in list(_HELD):
        home.release()


os.register_at_fork(after_in_child=_let_go)

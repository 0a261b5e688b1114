"""Manage the daemon's folder: the lock that allows only one daemon, the state file for clients, and the log file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import secrets
import time
import weakref
from logging.handlers import RotatingFileHandler
from pathlib import Path

from lmx_lab.client.credentials import STATE, find_state_file
from lmx_lab.errors import DaemonRunningError, HostingError
from lmx_lab.sanitize import LogFormatter
from lmx_lab.wire.daemon import StateFile

LOCK = "daemon.lock"
LOGGERS = ("lmx_lab", "uvicorn")


class DaemonHome:
    """The folder of one daemon, which only its user can read, and the lock on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None
        """File descriptor of the lock file while the lock is held."""

    def acquire(self, timeout_s: float = 2.0) -> None:
        """Create the folder if necessary, and take its lock until ``release`` or the end of the process.

        Args:
            timeout_s: Time to wait for another daemon that is starting or stopping.

        Raises:
            DaemonRunningError: Another daemon holds the lock. The message contains its address.
            HostingError: The folder belongs to another user, is a symbolic link or cannot be written.
        """
        deadline = time.monotonic() + timeout_s
        lock = _open_lock(self.folder)
        try:
            while not _try_lock(lock, self.folder):
                state = _state_of_holder(lock, self.folder)
                if state is not None or time.monotonic() > deadline:
                    if state is None:
                        message = f"another daemon holds {self.folder / LOCK} and is starting or stopping; try again"
                    else:
                        message = (
                            f"a daemon is already running for {self.folder}, at {state.url} (process {state.pid}); use "
                            "that one, or stop it first with Ctrl-C in its terminal or POST /v3/daemon/shutdown"
                        )
                    raise DaemonRunningError(message)
                time.sleep(0.02)
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        except OSError as exc:
            os.close(lock)
            raise HostingError(f"{self.folder / LOCK} cannot be written: {exc.strerror}") from exc
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        _LOCKED.add(self)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        _LOCKED.discard(self)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def publish(self, state: StateFile) -> None:
        """Write the state file atomically. Only the user can read it.

        Raises:
            HostingError: The file cannot be written.
        """
        temporary = self.folder / f"{STATE}.{secrets.token_hex(8)}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(state.model_dump_json(indent=1))
            temporary.replace(self.folder / STATE)
        except OSError as exc:
            temporary.unlink(missing_ok=True)
            raise HostingError(f"{self.folder / STATE} cannot be written: {exc.strerror}") from exc

    def withdraw(self, daemon_id: str) -> None:
        """Remove the state file if it belongs to this daemon."""
        state = find_state_file(self.folder / STATE)
        if state is not None and state.daemon_id == daemon_id:
            (self.folder / STATE).unlink(missing_ok=True)


def read_state(folder: Path) -> StateFile | None:
    """Return the state file of a running daemon.

    The file is ignored if another user may have written it, or if its daemon does not hold the lock. The lock is more
    reliable than a process id or a start time: it needs no clock and cannot be reused by another process.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        # Shared, so that concurrent readers do not mistake each other for a daemon.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _state_of_holder(lock, folder)
    finally:
        os.close(lock)
    return None


def _open_lock(folder: Path) -> int:
    """Create the folder if necessary, make it private, and open its lock file."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as exc:
            if exc.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise HostingError(
                f"{folder} is not a folder, or is a symbolic link; move it, or set LMX_LAB_HOME to another folder"
            ) from exc
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise HostingError(f"{folder} belongs to another user; set LMX_LAB_HOME to a folder of your own")
            # Set again, because a umask may have removed permissions, or an existing folder may be open to others.
            os.fchmod(descriptor, 0o700)
        finally:
            os.close(descriptor)
        # Python opens files with O_CLOEXEC, so new programs do not inherit the lock. Forks close it: see _LOCKED.
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise HostingError(
            f"the folder {folder} cannot be used: {exc.strerror}; set LMX_LAB_HOME to another folder"
        ) from exc


def _try_lock(lock: int, folder: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        raise HostingError(
            f"{folder} is on a file system without locks ({exc.strerror}); set LMX_LAB_HOME to another folder"
        ) from exc
    return True


def _state_of_holder(lock: int, folder: Path) -> StateFile | None:
    """Return the state file if the process that holds the lock has written it.

    A file that an earlier daemon has left is ignored, even if its process id is in use again.
    """
    state = find_state_file(folder / STATE)
    return state if state is not None and os.pread(lock, 32, 0) == str(state.pid).encode() else None


_LOCKED: weakref.WeakSet[DaemonHome] = weakref.WeakSet()
"""The homes whose lock this process holds."""


def _close_locks_in_child() -> None:
    # Closed, not unlocked: parent and child share the lock, so unlocking in the child would release it for both.
    for home in list(_LOCKED):
        home.release()


os.register_at_fork(after_in_child=_close_locks_in_child)


# The log file


class LogFile:
    """``daemon.log``: the log of the package and of its HTTP server, without the token.

    The file is rotated, and only the user can read it.
    """

    def __init__(self, folder: Path, *, token: str) -> None:
        self._handler = _PrivateFileHandler(
            folder / "daemon.log", maxBytes=1_000_000, backupCount=2, encoding="utf-8", delay=True
        )
        self._handler.setFormatter(_RedactingFormatter(token))

    def open(self) -> None:
        """Start logging to the file."""
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._handler)

    def close(self) -> None:
        """Stop logging to the file."""
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._handler)
        # On a full disk the last lines are lost, which must not prevent the daemon from stopping.
        with contextlib.suppress(OSError):
            self._handler.close()


class _PrivateFileHandler(RotatingFileHandler):
    def _open(self) -> io.TextIOWrapper:
        def open_private(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW, 0o600)

        return open(self.baseFilename, self.mode, encoding=self.encoding, errors="replace", opener=open_private)  # type: ignore[return-value]

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore errors such as a full disk, which would otherwise write tracebacks to stderr and so to a notebook."""


class _RedactingFormatter(LogFormatter):
    """Removes the token from all records, including tracebacks and records of other packages."""

    def __init__(self, token: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._token = token

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace(self._token, "***")

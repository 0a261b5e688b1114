"""Store cursors, the positions of readers in the daemon's event log."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmx_lab.errors import HostingError

MAX_CURSOR_BYTES = 4096


class Cursor(BaseModel):
    """The position of a reader in the event log: all events up to ``seq`` have been read."""

    model_config = ConfigDict(frozen=True)

    stream_id: str = Field(min_length=1, max_length=200)
    """Id of the daemon's database, in which ``seq`` counts."""
    seq: int = Field(ge=0, le=10**15)
    """Number of the last event that was read."""


class CursorStore(Protocol):
    """Stores one reader's cursor between subscriptions."""

    def load(self) -> Cursor | None:
        """Return the cursor that was saved last; None if there is none yet."""

    def save(self, cursor: Cursor) -> None:
        """Save a cursor. It is called on the reader's event loop, so it must not block for long."""


class MemoryCursor:
    """A cursor store in memory: the cursor lives as long as this object."""

    def __init__(self, cursor: Cursor | None = None) -> None:
        self._cursor = cursor

    def load(self) -> Cursor | None:
        return self._cursor

    def save(self, cursor: Cursor) -> None:
        self._cursor = cursor


class FileCursor:
    """A cursor store in a file, for one subscription at a time.

    If the file has other content, loading raises an error: the path may be wrong, and saving would overwrite the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()

    def load(self) -> Cursor | None:
        """Read the cursor; None if the file does not exist.

        Raises:
            HostingError: the file does not contain a cursor, or cannot be read.
        """
        try:
            # Non-blocking: opening a pipe of that name would wait for its writer.
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                is_file = stat.S_ISREG(os.fstat(file).st_mode)
                text = os.read(file, MAX_CURSOR_BYTES) if is_file else b"not a regular file"
            finally:
                os.close(file)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise HostingError(
                f"the cursor in {self.path} cannot be read: {exc.strerror}; give the path of another file"
            ) from exc
        try:
            return Cursor.model_validate_json(text)
        except ValidationError as exc:
            raise HostingError(
                f"{self.path} does not contain a cursor: {text[:80]!r}; remove the file to start without one, or give "
                "the path of another file"
            ) from exc

    def save(self, cursor: Cursor) -> None:
        """Write the file atomically, readable by this user only.

        Raises:
            HostingError: the file cannot be written.
        """
        draft = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}")
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as stream:
                stream.write(cursor.model_dump_json())
            draft.replace(self.path)
        except OSError as exc:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise HostingError(
                f"the cursor cannot be written to {self.path}: {exc.strerror}; give the path of another file"
            ) from exc

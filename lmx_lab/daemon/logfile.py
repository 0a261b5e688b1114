"""``daemon.log``: what went wrong, for this user only, bounded, without the token."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

from lmx_lab.sanitize import LogFormatter

LOG = "daemon.log"
LOG_BYTES = 1_000_000
BACKUPS = 2
LOGGERS = ("lmx_lab", "uvicorn")


class LogFile:
    """Attached to the loggers of the package and of its server from ``open`` to ``close``."""

    def __init__(self, folder: Path, *, token: str) -> None:
        self._handler = _Private(folder / LOG, maxBytes=LOG_BYTES, backupCount=BACKUPS, encoding="utf-8", delay=True)
        self._handler.setFormatter(_Redacting(token))

    def open(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._handler)

    def close(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._handler)
        # What a full disk did not take is lost, and nothing else.
        with contextlib.suppress(OSError):
            self._handler.close()


class _Private(RotatingFileHandler):
    def _open(self) -> io.TextIOWrapper:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW, 0o600)

        return open(self.baseFilename, self.mode, encoding=self.encoding, errors="replace", opener=private)  # type: ignore[return-value]

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk is no reason to write tracebacks into a notebook."""


class _Redacting(LogFormatter):
    """The token gets into no record; this holds for those of other packages too, tracebacks included."""

    def __init__(self, token: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._token = token

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace(self._token, "***")

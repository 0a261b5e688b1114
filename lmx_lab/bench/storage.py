"""Store runs as JSON lines: the provenance first, then each sample when its request ends.

The file of a run that was killed contains all samples, except perhaps the last one, whose line may be incomplete.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from lmx_lab.bench.sample import RequestSample, new_run, read_row, row, table_of
from lmx_lab.errors import InvalidRequestError, newer_version
from lmx_lab.results.provenance import provenance as current_provenance
from lmx_lab.settings import Settings

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

SUFFIX = ".jsonl"
VERSION = 1
"""Version of the files. Columns are added without a new one."""


def default_folder() -> Path:
    """Return the folder ``bench`` in the lab's home."""
    return Settings.read().home / "bench"


class Recorder:
    """Writes the file of one run, as a context manager::

        with Recorder() as recorder:
            recorder.add(sample)

    ``add`` passes each sample to the operating system before it returns, so that a crash of this process loses none. If
    the run fails before its first sample, the file is removed.

    Args:
        folder: The folder for the file; by default ``bench`` in the lab's home. It is created if it does not exist,
            accessible by its owner only.
        provenance: Provenance of the run; by default that of this moment.

    Raises:
        InvalidRequestError: the provenance is not valid JSON, or the file cannot be created.
    """

    def __init__(self, folder: Path | str | None = None, *, provenance: Mapping[str, Any] | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.provenance: dict[str, Any] = dict(current_provenance() if provenance is None else provenance)
        self.path: Path | None = None
        """The file. It is set when the context is entered."""
        self.failure: OSError | None = None
        """The error after which ``add_or_log`` has stopped writing."""
        self._file: IO[str] | None = None
        self._is_empty = True

    def __enter__(self) -> Self:
        head = _line({"lmx_lab_bench": VERSION, "provenance": self.provenance})
        run = str(self.provenance.get("run"))
        # As returned by ``new_run``; other texts could be paths.
        name = run if re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", run) else new_run()
        path = self.folder / f"{name}{SUFFIX}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            # Line-buffered: a line is one write.
            self._file, self.path = os.fdopen(made, "w", encoding="utf-8", buffering=1), path
            self._file.write(head)
        except OSError as exc:
            self.__exit__(type(exc), exc, exc.__traceback__)
            raise InvalidRequestError(
                f"the run cannot be stored in {self.folder} ({exc.strerror or exc}); give a writable folder, or do not "
                "record the run",
                param="record",
            ) from exc
        return self

    def add(self, sample: RequestSample) -> None:
        """Write a sample.

        Raises:
            RuntimeError: the recorder is not open.
            OSError: the file cannot be written, for example because the disk is full.
        """
        if self._file is None:
            raise RuntimeError("this recorder is not open; use it as `with Recorder() as recorder:`")
        self._file.write(_line(row(sample)))
        self._is_empty = False

    def add_or_log(self, sample: RequestSample) -> None:
        """Write a sample. After an error, which is logged, nothing more is written, but the measurement continues."""
        if self.failure is None:
            try:
                self.add(sample)
            except OSError as exc:
                self.failure = exc
                log.warning("The measurement continues, but %s is not written any more: %s", self.path, exc)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # For example, if the disk is still full.
                file.close()
        if kind is not None and self._is_empty and self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None


def load(path: Path | str | None = None, *, last: int | None = None) -> pd.DataFrame:
    """Load the samples of one run, or of all runs in a folder, oldest first. The column ``run`` is the file's name.

    Unknown columns of newer versions are dropped; columns that an older version did not have are missing values.
    Incomplete lines are skipped. ``.attrs["provenance"]`` has the provenance of each run by its name, and
    ``.attrs["skipped"]`` the reason why each other file in the folder was not loaded.

    Args:
        path: A file or a folder; by default ``bench`` in the lab's home.
        last: Number of runs to load, the newest ones of the folder; by default all.

    Raises:
        InvalidRequestError: ``path`` does not exist, or the file is not a run.
        OSError: the file cannot be read.
        MissingPackageError: pandas is not installed.
    """
    source = default_folder() if path is None else Path(path)
    if last is not None and not (isinstance(last, int) and last >= 1):
        raise InvalidRequestError(f"last is {last!r}; give 1 or more, or omit it to load all runs", param="last")
    if path is not None and not (source.is_file() or source.is_dir()):
        raise InvalidRequestError(f"{source} does not exist; give the file of a run, or a folder of runs", param="path")
    files = [source] if source.is_file() else sorted(source.glob(f"*{SUFFIX}"))[-(last or 0) :]
    rows: list[dict[str, Any]] = []
    provenances: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for file in files:
        try:
            provenances[file.stem], found = _read(file)
        except (InvalidRequestError, OSError) as exc:
            if file == source:
                raise
            skipped[file.name] = str(exc)
            log.warning("%s", exc)
        else:
            rows += ({**one, "run": file.stem} for one in found)
    table = table_of(rows)
    table.attrs.update(provenance=provenances, skipped=skipped)
    return table


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        # A sample has some hundred characters. A longer line is split into pieces, which are not valid.
        lines = iter(lambda: file.readline(2**20), "")
        head = _parse_object(next(lines, ""))
        if head is None or not isinstance(head.get("provenance"), dict) or "lmx_lab_bench" not in head:
            raise InvalidRequestError(f"{path} is not the file of a run: its first line is not a provenance")
        if head["lmx_lab_bench"] != VERSION:
            raise InvalidRequestError(f"{path} {newer_version(head['lmx_lab_bench'], VERSION)}", param="path")
        samples = (read_row(one) for one in map(_parse_object, lines) if one is not None)
        return head["provenance"], [one for one in samples if one is not None]


def _parse_object(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line; ``None`` if it is incomplete or not an object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _line(value: dict[str, Any]) -> str:
    try:
        # In ASCII, so that any error text of a server can be written.
        return json.dumps(value, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"the run cannot be written as JSON: {exc!s:.200}; give plain Python values") from exc

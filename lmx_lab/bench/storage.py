"""Runs on disk: JSON lines, the provenance first, then each sample as it ends.

A run that was killed has all samples but perhaps its last one, whose line may be torn.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from lmx_lab.bench.provenance import provenance as present
from lmx_lab.bench.sample import COLUMNS, Sample, fitting, new_run, row, table_of
from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".jsonl"
LINE_LIMIT = 2**20
"""Characters; a sample has some hundred."""
NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}")
"""Of a run, as ``new_run`` makes it."""


def default_folder() -> Path:
    """``bench`` in the lab's home."""
    return Settings.read().home / "bench"


class Recorder:
    """One run's file, open for as long as it lasts::

        with Recorder() as kept:
            kept.add(sample)

    Each sample is on its way to the disk when ``add`` returns: a crash of this process loses none. A run that
    fails before its first sample leaves no file.

    Args:
        folder: Made if need be, for its owner alone; by default ``bench`` in the lab's home.
        provenance: Of the run; by default found out here.

    Raises:
        InvalidRequestError: a provenance that JSON cannot write, or a place where no file can be made.
    """

    def __init__(self, folder: Path | str | None = None, *, provenance: Mapping[str, Any] | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.provenance: dict[str, Any] = dict(present() if provenance is None else provenance)
        self.path: Path | None = None
        """Once entered."""
        self.failure: OSError | None = None
        """Why ``keep`` has given up."""
        self._file: IO[str] | None = None
        self._is_empty = True

    def __enter__(self) -> Self:
        head = _line({"lmx_lab_bench": FORMAT, "provenance": self.provenance})
        run = str(self.provenance.get("run"))
        path = self.folder / f"{run if NAME.fullmatch(run) else new_run()}{SUFFIX}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            # Line-buffered: a line is one write.
            self._file, self.path = os.fdopen(made, "w", encoding="utf-8", buffering=1), path
            self._file.write(head)
        except OSError as exc:
            self.__exit__(type(exc), exc, exc.__traceback__)
            raise InvalidRequestError(
                f"no run can be kept in {self.folder} ({exc.strerror or exc}); give a folder that can be written, or "
                "do not keep it",
                param="record",
            ) from exc
        return self

    def add(self, sample: Sample) -> None:
        """Write one more line.

        Raises:
            RuntimeError: outside its ``with`` block.
            OSError: the disk is full, or gone.
        """
        if self._file is None:
            raise RuntimeError("this recorder is not open; use it as `with Recorder() as kept:`")
        self._file.write(_line(row(sample)))
        self._is_empty = False

    def keep(self, sample: Sample) -> None:
        """``add``, until the disk is full: that ends the keeping, and not what is measured for minutes."""
        if self.failure is None:
            try:
                self.add(sample)
            except OSError as exc:
                self.failure = exc
                log.warning("%s is not written any more, since %s; what is measured goes on", self.path, exc)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # a full disk, again
                file.close()
        if kind is not None and self._is_empty and self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None


def save(
    samples: Iterable[Sample], provenance: Mapping[str, Any] | None = None, folder: Path | str | None = None
) -> Path:
    """Keep a run that has been measured; returns its file.

    Raises:
        InvalidRequestError, OSError: as ``Recorder``.
    """
    with Recorder(folder, provenance=provenance) as kept:
        for sample in samples:
            kept.add(sample)
    assert kept.path is not None
    return kept.path


def load(path: Path | str | None = None, *, last: int | None = None) -> pd.DataFrame:
    """The samples of one run, or of all that a folder has, the oldest run first; ``run`` is the file's name.

    What a newer version added is left out, what an older one had not is missing. Of a torn line nothing is taken.
    ``.attrs["provenance"]`` has each run's, by its name; ``.attrs["skipped"]`` says why a file of the folder is no run.

    Args:
        path: A file or a folder; by default the one in the lab's home.
        last: Only so many of the folder's runs, the newest ones.

    Raises:
        InvalidRequestError: nothing is there, or the file is no run.
        OSError: the file cannot be read.
        ImportError: pandas is not installed.
    """
    place = default_folder() if path is None else Path(path)
    if last is not None and not (isinstance(last, int) and last >= 1):
        raise InvalidRequestError(f"last is {last!r}; give 1 or more, or leave it out for all runs", param="last")
    rows: list[dict[str, Any]] = []
    known: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for file in _files(place, last, named=path is not None):
        try:
            known[file.stem], found = _read(file)
        except (InvalidRequestError, OSError) as exc:
            if file == place:
                raise
            skipped[file.name] = str(exc)
            log.warning("%s", exc)
        else:
            rows += ({**one, "run": file.stem} for one in found)
    table = table_of(rows, COLUMNS)
    table.attrs.update(provenance=known, skipped=skipped)
    return table


def _files(place: Path, last: int | None, *, named: bool) -> list[Path]:
    if place.is_file():
        return [place]
    if place.is_dir():
        found = sorted(place.glob(f"*{SUFFIX}"))
        return found if last is None else found[-last:]
    if named:
        raise InvalidRequestError(f"{place} is not there; give a run's file, or a folder of them", param="path")
    return []


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = _lines(file)
        head = _parsed(next(lines, ""))
        if head is None or not isinstance(head.get("provenance"), dict) or "lmx_lab_bench" not in head:
            raise InvalidRequestError(f"{path} is no run: its first line does not say what it was measured with")
        samples = (fitting(one) for one in map(_parsed, lines) if one is not None)
        return head["provenance"], [one for one in samples if one is not None]


def _lines(file: IO[str]) -> Iterator[str]:
    """Whole lines; what is longer than any sample comes in pieces, which are none."""
    while line := file.readline(LINE_LIMIT):
        yield line


def _parsed(line: str) -> dict[str, Any] | None:
    """An object that was torn has not its last brace."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _line(value: dict[str, Any]) -> str:
    try:
        # ASCII: whatever a server has put into its error can be written.
        return json.dumps(value, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"the run cannot be kept as JSON: {exc!s:.200}; give plain values") from exc

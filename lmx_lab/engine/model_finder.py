"""Find the files of a model by name on this disk, and download them if that is allowed.

Blocking work runs in threads.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from lmx_lab.errors import DownloadError, ModelNotFoundError, NotLoadedError, UnusableModelError
from lmx_lab.values.models import LoadProgress, ModelEntry
from lmx_lab.weights import Catalog, Progress
from lmx_lab.weights.files import in_thread

T = TypeVar("T")
DISK_S = 30.0
"""Time limit for finding and checking the files of a model."""


class ModelFinder:
    """Finds models on this disk, and downloads missing ones.

    Args:
        downloads: Whether models that are not on this disk may be downloaded.
        report: Called with each step of a download, on any thread.
    """

    def __init__(self, catalog: Catalog, *, downloads: bool, report: Callable[[LoadProgress], None]) -> None:
        self._catalog = catalog
        self._downloads = downloads
        self._report = report

    async def find(self, name: str, *, local: bool) -> ModelEntry:
        """Return the model of this name.

        Args:
            local: Whether the caller is on this machine, and may name paths and models to download.

        Raises:
            ModelNotFoundError: it is not on disk, and cannot be downloaded.
            UnusableModelError, StorageFullError: its files cannot be used, or there is no room for them.
            NotLoadedError: the disk does not answer.
        """
        try:
            return await from_disk(functools.partial(self._catalog.resolve, name, local=local), name)
        except (ModelNotFoundError, UnusableModelError) as exc:
            # An interrupted download (full disk, end of the process) leaves some of the files.
            if isinstance(exc, UnusableModelError) and not self._catalog.can_fetch(name):
                raise
            if not self._downloads or not local:
                raise
            return await self._download(name, exc)

    async def resolve(self, name: str, *, local: bool) -> ModelEntry:
        """Return the model of this name on this disk.

        Raises:
            ModelNotFoundError, UnusableModelError: it is not on disk, or cannot be used.
        """
        return await in_thread(functools.partial(self._catalog.resolve, name, local=local))

    async def check(self, entry: ModelEntry) -> None:
        """Check that the files of a model are complete.

        Raises:
            UnusableModelError: files are missing or incomplete.
            NotLoadedError: the disk does not answer.
        """
        await from_disk(functools.partial(self._catalog.check, entry), entry.id)

    async def on_disk(self) -> Sequence[ModelEntry]:
        """Return the models on this disk."""
        return (await self._catalog.alisting()).entries

    async def _download(self, name: str, missing: ModelNotFoundError | UnusableModelError) -> ModelEntry:
        try:
            return await in_thread(
                lambda: self._catalog.fetch(name, functools.partial(self._report_download, name)), name="lmx-lab-fetch"
            )
        except DownloadError as exc:
            # The class of the error says that the model is missing or incomplete; the message says why.
            if isinstance(missing, UnusableModelError):
                raise UnusableModelError(f"{missing.message}; {exc.message}", param="model") from exc
            raise ModelNotFoundError(f"{name} is not on this disk: {exc.message}", param="model") from exc

    def _report_download(self, name: str, progress: Progress) -> None:
        self._report(
            LoadProgress(
                model=name, stage=progress.stage, done_bytes=progress.done_bytes, total_bytes=progress.total_bytes
            )
        )


async def from_disk(work: Callable[[], T], name: str) -> T:
    """Return the result of work on the files of a model.

    Raises:
        NotLoadedError: the disk does not answer in time.
    """
    try:
        return await asyncio.wait_for(in_thread(work), DISK_S)
    except TimeoutError:
        raise NotLoadedError(
            f"{name} was not loaded: the folders with models have not been read within {DISK_S:g} s; check their disks"
        ) from None

"""Find the files of a model by name on disk, and download them if that is allowed.

Blocking work runs in threads.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from lmx_lab.engine.engine_choice import REQUESTED, TITLES, PreferredEngine, choose_format, preferred_engine
from lmx_lab.engine.registry import ENGINES, choose_engine, engine_for
from lmx_lab.engine.speeds import read_speeds
from lmx_lab.errors import DownloadError, ModelNotFoundError, NotLoadedError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import EngineChoice, Format, LoadProgress, LoadSpec, ModelEntry
from lmx_lab.weights import Catalog, Progress
from lmx_lab.weights.files import in_thread

T = TypeVar("T")
DISK_S = 30.0
"""Time limit for finding and checking the files of a model."""


class ModelFinder:
    """Finds models on disk, and downloads missing ones. Of several formats, it selects that of the fastest engine.

    Args:
        report: Called with each step of a download, on any thread.
    """

    def __init__(self, settings: Settings, catalog: Catalog, *, report: Callable[[LoadProgress], None]) -> None:
        self._settings = settings
        self._catalog = catalog
        self._report = report

    async def find(self, spec: LoadSpec, *, local: bool, loaded: ModelEntry | None = None) -> ModelEntry:
        """Return the files to load, with ``engine_reason``.

        With ``engine="auto"``, a model that an engine here can run is not downloaded or converted to another format.

        Args:
            local: Whether the caller is on this machine, and may name paths and models to download.
            loaded: The model in memory.

        Raises:
            ModelNotFoundError: the model is not on disk, and cannot be downloaded.
            UnusableModelError: its files cannot be used, or the required engine cannot run it or is not installed.
            StorageFullError: there is no room for its files.
            NotLoadedError: the disk does not answer.
        """
        name = spec.model
        if spec.engine != "auto" and (problem := ENGINES[spec.engine].problem()) is not None:
            raise UnusableModelError(problem, param="engine")
        missing: ModelNotFoundError | UnusableModelError | None = None
        entries: list[ModelEntry] = []
        try:
            entries, preferred = await from_disk(functools.partial(self._look_up, spec, local=local), name)
        except (ModelNotFoundError, UnusableModelError) as exc:
            # An interrupted download (full disk, end of the process) leaves some of the files.
            if isinstance(exc, UnusableModelError) and not self._catalog.can_fetch(name):
                raise
            missing, preferred = exc, await from_disk(functools.partial(self._preferred_engine, spec), name)
        found = choose_format(entries, spec, preferred, loaded)
        if found is not None and not self._needs_other_format(found, name):
            return found
        return await self._fetch(spec, entries, preferred, missing, local=local)

    def _look_up(self, spec: LoadSpec, *, local: bool) -> tuple[list[ModelEntry], PreferredEngine]:
        entries = self._catalog.find_formats(spec.model, local=local, all_formats=spec.engine != "auto")
        return entries, self._preferred_engine(spec)

    def _preferred_engine(self, spec: LoadSpec) -> PreferredEngine:
        return preferred_engine(read_speeds(self._settings), spec)

    def _needs_other_format(self, entry: ModelEntry, name: str) -> bool:
        return engine_for(entry.format).problem() is not None and self._catalog.can_choose_format(name)

    async def _fetch(
        self,
        spec: LoadSpec,
        entries: Sequence[ModelEntry],
        preferred: PreferredEngine,
        missing: ModelNotFoundError | UnusableModelError | None,
        *,
        local: bool,
    ) -> ModelEntry:
        """Download the model, or make the format that the engine needs."""
        name = spec.model
        if spec.engine != "auto":
            format_, reason = ENGINES[spec.engine].formats[0], REQUESTED
        else:
            format_, reason = preferred.format, preferred.reason
        can_choose = self._catalog.can_choose_format(name)
        if entries and not can_choose:
            # Raises, because the engine runs none of the formats on the disk.
            choose_engine(entries[0], spec)
        # A conversion for MLX from the file on the disk needs no download.
        needs_download = not (format_ == "mlx" and any(entry.format == "gguf" for entry in entries))
        if not local or (needs_download and not self._settings.downloads):
            raise missing or UnusableModelError(
                f"{name} is on disk in the format {TITLES[entries[0].format]} only, and {spec.engine} needs "
                f"{TITLES[format_]}; run `lmx-lab pull {name}{' --mlx' if format_ == 'mlx' else '-gguf'}` there",
                param="engine",
            )
        entry = await self._download(name, format_ if can_choose or spec.engine != "auto" else None, missing)
        return replace(entry, engine_reason=reason) if can_choose else entry

    async def resolve(self, name: str, *, local: bool) -> ModelEntry:
        """Return the model of this name on disk.

        Raises:
            ModelNotFoundError, UnusableModelError: it is not on disk, or cannot be used.
        """
        return await in_thread(functools.partial(self._catalog.resolve, name, local=local))

    async def with_draft(self, entry: ModelEntry, spec: LoadSpec, *, local: bool) -> ModelEntry:
        """Return the model with the draft model of the load, if it has one: in the same format, for the same engine.

        Args:
            local: See ``find``.

        Raises:
            ModelNotFoundError, UnusableModelError, NotLoadedError: see ``find``; for the draft model.
        """
        # The echo engine needs no drafts.
        if spec.draft is None or entry.draft is not None or entry.format == "echo":
            return entry
        engine: EngineChoice = "mlx" if entry.format == "mlx" else "llama.cpp"
        try:
            draft = await self.find(LoadSpec(model=spec.draft, engine=engine), local=local)
            await self.check(draft)
        except (ModelNotFoundError, UnusableModelError) as exc:
            raise type(exc)(f"the draft model cannot be used: {exc.message}", param="draft") from exc
        return replace(entry, draft=draft)

    async def check(self, entry: ModelEntry) -> None:
        """Check that the files of a model are complete.

        Raises:
            UnusableModelError: files are missing or incomplete.
            NotLoadedError: the disk does not answer.
        """
        await from_disk(functools.partial(self._catalog.check, entry), entry.id)

    async def on_disk(self) -> Sequence[ModelEntry]:
        """Return the models on disk."""
        return (await self._catalog.alisting()).entries

    async def _download(
        self, name: str, format_: Format | None, missing: ModelNotFoundError | UnusableModelError | None
    ) -> ModelEntry:
        report = functools.partial(self._report_download, name)
        try:
            return await in_thread(lambda: self._catalog.fetch(name, report, format=format_), name="lmx-lab-fetch")
        except DownloadError as exc:
            # The class of the error shows that the model is missing or incomplete; the message contains the reason.
            if isinstance(missing, UnusableModelError):
                raise UnusableModelError(f"{missing.message}; {exc.message}", param="model") from exc
            raise ModelNotFoundError(f"{name} is not on disk: {exc.message}", param="model") from exc

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

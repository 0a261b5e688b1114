"""Find the files of a model by name on disk, and download them if that is allowed. If a model has several
formats, choose the one for the fastest engine on this machine.

Blocking work runs in threads.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from lmx_lab.engine.engines import ENGINES, choose_engine, engine_for
from lmx_lab.engine.speeds import PreferredEngine, by_preference, llama_cpp_option, preferred_engine, read_speeds
from lmx_lab.errors import DownloadError, ModelNotFoundError, NotLoadedError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import EngineChoice, Format, LoadSpec, ModelEntry, ModelEvent
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.store import Progress

T = TypeVar("T")
TITLES: Mapping[Format, str] = {"mlx": "MLX", "gguf": "GGUF", "echo": "echo"}
"""Names of the formats in messages."""
REQUESTED = "as requested"


class ModelFinder:
    """Finds models on disk, and downloads missing ones. Of several formats, it selects that of the fastest engine.

    Args:
        report: Called with each step of a download, on any thread.
    """

    def __init__(self, settings: Settings, catalog: Catalog, *, report: Callable[[ModelEvent], None]) -> None:
        self.settings = settings
        self.catalog = catalog
        self._report = report

    async def find(self, spec: LoadSpec, *, local: bool, loaded: Sequence[ModelEntry] = ()) -> ModelEntry:
        """Return the files to load, with ``engine_reason``.

        With ``engine="auto"``, a model that an engine here can run is not downloaded or converted to another format.

        Args:
            local: Whether the caller is on this machine, and may name paths and models to download.
            loaded: The models in memory.

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
        preferred = await self.preferred(spec)
        try:
            entries = await self.formats(spec, local=local)
        except (ModelNotFoundError, UnusableModelError) as exc:
            # An interrupted download (full disk, end of the process) leaves some of the files.
            if isinstance(exc, UnusableModelError) and not self.catalog.can_fetch(name):
                raise
            missing = exc
        found = choose_format(entries, spec, preferred, loaded)
        can_choose = self.catalog.can_choose_format(name)
        if found is not None and (not can_choose or engine_for(found.format).problem() is None):
            return found
        # It is downloaded, or the format that the engine needs is made.
        if spec.engine != "auto":
            format_, reason = ENGINES[spec.engine].formats[0], REQUESTED
        else:
            format_, reason = preferred.format, preferred.reason
        if entries and not can_choose:
            # Raises, because the engine runs none of the formats on the disk.
            choose_engine(entries[0], spec)
        # A conversion for MLX from the file on the disk needs no download.
        needs_download = not (format_ == "mlx" and any(entry.format == "gguf" for entry in entries))
        if not local or (needs_download and not self.settings.downloads):
            raise missing or UnusableModelError(
                f"{name} is on disk in the format {TITLES[entries[0].format]} only, and {spec.engine} needs "
                f"{TITLES[format_]}; run `lmx-lab pull {name}{' --mlx' if format_ == 'mlx' else '-gguf'}` there",
                param="engine",
            )

        def report(progress: Progress) -> None:
            done_bytes, total_bytes = progress.done_bytes, progress.total_bytes
            self._report(ModelEvent(model=name, stage=progress.stage, done_bytes=done_bytes, total_bytes=total_bytes))

        fetched = format_ if can_choose or spec.engine != "auto" else None
        try:
            entry = await in_thread(lambda: self.catalog.fetch(name, report, format=fetched), name="lmx-lab-fetch")
        except DownloadError as exc:
            # The class of the error shows that the model is missing or incomplete; the message contains the reason.
            if isinstance(missing, UnusableModelError):
                raise UnusableModelError(f"{missing.message}; {exc.message}", param="model") from exc
            raise ModelNotFoundError(f"{name} is not on disk: {exc.message}", param="model") from exc
        return replace(entry, engine_reason=reason) if can_choose else entry

    async def formats(self, spec: LoadSpec, *, local: bool) -> list[ModelEntry]:
        """Return the formats on disk to which the name refers or, if an engine is required, all formats of the model.

        Raises:
            ModelNotFoundError, UnusableModelError, NotLoadedError: see ``find``.
        """
        all_formats = spec.engine != "auto"
        find = functools.partial(self.catalog.find_formats, spec.model, local=local, all_formats=all_formats)
        return await from_disk(find, spec.model)

    async def preferred(self, spec: LoadSpec) -> PreferredEngine:
        """Return the engine that is preferred on this machine for a load."""
        return await from_disk(lambda: preferred_engine(read_speeds(self.settings), spec), spec.model)

    async def resolve(self, name: str, *, local: bool) -> ModelEntry:
        """Return the model of this name on disk.

        Raises:
            ModelNotFoundError, UnusableModelError: it is not on disk, or cannot be used.
        """
        return await in_thread(functools.partial(self.catalog.resolve, name, local=local))

    async def check(self, entry: ModelEntry) -> None:
        """Check that the files of a model are complete.

        Raises:
            UnusableModelError: files are missing or incomplete.
            NotLoadedError: the disk does not answer.
        """
        await from_disk(functools.partial(self.catalog.check, entry), entry.id)

    async def on_disk(self) -> Sequence[ModelEntry]:
        """Return the models on disk."""
        return (await self.catalog.alisting()).entries


async def with_draft(
    entry: ModelEntry, spec: LoadSpec, find: Callable[[LoadSpec], Awaitable[ModelEntry]]
) -> ModelEntry:
    """Return the model with the draft model that the load names, if any; it runs on the same engine.

    Args:
        find: Returns the files of the draft model.

    Raises:
        ModelNotFoundError, UnusableModelError, NotLoadedError: see ``find``; they refer to the draft model.
    """
    # The echo engine needs no drafts.
    if spec.draft is None or entry.draft is not None or entry.format == "echo":
        return entry
    engine: EngineChoice = "mlx" if entry.format == "mlx" else "llama.cpp"
    try:
        return replace(entry, draft=await find(LoadSpec(model=spec.draft, engine=engine)))
    except (ModelNotFoundError, UnusableModelError) as exc:
        raise type(exc)(f"the draft model cannot be used: {exc.message}", param="draft") from exc


async def from_disk(work: Callable[[], T], name: str, limit_s: float = 30.0) -> T:
    """Return the result of work on the files of a model.

    Args:
        limit_s: Time limit for finding and checking the files.

    Raises:
        NotLoadedError: the disk does not answer in time.
    """
    try:
        return await asyncio.wait_for(in_thread(work), limit_s)
    except TimeoutError:
        raise NotLoadedError(
            f"{name} was not loaded: the folders with models have not been read within {limit_s:g} s; check their disks"
        ) from None


def choose_format(
    entries: Sequence[ModelEntry], spec: LoadSpec, preferred: PreferredEngine, loaded: Sequence[ModelEntry]
) -> ModelEntry | None:
    """Return the entry to load with ``engine_reason``, of those on the disk; None if the required engine runs none.

    Args:
        entries: The formats that the name means or, if an engine is required, all formats of the model.
        loaded: The models in memory. With ``auto``, they stay, unless an option needs another engine.
    """
    if not entries:
        return None
    if spec.engine != "auto":
        found = [entry for entry in entries if entry.format in ENGINES[spec.engine].formats]
        # A path means the first entry, which is the file itself.
        named = [it for it in found if it.source != "path" and (it.id == spec.model or it.has_alias(spec.model))]
        best = by_preference(named or found[:1], preferred)
        return _with_reason(best[0], REQUESTED) if best else None
    for present in loaded:
        if llama_cpp_option(spec) is None or present.format == preferred.format:
            same = next((entry for entry in entries if entry.path == present.path), None)
            if same is not None:
                return replace(same, engine_reason=present.engine_reason)
    entry = by_preference(entries, preferred)[0]
    if entry.format == preferred.format and len({each.format for each in entries}) > 1:
        return _with_reason(entry, preferred.reason)
    # The model of the echo engine has no files.
    reason = "" if entry.format == "echo" else f"its only format on disk is {TITLES[entry.format]}"
    return _with_reason(entry, reason)


def _with_reason(entry: ModelEntry, reason: str) -> ModelEntry:
    """Return the entry with the reason for its engine, and what was measured of it if it is a quantized copy."""
    return replace(entry, engine_reason=reason if entry.copy is None else f"{reason}; {entry.copy}")

"""The catalog of all models on this disk, and of how to get others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from lmx_lab.errors import DownloadError, ModelNotFoundError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ECHO, ModelEntry
from lmx_lab.weights.gguf.config import converted_bytes, refuse_unsupported
from lmx_lab.weights.gguf.convert import convert_gguf, converted_id
from lmx_lab.weights.gguf.model import read_gguf
from lmx_lab.weights.hub import cache as cache_module
from lmx_lab.weights.package_index import fetch_starter
from lmx_lab.weights.scan import (
    ModelLocation,
    folder_locations,
    hub_locations,
    model_path,
    path_locations,
    read_entry,
    read_facts,
)
from lmx_lab.weights.scanner import Listing, Root, Scanner
from lmx_lab.weights.starters import STARTERS, Starter
from lmx_lab.weights.store import (
    Progress,
    ProgressCallback,
    ignore_progress,
    lock_model,
    publish,
    require_disk,
    workspace,
)

HUB_ID = re.compile(r"(?P<repo>[\w.-]{1,96}/[\w.-]{1,96})(?::(?P<choice>[!-9;-~]{1,200}))?", re.ASCII)
"""``org/name`` or ``org/name:Q4_K_M``; the name of a GGUF file is also allowed after the colon."""
NAMED_IN_ERRORS = 12


class Catalog:
    """The models in the store, the hub cache and the extra folders.

    Any thread may use it. All methods except ``alisting`` block.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._models = settings.models_folder
        self._scanner = Scanner(self._roots)

    def scan(self) -> list[ModelEntry]:
        """Return the entries of ``listing``."""
        return list(self.listing().entries)

    def listing(self) -> Listing:
        """Return every usable model, sorted by id. It takes a bounded time; see ``Scanner``.

        If several models have the same id, the one in the store comes first, then the one of the hub. Damaged folders
        and files that cannot be used are left out; ``resolve`` reports the reason.
        """
        return self._scanner.listing()

    async def alisting(self) -> Listing:
        """Return the same as ``listing``, on an event loop."""
        return await self._scanner.alisting()

    def resolve(self, name: str, *, local: bool = True) -> ModelEntry:
        """Return the entry of a model.

        ``echo`` is always the built-in entry. ``org/name`` also means ``org/name:Q4_K_M`` if only this GGUF model of
        the repository is on the disk.

        Args:
            name: An id or an alias; with ``local`` also a path in the file system.

        Raises:
            ModelNotFoundError: there is no such model; the message lists the models here and how to fetch others.
            UnusableModelError: the model is damaged or cannot be loaded; the message contains the reason.
        """
        if name == ECHO.id:
            return ECHO
        failure: UnusableModelError | None = None
        for location in self._matching_locations(name, list(path_locations(name)) if local else []):
            try:
                return read_entry(location)
            except UnusableModelError as exc:
                failure = failure or exc
        raise failure or self._not_found(name)

    def _matching_locations(self, name: str, named: list[ModelLocation]) -> list[ModelLocation]:
        """Return the locations with this id or at the named path, followed by those with this alias.

        A path means the listed model at this path if there is one.
        """
        locations = [*self._locations(), *named]
        paths = [location.path for location in named]
        exact = [location for location in locations if location.id == name or location.path in paths]
        return [*exact, *(location for location in locations if location.has_alias(name))]

    def check(self, entry: ModelEntry) -> None:
        """Check again before a load that the files are complete: sizes, shards, configuration and tokenizer.

        Raises:
            UnusableModelError: they are not, or the model requires custom code.
        """
        if entry.format != "echo":
            read_facts(entry.path)

    def fetch(self, name: str, progress: ProgressCallback | None = None) -> ModelEntry:
        """Return a model from this disk, or download it. A ``.gguf`` file is not changed; see ``convert``.

        Args:
            name: An id of the catalog, a starter's id, ``org/name`` or ``org/name:Q4_K_M`` of the hub, or a path.
                Without a quantization, a repository means its safetensors. If it has only GGUF files, the quantization
                is chosen by ``PREFERRED`` in ``weights.gguf.names``.
            progress: Called on this thread, a few times per second.

        Raises:
            ModelNotFoundError: the name or the quantization is unknown; the message lists the known ones.
            UnusableModelError: the files cannot be loaded.
            StorageFullError: the disk is too small, which is usually known before the first byte, or it became full.
            DownloadError: the hub or the package index failed, or sent something else than expected.
        """
        report = progress or ignore_progress
        if entry := self._present(name):
            return entry
        if name in STARTERS:
            return self._fetch_starter(STARTERS[name], report)
        if match := HUB_ID.fullmatch(name):
            return self._fetch_from_hub(name, match["repo"], match["choice"], report)
        raise self._not_found(name)

    def convert(self, name: str, progress: ProgressCallback | None = None) -> ModelEntry:
        """Return a model in MLX's format. It is fetched if necessary, and a GGUF file is converted into the store once.

        Args:
            name: As in ``fetch``.
            progress: As in ``fetch``.

        Raises:
            UnusableModelError: as ``fetch``, or MLX could not compute a GGUF model, or not correctly.
            ModelNotFoundError, StorageFullError, DownloadError: as ``fetch``.
        """
        report = progress or ignore_progress
        entry = self.fetch(name, report)
        return self._convert(entry.path, report) if entry.format == "gguf" else entry

    def can_fetch(self, name: str) -> bool:
        """Whether a download may provide the model of that name, or repair the copy on this disk."""
        return name in STARTERS or (HUB_ID.fullmatch(name) is not None and not os.path.exists(name))

    def _present(self, name: str) -> ModelEntry | None:
        """Return the entry, or None if a download can provide or repair it."""
        try:
            return self.resolve(name)
        except ModelNotFoundError:
            return None
        except UnusableModelError:
            if self.can_fetch(name):
                return None
            raise

    def _fetch_starter(self, starter: Starter, report: ProgressCallback) -> ModelEntry:
        with lock_model(self._models, starter.id):
            if entry := self._stored(starter.id):
                return entry
            require_disk(self._models, starter.needed_bytes, self._settings.disk_reserve_bytes, starter.id)
            with workspace(self._models, starter.id) as temp:
                folder = temp / "model"
                folder.mkdir()
                fetch_starter(starter, folder, temp, report)
                for source in folder.glob("*.gguf") if starter.converts else ():
                    _convert(source, folder, report)
                    source.unlink()
                return self._publish(starter.id, folder, temp, report)

    def _fetch_from_hub(self, name: str, repo: str, choice: str | None, report: ProgressCallback) -> ModelEntry:
        # Slow to import, and most processes never download.
        from lmx_lab.weights.hub.download import download

        cache = cache_module.cache_folder()
        # One download per repository at a time: the progress is measured by the size of its folder.
        with lock_model(self._models, repo):
            if entry := self._present(name):
                return entry
            try:
                path = download(repo, cache, self._settings.disk_reserve_bytes, report, choice=choice)
            except DownloadError as exc:
                # Even without the hub, several quantizations on this disk are the better explanation.
                raise (self._ambiguous(name) or exc) from exc
            found = (location for location in hub_locations(cache) if location.path == path)
            return read_entry(next(found, ModelLocation(id=name, path=path, source="hub")))

    def _convert(self, path: Path, report: ProgressCallback) -> ModelEntry:
        header = read_gguf(path)
        refuse_unsupported(header)
        report(Progress(stage="verify", done_bytes=0, total_bytes=header.size_bytes))
        model_id = converted_id(path)
        with lock_model(self._models, model_id):
            if entry := self._stored(model_id):
                return entry
            require_disk(self._models, converted_bytes(header), self._settings.disk_reserve_bytes, path.name)
            with workspace(self._models, model_id) as temp:
                folder = temp / "model"
                folder.mkdir()
                _convert(path, folder, report)
                return self._publish(model_id, folder, temp, report)

    def _publish(self, model_id: str, folder: Path, temp: Path, report: ProgressCallback) -> ModelEntry:
        """Move a model into the store, after a check that it can be listed and loaded."""
        size = read_facts(model_path(folder)).size_bytes
        report(Progress(stage="store", done_bytes=0, total_bytes=size))
        publish(folder, self._models / model_id, temp)
        report(Progress(stage="store", done_bytes=size, total_bytes=size))
        return read_entry(self._store_location(model_id))

    def _stored(self, model_id: str) -> ModelEntry | None:
        try:
            return read_entry(self._store_location(model_id))
        except UnusableModelError:
            return None

    def _store_location(self, model_id: str) -> ModelLocation:
        return ModelLocation(id=model_id, path=model_path(self._models / model_id), source="store")

    def _locations(self) -> Iterator[ModelLocation]:
        for _, locations in self._roots():
            yield from locations

    def _roots(self) -> Iterator[Root]:
        """Return folders and the models in them. The id ``echo`` is reserved: a model of that name needs its path."""
        for folder, locations in self._all_roots():
            yield folder, (location for location in locations if location.id != ECHO.id)

    def _all_roots(self) -> Iterator[Root]:
        yield self._models, folder_locations(self._models, "store")
        cache = cache_module.cache_folder()
        yield cache, hub_locations(cache)
        for folder in self._settings.model_folders:
            yield folder, folder_locations(folder, "folder")

    def _ambiguous(self, name: str) -> ModelNotFoundError | None:
        """Return the error for a repository with several quantizations on this disk."""
        prefix = f"{name}:"
        locations = hub_locations(cache_module.cache_folder())
        here = [location.id for location in locations if location.id.startswith(prefix)]
        if len(here) < 2:
            return None
        return ModelNotFoundError(f"{name} has several models on this disk; name one: {', '.join(here)}", param="model")

    def _not_found(self, name: str) -> ModelNotFoundError:
        here = [entry.id for entry in self.scan()]
        shown = ", ".join(here[:NAMED_IN_ERRORS]) + (", …" if len(here) > NAMED_IN_ERRORS else "")
        known = ", ".join(STARTERS)
        return self._ambiguous(name) or ModelNotFoundError(
            f"there is no model {name[:200]!r} on this disk; available are: {shown or 'none yet'}. "
            f"Fetch one with `lmx-lab pull ID`: a starter ({known}), or org/name or org/name:Q4_K_M of the hub",
            param="model",
        )


def _convert(source: Path, folder: Path, report: ProgressCallback) -> None:
    size = source.stat().st_size
    report(Progress(stage="convert", done_bytes=0, total_bytes=size))
    convert_gguf(source, folder)
    report(Progress(stage="convert", done_bytes=size, total_bytes=size))

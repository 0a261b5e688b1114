"""The catalog: every model on this disk, and how to get another one."""

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
    exclusive,
    ignore_progress,
    publish,
    require_disk,
    workspace,
)

HUB_ID = re.compile(r"(?P<repo>[\w.-]{1,96}/[\w.-]{1,96})(?::(?P<choice>[!-9;-~]{1,200}))?", re.ASCII)
"""``org/name`` or ``org/name:Q4_K_M``; behind the colon may also stand the name of a GGUF file."""
NAMED_IN_ERRORS = 12


class Catalog:
    """What the store, the hub cache and the extra folders hold; for any thread. All methods but ``alisting`` block."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._models = settings.models_folder
        self._scanner = Scanner(self._roots)

    def scan(self) -> list[ModelEntry]:
        """As ``listing``, without its problem."""
        return list(self.listing().entries)

    def listing(self) -> Listing:
        """Every usable model, by id; of the same id the store's wins, then the hub's. Bounded in time, see ``Scanner``.

        Damaged folders and files that cannot be used are left out; ``resolve`` says why.
        """
        return self._scanner.listing()

    async def alisting(self) -> Listing:
        """As ``listing``, on an event loop."""
        return await self._scanner.alisting()

    def resolve(self, name: str, *, local: bool = True) -> ModelEntry:
        """The model of that id; for a local caller also the one at that path of the file system.

        ``echo`` is the built-in entry, whatever is on the disk.

        ``org/name`` also means ``org/name:Q4_K_M`` where that is all that is here of the repository.

        Raises:
            ModelNotFoundError: neither; the message names what there is and how to fetch more.
            UnusableModelError: it is there, but damaged or nothing that can be loaded; the message says why.
        """
        if name == ECHO.id:
            return ECHO
        failure: UnusableModelError | None = None
        for place in self._meant(name, list(path_locations(name)) if local else []):
            try:
                return read_entry(place)
            except UnusableModelError as exc:
                failure = failure or exc
        raise failure or self._not_found(name)

    def _meant(self, name: str, named: list[ModelLocation]) -> list[ModelLocation]:
        """Places of that id, or at the path that was named: it means the model that is listed there, if one is. Then
        those that have other names too."""
        places = [*self._places(), *named]
        paths = [place.path for place in named]
        exact = [place for place in places if place.id == name or place.path in paths]
        return [*exact, *(place for place in places if place.is_called(name))]

    def check(self, entry: ModelEntry) -> None:
        """Look again, before a load, whether the files are whole: lengths, shards, configuration, tokenizer.

        Raises:
            UnusableModelError: they are not, or only code of the model's own could load it.
        """
        if entry.format != "echo":
            read_facts(entry.path)

    def fetch(self, name: str, progress: ProgressCallback | None = None) -> ModelEntry:
        """The model, from this disk or downloaded. A ``.gguf`` file stays what and where it is; see ``convert``.

        Args:
            name: An id of the catalog, a starter's id, ``org/name`` or ``org/name:Q4_K_M`` of the hub, or a path.
                Without a quantization a repository means its safetensors, or if it has only GGUF the one that
                ``gguf_names.PREFERRED`` says.
            progress: Called on this thread, a few times a second.

        Raises:
            ModelNotFoundError: nobody knows the name; or the quantization, then the message names those there are.
            UnusableModelError: the files are nothing that can be loaded.
            StorageFullError: the disk is too small, known before the first byte; or it filled up.
            DownloadError: the hub or the package index failed, or sent something else than was pinned.
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
        """The model in MLX's format: fetched if need be, and if it is a GGUF converted into the store, once.

        Args: as ``fetch``.

        Raises:
            UnusableModelError: beside what ``fetch`` says, a GGUF that MLX would compute wrongly or not at all.
            ModelNotFoundError, StorageFullError, DownloadError: as ``fetch``.
        """
        report = progress or ignore_progress
        entry = self.fetch(name, report)
        return self._import(entry.path, report) if entry.format == "gguf" else entry

    def can_fetch(self, name: str) -> bool:
        """Whether a download may provide the model of that name, or mend what is here of it."""
        return name in STARTERS or (HUB_ID.fullmatch(name) is not None and not os.path.exists(name))

    def _present(self, name: str) -> ModelEntry | None:
        """The entry, or ``None`` if a download can provide or mend it."""
        try:
            return self.resolve(name)
        except ModelNotFoundError:
            return None
        except UnusableModelError:
            if self.can_fetch(name):
                return None
            raise

    def _fetch_starter(self, starter: Starter, report: ProgressCallback) -> ModelEntry:
        with exclusive(self._models, starter.id):
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
        # huggingface_hub takes a while to import, and most sessions never download.
        from lmx_lab.weights.hub.download import download

        cache = cache_module.cache_folder()
        # One download of a repository at a time: progress is told from the growth of its folder.
        with exclusive(self._models, repo):
            if entry := self._present(name):
                return entry
            try:
                path = download(repo, cache, self._settings.disk_reserve_bytes, report, choice=choice)
            except DownloadError as exc:
                # Without the hub there is still something to say of what is here of it.
                raise (self._ambiguous(name) or exc) from exc
            found = (place for place in hub_locations(cache) if place.path == path)
            return read_entry(next(found, ModelLocation(id=name, path=path, source="hub")))

    def _import(self, path: Path, report: ProgressCallback) -> ModelEntry:
        header = read_gguf(path)
        refuse_unsupported(header)
        report(Progress(stage="verify", done_bytes=0, total_bytes=header.size_bytes))
        model_id = converted_id(path)
        with exclusive(self._models, model_id):
            if entry := self._stored(model_id):
                return entry
            require_disk(self._models, converted_bytes(header), self._settings.disk_reserve_bytes, path.name)
            with workspace(self._models, model_id) as temp:
                folder = temp / "model"
                folder.mkdir()
                _convert(path, folder, report)
                return self._publish(model_id, folder, temp, report)

    def _publish(self, model_id: str, folder: Path, temp: Path, report: ProgressCallback) -> ModelEntry:
        """Nothing becomes visible that could not be listed and loaded."""
        size = read_facts(model_path(folder)).size_bytes
        report(Progress(stage="store", done_bytes=0, total_bytes=size))
        publish(folder, self._models / model_id, temp)
        report(Progress(stage="store", done_bytes=size, total_bytes=size))
        return read_entry(self._store_place(model_id))

    def _stored(self, model_id: str) -> ModelEntry | None:
        try:
            return read_entry(self._store_place(model_id))
        except UnusableModelError:
            return None

    def _store_place(self, model_id: str) -> ModelLocation:
        return ModelLocation(id=model_id, path=model_path(self._models / model_id), source="store")

    def _places(self) -> Iterator[ModelLocation]:
        for _, places in self._roots():
            yield from places

    def _roots(self) -> Iterator[Root]:
        """Folders and the models in them. One called ``echo`` has to be named by its path: that id is reserved."""
        for folder, places in self._all_roots():
            yield folder, (place for place in places if place.id != ECHO.id)

    def _all_roots(self) -> Iterator[Root]:
        yield self._models, folder_locations(self._models, "store")
        cache = cache_module.cache_folder()
        yield cache, hub_locations(cache)
        for folder in self._settings.model_folders:
            yield folder, folder_locations(folder, "folder")

    def _ambiguous(self, name: str) -> ModelNotFoundError | None:
        """What to say of a repository of which several quantizations are here."""
        here = [place.id for place in hub_locations(cache_module.cache_folder()) if place.id.startswith(f"{name}:")]
        if len(here) < 2:
            return None
        return ModelNotFoundError(f"{name} is here more than once; name one: {', '.join(here)}", param="model")

    def _not_found(self, name: str) -> ModelNotFoundError:
        here = [entry.id for entry in self.scan()]
        shown = ", ".join(here[:NAMED_IN_ERRORS]) + (", …" if len(here) > NAMED_IN_ERRORS else "")
        known = ", ".join(STARTERS)
        return self._ambiguous(name) or ModelNotFoundError(
            f"there is no model {name[:200]!r} on this disk; there is {shown or 'none yet'}. "
            f"Fetch one with `lmx-lab pull ID`: a starter ({known}), or org/name or org/name:Q4_K_M of the hub",
            param="model",
        )


def _convert(source: Path, folder: Path, report: ProgressCallback) -> None:
    size = source.stat().st_size
    report(Progress(stage="convert", done_bytes=0, total_bytes=size))
    convert_gguf(source, folder)
    report(Progress(stage="convert", done_bytes=size, total_bytes=size))

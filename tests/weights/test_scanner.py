"""Tests of the shared scan of the model folders and its time limit."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmx_lab.weights.locations import folder_locations
from lmx_lab.weights.scanner import Listing, Scanner
from tests.support.models import write_tiny_llama

pytestmark = pytest.mark.slow
WAIT_S = 30.0
AT_ONCE = 40


class Disk:
    """A folder with models that can stop responding."""

    def __init__(self, folder):
        self.folder = folder
        self.answers = threading.Event()
        self.answers.set()
        self.requested = threading.Semaphore(0)
        self.scans = 0
        self.failure = None

    def roots(self):
        self.scans += 1
        yield self.folder, self._places()

    def _places(self):
        if self.failure is not None:
            raise self.failure
        for place in folder_locations(self.folder, "folder"):
            yield place
            self.requested.release()
            self.answers.wait(WAIT_S)


@pytest.fixture
def disk(tmp_path, smollm2):
    for name in ("one", "two"):
        write_tiny_llama(tmp_path / name, smollm2.path, seed=0)
    disk = Disk(tmp_path)
    yield disk
    disk.answers.set()


def ids(listing):
    return [entry.id for entry in listing.entries]


def test_concurrent_callers_share_scans_that_begin_after_their_calls(disk, smollm2):
    scanner = Scanner(disk.roots, limit_s=WAIT_S)
    disk.answers.clear()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        first = pool.submit(scanner.listing)
        assert disk.requested.acquire(timeout=WAIT_S)
        write_tiny_llama(disk.folder / "late", smollm2.path, seed=0)
        others = [pool.submit(scanner.listing) for _ in range(AT_ONCE - 1)]
        assert not any(other.done() for other in [first, *others])
        disk.answers.set()
        assert ids(first.result(WAIT_S))[-2:] == ["one", "two"]
        assert {tuple(ids(other.result(WAIT_S))) for other in others} == {("late", "one", "two")}
    # Some of the others may have called after the second scan began.
    assert disk.scans <= 3


def test_a_disk_that_does_not_respond_gives_the_last_list_and_the_name_of_the_folder(disk):
    scanner = Scanner(disk.roots, limit_s=0.2)
    assert scanner.listing() == Listing(entries=scanner.listing().entries)
    threads = threading.active_count()
    disk.answers.clear()
    for _ in range(AT_ONCE):
        listing = scanner.listing()
        assert (ids(listing), str(disk.folder) in str(listing.problem)) == (["one", "two"], True)
    assert threading.active_count() <= threads + 1
    disk.answers.set()
    while scanner.listing().problem is not None:
        pass
    assert ids(scanner.listing()) == ["one", "two"]


def test_a_first_scan_that_takes_too_long_gives_the_models_found_so_far(disk):
    disk.answers.clear()
    listing = Scanner(disk.roots, limit_s=0.2).listing()
    assert (ids(listing), "may be incomplete" in str(listing.problem)) == (["one"], True)


def test_an_error_is_raised_in_every_caller_and_the_next_call_scans_again(disk):
    scanner = Scanner(disk.roots, limit_s=WAIT_S)
    disk.failure = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        scanner.listing()
    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(scanner.alisting())
    disk.failure = None
    assert ids(asyncio.run(scanner.alisting())) == ["one", "two"]


@pytest.mark.anyio
async def test_a_cancelled_caller_does_not_cancel_the_scan_of_the_others(disk):
    scanner = Scanner(disk.roots, limit_s=WAIT_S)
    disk.answers.clear()
    asking = [asyncio.create_task(scanner.alisting()) for _ in range(4)]
    assert await asyncio.to_thread(disk.requested.acquire, timeout=WAIT_S)
    for task in asking[::2]:
        task.cancel()
    disk.answers.set()
    done = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(each, Listing) for each in done] == [False, True, False, True]

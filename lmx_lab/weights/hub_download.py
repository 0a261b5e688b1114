"""Download a model from the hub into its usual cache: its safetensors, or one of its GGUF models.

This is the only module that imports huggingface_hub.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, hf_hub_url, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session, hf_raise_for_status
from huggingface_hub.utils.tqdm import tqdm

from lmx_lab.errors import DownloadError, ModelNotFoundError, UnusableModelError, first_names
from lmx_lab.weights.gguf.header import read_header
from lmx_lab.weights.gguf.names import default_label, find_label, group_files, is_gguf, label_models
from lmx_lab.weights.hub import DOCUMENTATION, ExpectedFile, is_unverified, mark_unverified, repo_folder, verify_files
from lmx_lab.weights.store import FULL, Progress, ProgressCallback, folder_bytes, full_disk_error, require_disk

# Weights, JSON and vocabularies; no files that can contain code, such as .py, or pickles in .bin or .pt.
DOWNLOADED = (
    "model*.safetensors", "*.json", "*.jinja", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model",
    "tiktoken.model", "*.tiktoken", "vocab.txt", "merges.txt", *DOCUMENTATION,
)  # fmt: skip
DESCRIBING = frozenset({
    "config.json", "model.safetensors.index.json", "modules.json", "sentence_bert_config.json",
    "config_sentence_transformers.json",
})  # fmt: skip
"""Small files from which properties of a model are read."""
FIRST_BYTES, MAX_HEADER_BYTES = 2**18, 100 * 2**20
"""Number of bytes that are read of a file at first, and at most. The header of a GGUF file contains the vocabulary."""
MODULE_FILE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The files of a repository to fetch."""

    sizes: Mapping[str, int]
    """Size of each file in bytes, by its path in the repository."""
    first: str | None
    """The GGUF file that is the model, or its first part; None if the model is the whole folder."""


def endpoint() -> str:
    """Return the address of the hub, according to its environment variables."""
    return HfApi().endpoint


def download(
    repo_id: str,
    cache: Path,
    reserve_bytes: int,
    progress: ProgressCallback,
    *,
    choice: str | None = None,
    endpoint: str | None = None,
) -> Path:
    """Download the newest snapshot of a model into the cache. Files that are already there are not fetched again.

    Args:
        repo_id: ``org/name``.
        cache: The hub cache.
        reserve_bytes: Disk space to leave free.
        progress: Called on this thread.
        choice: A GGUF model of the repository, by its quantization or its file's name. If None, safetensors are used
            if there are any, otherwise the GGUF model that ``default_label`` prefers.
        endpoint: Address of a hub other than the default one.

    Returns:
        The folder of the snapshot, or the first GGUF file in it.

    Raises:
        ModelNotFoundError: the hub has no such model, or requires a login or the owner's permission; or the model
            exists in other quantizations, which the message lists.
        UnusableModelError: the repository has neither safetensors nor GGUF weights.
        StorageFullError: the disk is too small, or it became full.
        DownloadError: the hub cannot be reached or failed, or a file is not the one that it announced.
    """
    commit, expected, selection = _choose_files(repo_id, cache, choice, endpoint)
    repo = repo_folder(cache, repo_id)
    snapshot = repo / "snapshots" / commit
    _remove_incomplete(cache, repo_id)
    # Files that do not have the size on the hub: huggingface_hub considers every existing file complete.
    for name, size in selection.sizes.items():
        path = snapshot / name
        if size and path.exists() and path.stat().st_size != size:
            blob = path.resolve()
            path.unlink()
            if blob.is_relative_to(repo.resolve()):
                blob.unlink(missing_ok=True)
    unverified = [name for name in selection.sizes if (snapshot / name).exists() and is_unverified(snapshot / name)]
    # Files of a killed download: incorrect ones are removed here, and downloaded again below.
    with suppress(DownloadError):
        _verify({snapshot / name: expected[name] for name in unverified}, progress)
    missing = [name for name in selection.sizes if not (snapshot / name).exists()]
    needed = sum(selection.sizes[name] for name in missing)
    require_disk(cache, needed, reserve_bytes, repo_id)
    with _translate_errors(repo_id, cache, needed):
        mark_unverified(snapshot / name for name in missing)
    folder = _fetch(repo_id, cache, list(selection.sizes), needed, progress, endpoint=endpoint)
    _verify({folder / name: expected[name] for name in missing}, progress)
    return folder / selection.first if selection.first else folder


def _choose_files(
    repo_id: str, folder: Path, choice: str | None, endpoint: str | None
) -> tuple[str, dict[str, ExpectedFile], Selection]:
    """Return the newest commit of a repository, its files as the hub describes them, and those of the chosen model."""
    with _translate_errors(repo_id, folder):
        info = HfApi(endpoint=endpoint).model_info(repo_id, files_metadata=True, timeout=15.0)
    expected: dict[str, ExpectedFile] = {}
    for file in info.siblings or ():
        kind, digest = ("git", file.blob_id) if file.lfs is None else ("sha256", file.lfs.sha256)
        size = (file.lfs.size if file.lfs is not None else None) or file.size or 0
        expected[file.rfilename] = ExpectedFile(size_bytes=size, algorithm=kind, digest=digest or None)
    files = {name: file.size_bytes for name, file in expected.items()}
    in_folder = {
        name: size for name, size in files.items() if MODULE_FILE.fullmatch(name) or _is_in_root(name, DOWNLOADED)
    }
    commit = str(info.sha)
    if choice is None and any(name.endswith(".safetensors") for name in in_folder):
        return commit, expected, Selection(sizes=in_folder, first=None)
    groups = group_files(filter(_is_listable, files))
    models = label_models(model for model in groups if files.keys() >= set(model.names))
    if not models:
        kinds = sorted({Path(name).suffix for name in files if Path(name).suffix})
        raise UnusableModelError(
            f"{repo_id} has no {'' if choice else 'model*.safetensors and no '}.gguf model, only "
            f"{', '.join(kinds) or 'no files'}; look for a version of it in MLX, safetensors or GGUF format"
        )
    label = default_label(models, files) if choice is None else find_label(models, choice)
    if label is None:
        shown = first_names(list(models), 30)
        raise ModelNotFoundError(
            f"{repo_id} has no {choice!r:.80}; available are: {shown}. Fetch one with `lmx-lab pull "
            f"{repo_id}:{default_label(models, files)}`",
            param="model",
        )
    names = models[label].names
    documentation = [name for name in files if _is_in_root(name, DOCUMENTATION)]
    sizes = {name: files[name] for name in (*names, *documentation)}
    return commit, expected, Selection(sizes=sizes, first=names[0])


def fetch_headers(repo_id: str, folder: Path, *, choice: str | None = None, endpoint: str | None = None) -> Path:
    """Write the files of a model into a folder, with their sizes but only with the content that describes the model:
    its configuration and the headers of its weights. The rest of each file is a hole, which uses no disk space.

    Args:
        repo_id, choice, endpoint: See ``download``.
        folder: An existing folder.

    Returns:
        The folder, or the first GGUF file in it.

    Raises:
        ModelNotFoundError, UnusableModelError, DownloadError: see ``download``.
    """
    commit, _, selection = _choose_files(repo_id, folder, choice, endpoint)

    def write(name: str) -> None:
        path, size = folder / name, selection.sizes[name]
        path.parent.mkdir(parents=True, exist_ok=True)

        def write_start(count: int) -> bytes:
            content = _read_start(hf_hub_url(repo_id, name, revision=commit, endpoint=endpoint), min(count, size))
            path.write_bytes(content)
            os.truncate(path, size)
            return content

        if is_gguf(name):
            count = FIRST_BYTES
            write_start(count)
            while count < min(size, MAX_HEADER_BYTES) and not _has_whole_header(path, count):
                count *= 4
                write_start(count)
        elif name.endswith(".safetensors"):
            length = 8 + int.from_bytes(write_start(FIRST_BYTES)[:8], "little")
            # The size of the header is checked when it is read.
            if FIRST_BYTES < length <= min(size, MAX_HEADER_BYTES):
                write_start(length)
        elif Path(name).name in DESCRIBING or name == "README.md":
            write_start(MAX_HEADER_BYTES if name != "README.md" else FIRST_BYTES)
        else:
            path.touch()
            os.truncate(path, size)

    with _translate_errors(repo_id, folder), ThreadPoolExecutor(8, thread_name_prefix="lmx-lab-hub") as pool:
        list(pool.map(write, selection.sizes))
    return folder / selection.first if selection.first else folder


def _has_whole_header(path: Path, count: int) -> bool:
    """Return whether the first ``count`` bytes of a GGUF file contain its header."""
    try:
        return read_header(path).data_offset <= count
    except UnusableModelError:
        return False


def _read_start(url: str, count: int) -> bytes:
    """Return the first bytes of a file on the hub, also if the hub ignores the requested range."""
    if count == 0:
        return b""
    headers = build_hf_headers() | {"Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    content = b""
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=15.0) as response:
        hf_raise_for_status(response)
        for piece in response.iter_bytes():
            content += piece
            if len(content) >= count:
                break
    if len(content) < count:
        raise EOFError(f"{url.rpartition('/')[2]} ended after {len(content)} of {count} bytes")
    return content[:count]


def _verify(files: Mapping[Path, ExpectedFile], progress: ProgressCallback) -> None:
    total = sum(expected.size_bytes for expected in files.values())
    verify_files(files, lambda done: progress(Progress(stage="verify", done_bytes=done, total_bytes=total)))


def _fetch(
    repo_id: str, cache: Path, names: Sequence[str], needed: int, progress: ProgressCallback, *, endpoint: str | None
) -> Path:
    """Download files, of which ``needed`` bytes are missing; return the folder of the snapshot."""
    # The command line looks for a thread of this name at exit.
    pool = ThreadPoolExecutor(1, thread_name_prefix="lmx-lab-hub")
    try:
        future = pool.submit(
            snapshot_download,
            repo_id,
            cache_dir=cache,
            endpoint=endpoint,
            allow_patterns=[glob.escape(name) for name in names],
            tqdm_class=_Silent,
        )
        blobs = repo_folder(cache, repo_id) / "blobs"
        before = folder_bytes(blobs)
        while not future.done():
            done = min(max(folder_bytes(blobs) - before, 0), needed)
            progress(Progress(stage="download", done_bytes=done, total_bytes=needed))
            wait([future], timeout=0.2)
    finally:
        # Not waited for, so that an interrupt takes effect immediately. Complete files are kept for the next download.
        pool.shutdown(wait=False, cancel_futures=True)
    with _translate_errors(repo_id, cache, needed):
        return Path(str(future.result()))


class _Silent(tqdm):
    """A progress bar that is never shown: progress is measured on the disk."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]


def _remove_incomplete(cache: Path, repo_id: str) -> None:
    """Remove incomplete files of killed or interrupted downloads, which are never continued.

    A download that is running, in this process or another, holds the lock of its file.
    """
    repo = repo_folder(cache, repo_id)
    for part in (repo / "blobs").glob("*.incomplete"):
        with suppress(Timeout, OSError), FileLock(cache / ".locks" / repo.name / f"{part.name.split('.')[0]}.lock", 0):
            part.unlink(missing_ok=True)


def _is_in_root(name: str, patterns: Sequence[str]) -> bool:
    return "/" not in name and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _is_listable(name: str) -> bool:
    """Whether the catalog would find the file: in the root of the repository or in a folder of it."""
    parts = name.split("/")
    return len(parts) <= 2 and not any(part.startswith(".") or not part.isprintable() for part in parts)


@contextmanager
def _translate_errors(repo_id: str, cache: Path, needed: int = 0) -> Iterator[None]:
    try:
        yield
    # The errors of the underlying HTTP library are not of classes that huggingface_hub exports.
    except Exception as exc:
        if isinstance(exc, GatedRepoError):
            raise ModelNotFoundError(
                f"{repo_id} requires you to accept its terms on the hub: do so, then log in with `hf auth login`"
            ) from exc
        if isinstance(exc, (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError)):
            raise ModelNotFoundError(
                f"the hub has no model {repo_id}, or only for users who are logged in (`hf auth login`)"
            ) from exc
        if isinstance(exc, OSError) and exc.errno == errno.EFBIG:
            raise UnusableModelError(
                f"{repo_id} has files that are too large for this system, according to the hub; use another model"
            ) from exc
        if isinstance(exc, OSError) and exc.errno in FULL:
            error = full_disk_error(f"{repo_id} was downloaded", cache, needed_bytes=needed)
            _remove_incomplete(cache, repo_id)
            raise error from exc
        reason = next(iter(str(exc).splitlines()), "")[:300]
        raise DownloadError(
            f"{repo_id} could not be downloaded from the hub: {type(exc).__name__}: {reason}. Check the network (and "
            "HF_ENDPOINT, HF_HUB_OFFLINE), then try again"
        ) from exc

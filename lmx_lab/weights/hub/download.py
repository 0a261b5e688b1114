"""Download a model from the hub into the hub's usual cache: its safetensors, or one of its GGUF models.

The only importer of huggingface_hub.
"""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.tqdm import tqdm

from lmx_lab.errors import DownloadError, LabError, ModelNotFoundError, StorageFullError, UnusableModelError
from lmx_lab.weights.gguf.names import chosen, default, grouped, labelled
from lmx_lab.weights.hub.cache import repo_folder
from lmx_lab.weights.hub.verify import FOR_PEOPLE, Announced, is_unverified, note, require_announced
from lmx_lab.weights.store import FULL, Progress, ProgressCallback, folder_bytes, free_in_words, require_disk

# Weights, JSON and vocabularies: nothing that could hold code (.py, pickles in .bin or .pt).
WANTED = (
    "model*.safetensors", "*.json", "*.jinja", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model",
    "tiktoken.model", "*.tiktoken", "vocab.txt", "merges.txt", *FOR_PEOPLE,
)  # fmt: skip
MODULE_FILE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
ASK_TIMEOUT_S = 15.0
POLL_S = 0.2
NAMED_IN_ERRORS = 30
THREAD_NAME = "lmx-lab-hub"
"""The command line looks for it when it ends."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to fetch of a repository."""

    sizes: Mapping[str, int]
    """Bytes of each file, by its path in the repository."""
    first: str | None
    """The GGUF file that is the model; ``None`` where the whole folder is."""


def endpoint() -> str:
    """The address of the hub that the environment names."""
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
    """Bring the newest snapshot of a model into the cache; what is there already is not fetched again.

    Args:
        repo_id: ``org/name``.
        cache: The hub cache.
        reserve_bytes: Free disk to leave.
        progress: Called on this thread.
        choice: A GGUF model of the repository, by its quantization or its file's name. Without it safetensors are
            taken if there are any, else the GGUF model that ``gguf_names.default`` prefers.
        endpoint: Another hub than the one that the environment names.

    Returns:
        The folder of the snapshot, or the (first) GGUF file in it.

    Raises:
        ModelNotFoundError: the hub has no such model, or only for those who have a token and its owner's leave; or the
            model comes in other quantizations, which the message names.
        UnusableModelError: it has neither safetensors nor GGUF weights.
        StorageFullError: before the first byte if its size is known to be too much, else when the disk fills up.
        DownloadError: the hub cannot be reached or failed, or what came is not what it announced.
    """
    with _translated(repo_id, cache):
        info = HfApi(endpoint=endpoint).model_info(repo_id, files_metadata=True, timeout=ASK_TIMEOUT_S)
    said = {file.rfilename: _announced(file) for file in info.siblings or ()}
    wanted = _wanted(repo_id, {name: content.size_bytes for name, content in said.items()}, choice)
    snapshot = repo_folder(cache, repo_id) / "snapshots" / str(info.sha)
    _drop_abandoned(cache, repo_id)
    _drop_torn(repo_folder(cache, repo_id), snapshot, wanted.sizes)
    left = [name for name in wanted.sizes if (snapshot / name).exists() and is_unverified(snapshot / name)]
    # What is wrong of what a killed download has left is removed by this, and fetched again.
    with suppress(DownloadError):
        _verify({snapshot / name: said[name] for name in left}, progress)
    missing = [name for name in wanted.sizes if not (snapshot / name).exists()]
    needed = sum(wanted.sizes[name] for name in missing)
    require_disk(cache, needed, reserve_bytes, repo_id)
    with _translated(repo_id, cache, needed):
        note(snapshot / name for name in missing)
    folder = _fetched(repo_id, cache, list(wanted.sizes), needed, progress, endpoint=endpoint)
    _verify({folder / name: said[name] for name in missing}, progress)
    return folder / wanted.first if wanted.first else folder


def _verify(files: Mapping[Path, Announced], progress: ProgressCallback) -> None:
    total = sum(expected.size_bytes for expected in files.values())
    require_announced(files, lambda done: progress(Progress(stage="verify", done_bytes=done, total_bytes=total)))


def _fetched(
    repo_id: str, cache: Path, names: Sequence[str], needed: int, progress: ProgressCallback, *, endpoint: str | None
) -> Path:
    """The folder of the snapshot with these files; ``needed`` bytes of them are not there yet."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)
    try:
        future = pool.submit(
            snapshot_download,
            repo_id,
            cache_dir=cache,
            endpoint=endpoint,
            allow_patterns=[glob.escape(name) for name in names],
            tqdm_class=_Silent,
        )
        _watch(future, repo_folder(cache, repo_id) / "blobs", needed, progress)
    finally:
        # Not waited for: an interrupt shall be heard now. Whole files are kept for the next time.
        pool.shutdown(wait=False, cancel_futures=True)
    with _translated(repo_id, cache, needed):
        return Path(str(future.result()))


class _Silent(tqdm):
    """No bar on standard error: the progress is read off the disk."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": True})  # type: ignore[no-untyped-call]


def _announced(file: RepoSibling) -> Announced:
    size = file.size or 0
    if file.lfs is not None:
        return Announced(size_bytes=file.lfs.size or size, algorithm="sha256", digest=file.lfs.sha256 or None)
    return Announced(size_bytes=size, algorithm="git", digest=file.blob_id or None)


def _wanted(repo_id: str, files: Mapping[str, int], choice: str | None) -> Wanted:
    """What to fetch of a repository with these files."""
    folder = {name: size for name, size in files.items() if _is_wanted(name)}
    if choice is None and any(name.endswith(".safetensors") for name in folder):
        return Wanted(sizes=folder, first=None)
    models = labelled(model for model in grouped(filter(_is_listed, files)) if files.keys() >= set(model.names))
    if not models:
        kinds = sorted({Path(name).suffix for name in files if Path(name).suffix})
        raise UnusableModelError(
            f"{repo_id} has no {'' if choice else 'model*.safetensors and no '}model in .gguf, only "
            f"{', '.join(kinds) or 'nothing'}; look for a version of it in MLX, safetensors or GGUF format"
        )
    label = default(models, files) if choice is None else chosen(models, choice)
    if label is None:
        shown = ", ".join(list(models)[:NAMED_IN_ERRORS]) + (", …" if len(models) > NAMED_IN_ERRORS else "")
        raise ModelNotFoundError(
            f"{repo_id} has no {choice!r:.80}; it has {shown}. Fetch one with `lmx-lab pull "
            f"{repo_id}:{default(models, files)}`",
            param="model",
        )
    names = models[label].names
    beside = [name for name in files if _is_in_root(name, FOR_PEOPLE)]
    return Wanted(sizes={name: files[name] for name in (*names, *beside)}, first=names[0])


def _drop_abandoned(cache: Path, repo_id: str) -> None:
    """Remove the parts of files that a killed or interrupted download has left: nothing ever goes on from them.

    Whoever is at one, in this process or another, holds its lock.
    """
    repo = repo_folder(cache, repo_id)
    for part in (repo / "blobs").glob("*.incomplete"):
        with suppress(Timeout, OSError), FileLock(cache / ".locks" / repo.name / f"{part.name.split('.')[0]}.lock", 0):
            part.unlink(missing_ok=True)


def _drop_torn(repo: Path, snapshot: Path, sizes: Mapping[str, int]) -> None:
    """Remove files of another length than the hub's: huggingface_hub takes what has the right name for whole."""
    for name, size in sizes.items():
        path = snapshot / name
        if size and path.exists() and path.stat().st_size != size:
            blob = path.resolve()
            path.unlink()
            if blob.is_relative_to(repo.resolve()):
                blob.unlink(missing_ok=True)


def _is_wanted(name: str) -> bool:
    in_module = MODULE_FILE.fullmatch(name) is not None
    return in_module or _is_in_root(name, WANTED)


def _is_in_root(name: str, patterns: Sequence[str]) -> bool:
    return "/" not in name and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _is_listed(name: str) -> bool:
    """Whether the catalog would see the file: in the root of the repository or in a folder of it."""
    parts = name.split("/")
    return len(parts) <= 2 and not any(part.startswith(".") or not part.isprintable() for part in parts)


def _watch(future: Future[Any], blobs: Path, needed: int, progress: ProgressCallback) -> None:
    before = folder_bytes(blobs)
    while not future.done():
        done = min(max(folder_bytes(blobs) - before, 0), needed)
        progress(Progress(stage="download", done_bytes=done, total_bytes=needed))
        wait([future], timeout=POLL_S)


@contextmanager
def _translated(repo_id: str, cache: Path, needed: int = 0) -> Iterator[None]:
    try:
        yield
    # The errors of the HTTP library below are of no class that huggingface_hub exports.
    except Exception as exc:
        raise _translate(repo_id, cache, needed, exc) from exc


def _translate(repo_id: str, cache: Path, needed: int, exc: Exception) -> LabError:
    if isinstance(exc, GatedRepoError):
        return ModelNotFoundError(
            f"{repo_id} is given only to those who accept its terms on the hub: do so, then log in with `hf auth login`"
        )
    if isinstance(exc, (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError)):
        return ModelNotFoundError(f"the hub has no model {repo_id} (or only for those who log in with `hf auth login`)")
    if isinstance(exc, OSError) and exc.errno in FULL:
        free = free_in_words(cache)
        _drop_abandoned(cache, repo_id)
        return StorageFullError(
            f"the disk filled up while {repo_id} was fetched: {needed} bytes were to come, {free}. Free some, then try "
            "again"
        )
    reason = next(iter(str(exc).splitlines()), "")[:300]
    return DownloadError(
        f"{repo_id} could not be downloaded from the hub: {type(exc).__name__}: {reason}. Check the network (and "
        "HF_ENDPOINT, HF_HUB_OFFLINE), then try again"
    )

"""Open the files of a model safely, and run disk work on daemon threads.

Only regular files are opened, never in a way that blocks, and no file that is larger than files of its kind. Opening a
FIFO blocks until it has a writer, and reading a link to ``/dev/zero`` never ends. MLX and tokenizers open files while
they hold Python's lock, so one such file would stop the whole process. ``check_files`` checks in advance what they
open.
"""

from __future__ import annotations

import io
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from lmx_lab.errors import UnusableModelError

T = TypeVar("T")
MIB = 2**20
LIMITS = (
    # The largest known index: 25 MB for 200,000 tensors.
    ("*.safetensors.index.json", 64 * MIB),
    # Contains a chat template, or an entry per layer or added token: 1.2 MB in tokenizer_config.json of Gemma 3.
    ("config.json", 16 * MIB),
    ("*_config.json", 16 * MIB),
    ("config_*.json", 16 * MIB),
    ("modules.json", MIB),
    ("special_tokens_map.json", 16 * MIB),
    ("added_tokens.json", 16 * MIB),
    ("chat_template*.json", 4 * MIB),
    ("*.jinja", 4 * MIB),
    # Vocabularies: tokenizer.json has 35 MB for 260,000 tokens.
    ("*.json", 128 * MIB),
    ("*.model", 128 * MIB),
    ("*.tiktoken", 128 * MIB),
    ("*.txt", 128 * MIB),
)
"""Largest size in bytes of a file, by its name; the first matching pattern applies."""
SPECIAL = {
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}


def size_limit(name: str) -> int | None:
    """Return the largest size in bytes of a model's file of this name; None for weights and files that are not read."""
    return next((limit for pattern, limit in LIMITS if fnmatchcase(name, pattern)), None)


def open_regular(path: Path, *, buffer_bytes: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """Open a regular file for reading; symbolic links are followed. Other files are rejected without blocking.

    The size limit is compared with the length of the file, not with what is read later; see ``read_regular``.

    Raises:
        UnusableModelError: it is a FIFO, a socket, a device or a folder, or larger than files of its kind may be.
        OSError: it does not exist or cannot be opened.
    """
    # Checked before opening, because opening a device can have effects.
    _check(path, os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        # Checked again, because the file may have been replaced in between.
        _check(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return io.BufferedReader(io.FileIO(descriptor), buffer_bytes)


def read_regular(path: Path) -> bytes:
    """Read the whole content of a small file, whose name has a size limit.

    Raises:
        UnusableModelError: as ``open_regular``, or the file has grown beyond its limit since it was opened.
        OSError: as ``open_regular``.
    """
    limit = size_limit(path.name)
    assert limit is not None, f"there is no size limit for files named {path.name}"
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise _too_large(path, len(data), limit)
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that contains a JSON object.

    Raises:
        UnusableModelError: the file does not exist, is too large, or does not contain a JSON object.
    """
    try:
        value = json.loads(read_regular(path))
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise UnusableModelError(
            f"{path.parent} contains no model: there is no {path.name}; fetch the model, or name another folder"
        ) from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise UnusableModelError(f"{path} cannot be read as JSON: {exc}; fetch the model again") from exc
    if not isinstance(value, dict):
        raise UnusableModelError(f"{path} does not contain a JSON object; fetch the model again")
    return value


def list_folder(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted by name; none if it does not exist or cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def check_files(folder: Path) -> None:
    """Check that all files that a load can read, including those in subfolders, are regular and within their limits.

    A program that can write to the folder can still replace a file between this check and the load.

    Raises:
        UnusableModelError: a file is not; the message names the file and the rule.
    """
    for path in _files(folder):
        # Files that are missing or cannot be opened are reported by the code that reads them.
        with suppress(OSError):
            if is_read(path.name):
                # Opened as well: if the disk hangs, this waits without Python's lock, while MLX would hold it.
                open_regular(path).close()
            else:
                _check(path, os.stat(path))


def is_read(name: str) -> bool:
    """Whether a load can read the file of this name."""
    # Weights can have any length. Only their header is read into memory, and it has its own limit.
    return size_limit(name) is not None or name.endswith(".safetensors")


def _files(folder: Path) -> Iterator[Path]:
    """Return the files of the folder and of its subfolders; modules of encoders have their own subfolders."""
    for path in list_folder(folder):
        if path.name.startswith("."):
            continue
        if is_read(path.name) or not os.path.isdir(path):
            yield path
        else:
            yield from (it for it in list_folder(path) if is_read(it.name) and not it.name.startswith("."))


def _check(path: Path, known: os.stat_result) -> None:
    kind = stat.S_IFMT(known.st_mode)
    if kind != stat.S_IFREG:
        link = " behind a link" if path.is_symlink() else ""
        raise UnusableModelError(
            f"{path} is {SPECIAL.get(kind, 'not a regular file')}{link}; a model's files must be regular files: "
            "remove it, or fetch the model again",
            param="model",
        )
    limit = size_limit(path.name)
    if limit is not None and known.st_size > limit:
        raise _too_large(path, known.st_size, limit)


def _too_large(path: Path, size: int, limit: int) -> UnusableModelError:
    return UnusableModelError(
        f"{path} has {size} bytes; the limit for files of this name is {limit}: fetch the model again", param="model"
    )


# Threads


def start_in_thread(work: Callable[[], T], *, name: str) -> Future[T]:
    """Start work on a new daemon thread, and return its future, which cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def in_thread(work: Callable[[], T], *, name: str = "lmx-lab-disk") -> T:
    """Run blocking work on a daemon thread and return its result.

    ``asyncio.to_thread`` would take a thread of the shared pool, which the process waits for at exit; a disk that does
    not respond must not delay other work or the exit. Cancelling does not stop the thread.
    """
    # This import takes 70 ms, and the completion of model names, for example, does not need it.
    import asyncio

    return await asyncio.wrap_future(start_in_thread(work, name=name))

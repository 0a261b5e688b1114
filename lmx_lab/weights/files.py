"""Open a model's files: regular files only, without blocking, and no larger than files of their kind are.

Opening a FIFO blocks until it has a writer, and reading a link to ``/dev/zero`` never ends. MLX and tokenizers open
files with Python's lock held, so that one such file stops the whole process. What they open is therefore checked first,
with ``check_files``.
"""

from __future__ import annotations

import asyncio
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
    # The largest known: 25 MB for 200,000 tensors.
    ("*.safetensors.index.json", 64 * MIB),
    # A chat template, or a row for each layer or added token: 1.2 MB in tokenizer_config.json of Gemma 3.
    ("config.json", 16 * MIB),
    ("*_config.json", 16 * MIB),
    ("config_*.json", 16 * MIB),
    ("modules.json", MIB),
    ("special_tokens_map.json", 16 * MIB),
    ("added_tokens.json", 16 * MIB),
    ("chat_template*.json", 4 * MIB),
    ("*.jinja", 4 * MIB),
    # Vocabularies: 35 MB in tokenizer.json for 260,000 tokens.
    ("*.json", 128 * MIB),
    ("*.model", 128 * MIB),
    ("*.tiktoken", 128 * MIB),
    ("*.txt", 128 * MIB),
)
"""The most bytes that a file may have, by its name; the first pattern that fits counts."""
WEIGHTS = "*.safetensors"
"""Of any length: only their header is read into memory, and that has a limit of its own."""
SPECIAL = {
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a folder",
}
FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))


def size_limit(name: str) -> int | None:
    """The largest size in bytes of a model's file of this name; ``None`` for weights and files that are not read."""
    return next((limit for pattern, limit in LIMITS if fnmatchcase(name, pattern)), None)


def open_regular(path: Path, *, buffer_bytes: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """Open a regular file for reading, also through symbolic links. Anything else is refused without blocking.

    The limit for the file's name is compared with its length, not with what is read later: see ``read_regular``.

    Raises:
        UnusableModelError: it is a FIFO, a socket, a device or a folder, or larger than files of its kind may be.
        OSError: it is not there, or cannot be opened.
    """
    # Before it is opened: to open a device can do something to it.
    _check(path, os.stat(path))
    descriptor = os.open(path, FLAGS)
    try:
        # Again: it may have been replaced in between.
        _check(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return io.BufferedReader(io.FileIO(descriptor), buffer_bytes)


def read_regular(path: Path) -> bytes:
    """The whole content of a small file, whose name has a limit.

    Raises: as ``open_regular``; also where the file has grown past its limit since it was opened.
    """
    limit = size_limit(path.name)
    assert limit is not None, f"there is no limit for files named {path.name}"
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise _too_large(path, len(data), limit)
    return data


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UnusableModelError: the file is not there, too large, or holds no JSON object.
    """
    try:
        value = json.loads(read_regular(path))
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise UnusableModelError(f"{path.parent} holds no model: there is no {path.name}") from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise UnusableModelError(f"{path} cannot be read as JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise UnusableModelError(f"{path} holds no JSON object")
    return value


def check_files(folder: Path) -> None:
    """Check that all files of a model's folder and its subfolders that a load can read are regular and within limits.

    A program that can write to the folder can still replace a file between this check and the load.

    Raises:
        UnusableModelError: a file is not; the message names it and the rule.
    """
    for path in _files(folder):
        # The reader reports files that are missing or cannot be opened.
        with suppress(OSError):
            if is_read(path.name):
                # Opened as well: if the disk hangs, this waits without Python's lock; MLX would wait with it.
                open_regular(path).close()
            else:
                _check(path, os.stat(path))


def is_read(name: str) -> bool:
    """Whether a load can read the file of this name."""
    return size_limit(name) is not None or fnmatchcase(name, WEIGHTS)


def _files(folder: Path) -> Iterator[Path]:
    """Directly in the folder, and in each folder there: modules of encoders have one of their own."""
    for path in _listed(folder):
        if is_read(path.name) or not os.path.isdir(path):
            yield path
        else:
            yield from (below for below in _listed(path) if is_read(below.name))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _check(path: Path, known: os.stat_result) -> None:
    kind = stat.S_IFMT(known.st_mode)
    if kind != stat.S_IFREG:
        link = " behind a link" if path.is_symlink() else ""
        raise UnusableModelError(
            f"{path} is {SPECIAL.get(kind, 'no regular file')}{link}; a model's files must be regular files: remove "
            "it, or fetch the model again",
            param="model",
        )
    limit = size_limit(path.name)
    if limit is not None and known.st_size > limit:
        raise _too_large(path, known.st_size, limit)


def _too_large(path: Path, size: int, limit: int) -> UnusableModelError:
    return UnusableModelError(
        f"{path} has {size} bytes; files of this name may have {limit}: fetch the model again", param="model"
    )


# Threads


def start_in_thread(work: Callable[[], T], *, name: str) -> Future[T]:
    """Begin the work on a daemon thread of its own. The future cannot be cancelled."""
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
    """The result of blocking work. Unlike ``asyncio.to_thread`` it takes no thread of the shared pool, for which the
    process would wait when it ends; cancelling leaves the thread alone."""
    return await asyncio.wrap_future(start_in_thread(work, name=name))

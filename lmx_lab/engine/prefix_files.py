"""Store key-value caches of token prefixes as files in one folder, which several models and processes may share.

A file is in the safetensors format: the token ids, the tensors of the engine, and a checksum. Files are written under a
temporary name and renamed, so other processes see only complete ones. Their names contain the key of the model and a
digest of the tokens. The modification time is the time of the last use.

A file may contain the state of the last tokens only, and refer to another file, its *parent*, for those before. Turns
of a session therefore do not write their history again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmx_lab.engine.requests import SHARED
from lmx_lab.errors import UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.files import open_regular, start_in_thread
from lmx_lab.weights.fingerprint import content_digest, marks_digest, require_unchanged
from lmx_lab.weights.safetensors_header import DTYPE_BITS

log = logging.getLogger(__name__)
Tokens = NDArray[np.int32]
FORMAT = "lmx-lab prefix cache 2"
NAME = re.compile(r"([0-9a-f]{24})-[0-9a-f]{32}\.safetensors")
TEMPORARY = re.compile(r"[0-9a-f]{24}-[0-9a-f]{32}\.safetensors\.[0-9a-f]{8}\.tmp")
LEFT_OVER_S = 600.0
"""Age after which a temporary file is considered to be left by a process that ended while writing."""
MAX_DEPTH = 32
"""Maximum number of files of one state. The next turn of a session writes its whole state."""
OPEN_S = 1.0
"""Maximum time that requests wait for the list of files after a load. The first digest of large weights takes more."""
CLOSE_S = 2.0
"""Maximum time that an unload continues to write states."""
MAX_HEADER_BYTES = 2**24
MAX_DIGESTS = 256
DIGESTS_NAME = "digests.json"
"""File with the content digests of models, so that their weights are not read again at every start."""


class DamagedFileError(Exception):
    """A file is truncated, changed, or not part of this cache."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, type and shape of a tensor in a file; types are named as in the safetensors format."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredPrefix:
    """The header of a file."""

    tokens: Tokens
    start: int = 0
    """Number of tokens whose state is in the files of ``parent``."""
    parent: str | None = None
    """Name of the file with the earlier tokens; None if this file has the whole state."""
    scope: str = ""
    """The scope of the request that the state comes from; see ``GenerationRequest.scope``."""
    can_be_trimmed: bool
    """Whether the state can be used for a prompt that shares only a part of its tokens."""
    layout: str
    """How the engine builds its state from the tensors, as JSON."""
    tensors: tuple[TensorSpec, ...]

    def name(self, key: str) -> str:
        """Return the name of the file, which depends on the model and on what the file contains."""
        parts = json.dumps([self.start, self.parent, self.scope, self.can_be_trimmed, self.layout]).encode()
        return f"{key[:24]}-{hashlib.blake2b(parts + self.tokens.tobytes(), digest_size=16).hexdigest()}.safetensors"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class PrefixFiles:
    """The files of one model. May be used by any thread; only ``best``, ``has`` and ``files_of`` do not read the disk.

    Args:
        limit_bytes: Maximum size of all files in the folder, including those of other models.
        reserve_bytes: Disk space that must remain free.
    """

    def __init__(self, folder: Path, *, limit_bytes: int, reserve_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._key = ""
        self.opening: Future[None] | None = None
        """Future of the call of ``open`` that ``start`` begins."""
        self._open_until = 0.0
        self.is_open = False
        """Whether the files have been listed. Stays False if the folder cannot be used."""
        self._stored: Mapping[str, StoredPrefix] = {}
        """By name. Replaced as a whole, so that it can be read without the lock."""
        self._lock = threading.Lock()
        self._reported = ""
        self._rejected: set[tuple[str, int]] = set()
        """Files that are not used, with their modification times, so that each is reported once."""
        self.written_bytes = 0

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """Return the files in the folder of the settings; None without a folder, or if the cache is turned off."""
        if settings.prefix_cache_dir is None or settings.prefix_cache_bytes == 0:
            return None
        return cls(
            settings.prefix_cache_dir,
            limit_bytes=settings.prefix_cache_disk_bytes,
            reserve_bytes=settings.disk_reserve_bytes,
        )

    # Index

    def start(self, entry: ModelEntry, arithmetic: Sequence[str]) -> None:
        """Call ``open`` on another thread."""
        self._open_until = time.perf_counter() + OPEN_S
        self.opening = start_in_thread(lambda: self.open(entry, arithmetic), name="lmx-lab-prefix-index")

    @property
    def wait_s(self) -> float:
        """Maximum time that a request should wait for ``opening``; 0 if the files have been listed."""
        is_done = self.opening is None or self.opening.done()
        return 0.0 if is_done else max(0.0, self._open_until - time.perf_counter())

    def open(self, entry: ModelEntry, arithmetic: Sequence[str]) -> None:
        """List the files of a model. A folder that cannot be used is reported once, and no files are listed.

        Args:
            arithmetic: Other properties that the values depend on, such as the engine version and the weights' type.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            digest = self._content_digest(entry)
            self._key = hashlib.sha256(json.dumps([FORMAT, digest, *arithmetic]).encode()).hexdigest()
            self._scan()
        except (OSError, UnusableModelError) as exc:
            self._report(f"{_reason(exc)}; the cache is in memory only until a server starts with another folder")
        else:
            self.is_open = True

    def best(self, prompt: Tokens, scope: str = "") -> tuple[StoredPrefix | None, int]:
        """Return the file that saves the most tokens of a prompt, and their number. At least one token is not saved.
        Only files of this scope, and shared ones, are considered.

        If several files save as many, the one with the fewest tokens in its parents is returned.
        """
        return best_prefix(sorted(self._stored.values(), key=lambda stored: stored.start), prompt, scope)

    def has(self, tokens: Tokens, scope: str = "") -> bool:
        """Whether a file of this scope has the state after exactly these tokens."""
        return any(each.scope == scope and np.array_equal(each.tokens, tokens) for each in self._stored.values())

    def name_of(self, stored: StoredPrefix) -> str:
        """Return the name of the file."""
        return stored.name(self._key)

    def files_of(self, stored: StoredPrefix) -> list[StoredPrefix]:
        """Return the files of a state, in the order of their tokens; an empty list if one of them no longer exists."""
        known, files = self._stored, [stored]
        while (parent := files[0].parent) is not None:
            if parent not in known or len(files) > MAX_DEPTH:
                return []
            files.insert(0, known[parent])
        return files

    def reject(self, stored: StoredPrefix, reason: Exception) -> None:
        """Remove a file from the index, because it cannot be used, and report it."""
        name = stored.name(self._key)
        changed_ns = 0
        with contextlib.suppress(OSError):
            changed_ns = os.stat(self._folder / name).st_mtime_ns
        self._reject(name, reason, changed_ns)
        with self._lock:
            self._stored = {name: other for name, other in self._stored.items() if other is not stored}

    def _scan(self) -> None:
        """Read the headers of files that are not known yet, for example because another process wrote them."""
        found: dict[str, StoredPrefix] = {}
        for name, changed_ns, _ in self._files():
            if not name.startswith(self._key[:24]) or (name, changed_ns) in self._rejected:
                continue
            known = self._stored.get(name)
            try:
                if known is None:
                    with open_regular(self._folder / name) as file:
                        size = os.fstat(file.fileno()).st_size
                        length = int.from_bytes(file.read(8), "little")
                        head = length.to_bytes(8, "little") + file.read(min(length, MAX_HEADER_BYTES))
                        _, header = _parse_header(head, size)
                        known = self._prefix_of(name, header, file.read(header["tokens"]["data_offsets"][1]))
                found[name] = known
            except FileNotFoundError:
                continue
            except (DamagedFileError, OSError, UnusableModelError) as exc:
                self._reject(name, exc, changed_ns)
        with self._lock:
            self._stored = found

    def _reject(self, name: str, reason: Exception, changed_ns: int) -> None:
        log.warning(
            "%s in the prefix cache is not used, and its tokens are computed again: %s",
            self._folder / name,
            _reason(reason),
        )
        if len(self._rejected) >= 1024:
            self._rejected.clear()
        self._rejected.add((name, changed_ns))

    def _files(self) -> list[tuple[str, int, int]]:
        """Return name, time of last use and size of all files of the cache, and remove temporary files of ended
        processes.
        """
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    known = entry.stat(follow_symlinks=False)
                    if NAME.fullmatch(entry.name):
                        files.append((entry.name, known.st_mtime_ns, known.st_size))
                    elif TEMPORARY.fullmatch(entry.name) and time.time() - known.st_mtime > LEFT_OVER_S:
                        os.unlink(entry.path)
        return files

    def _content_digest(self, entry: ModelEntry) -> str:
        """Return the digest of the model's files, which is computed only if they have changed since it was stored."""
        path, marks = self._folder / DIGESTS_NAME, marks_digest(entry)
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(digest := known[marks], str):
                return digest
        except (OSError, ValueError, KeyError, TypeError):
            known = {}
        digest = content_digest(entry)
        require_unchanged(entry)
        recent = list(known.items())[-MAX_DIGESTS + 1 :] if isinstance(known, dict) else []
        # In a folder that is read-only, the digest is computed again at the next start.
        with contextlib.suppress(OSError):
            temporary = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
            temporary.write_text(json.dumps({**dict(recent), marks: digest}), encoding="utf-8")
            os.replace(temporary, path)
        return digest

    # Reading

    def read(self, stored: StoredPrefix) -> Mapping[str, memoryview]:
        """Return the bytes of the tensors of a file.

        Raises:
            DamagedFileError: the file has changed, or is not readable.
        """
        name = stored.name(self._key)
        try:
            with open_regular(self._folder / name) as file:
                size = os.fstat(file.fileno()).st_size
                data = bytearray(size)
                if file.readinto(data) != size:
                    raise DamagedFileError("it is truncated")
        except (OSError, UnusableModelError) as exc:
            raise DamagedFileError(_reason(exc)) from exc
        header_end, header = _parse_header(whole := memoryview(data), size)
        if whole[-4:] != zlib.crc32(whole[:-4]).to_bytes(4, "little"):
            raise DamagedFileError("its checksum is wrong")
        spans = {name: tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"}
        tensors = {name: whole[header_end + start : header_end + end] for name, (start, end) in spans.items()}
        self._prefix_of(name, header, bytes(tensors["tokens"]))
        return tensors

    def load(self, files: Sequence[StoredPrefix]) -> list[Mapping[str, memoryview]]:
        """Return the tensors of the files of a state, and count this as a use. If a file cannot be read, reject it and
        return an empty list.
        """
        tensors = []
        for stored in files:
            try:
                tensors.append(self.read(stored))
            # An unexpected error, such as too little memory, must not end the requests of the engine.
            except Exception as exc:
                self.reject(stored, exc)
                return []
        self.touch(files)
        return tensors

    def touch(self, files: Sequence[StoredPrefix]) -> None:
        """Count a use of the files of a state. Parents are dropped later than the files that need them."""
        now = time.time_ns()
        for depth, stored in enumerate(reversed(files)):
            with contextlib.suppress(OSError):
                os.utime(self._folder / stored.name(self._key), ns=(now + depth, now + depth))

    def _prefix_of(self, name: str, header: Mapping[str, Any], tokens: bytes) -> StoredPrefix:
        """Return the prefix that the header of the file with this name describes.

        Raises:
            DamagedFileError: the file does not belong to this model, or has another name than its content requires.
        """
        try:
            metadata = header["__metadata__"]
            if metadata["format"] != FORMAT or metadata["key"] != self._key:
                raise DamagedFileError("it was written for another model or by another version")
            names = [each for each in header if each not in ("__metadata__", "tokens", "checksum")]
            stored = StoredPrefix(
                tokens=np.frombuffer(tokens, dtype=np.int32),
                start=int(metadata["start"]),
                parent=metadata["parent"] or None,
                scope=metadata["scope"],
                can_be_trimmed=metadata["can_be_trimmed"] == "1",
                layout=metadata["layout"],
                tensors=tuple(TensorSpec(each, header[each]["dtype"], tuple(header[each]["shape"])) for each in names),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise DamagedFileError(f"its header is invalid ({exc!r})") from exc
        if stored.name(self._key) != name:
            raise DamagedFileError("it was written for another model or prompt")
        return stored

    # Writing

    def write(self, prefix: StoredPrefix, pieces: Iterable[bytes | memoryview]) -> bool:
        """Write a file, and delete the least recently used ones beyond the limit. Return whether it was written.

        Args:
            pieces: The bytes of the tensors in their order, split at any position. If there are fewer bytes than the
                tensors need, the file is discarded. This is how a write is cancelled.
        """
        name = prefix.name(self._key)
        head = _header(prefix, self._key)
        size = len(head) + prefix.tokens.nbytes + prefix.nbytes + 4
        temporary = self._folder / f"{name}.{secrets.token_hex(4)}.tmp"
        try:
            self._make_room(size)
            try:
                with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                    written = checksum = 0
                    for piece in chain([head, prefix.tokens.tobytes()], pieces):
                        checksum = zlib.crc32(piece, checksum)
                        written += file.write(piece)
                    written += file.write(checksum.to_bytes(4, "little"))
                complete = written == size
                if complete:
                    os.replace(temporary, self._folder / name)
            finally:
                temporary.unlink(missing_ok=True)
            if not complete:
                return False
            self.touch(self.files_of(prefix))
            self._scan()
        except OSError as exc:
            self._report(f"{_reason(exc)}; the KV cache is in memory only. Free space, or set another folder or limit")
            return False
        self.written_bytes += size
        self._reported = ""
        return True

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files until a new file of this size is within the limit.

        Raises:
            OSError: the limit or the free disk space is too small.
        """
        if size > self._limit_bytes:
            raise OSError(f"a file of {size} bytes exceeds prefix_cache_disk_bytes ({self._limit_bytes})")
        files = sorted(self._files(), key=lambda file: file[1])
        used = sum(each for _, _, each in files)
        free = shutil.disk_usage(self._folder).free - self._reserve_bytes
        if size > free + used:
            raise OSError(
                f"a file of {size} bytes would leave less than disk_reserve_bytes ({self._reserve_bytes}) free"
            )
        for name, _, each in files:
            if used + size <= self._limit_bytes and size <= free:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / name)
            used, free = used - each, free + each

    def _report(self, problem: str) -> None:
        """Log a problem of the folder, but only once until a file has been written again."""
        # The same problem with files of other sizes is not logged again.
        kind = re.sub(r"\d+", "", problem)
        if kind != self._reported:
            self._reported = kind
            log.warning("problem with the folder of the prefix cache, %s: %s", self._folder, problem)


def _header(prefix: StoredPrefix, key: str) -> bytes:
    """Return the beginning of a safetensors file, up to the bytes of the first tensor."""
    tokens, checksum = TensorSpec("tokens", "I32", (len(prefix.tokens),)), TensorSpec("checksum", "U32", (1,))
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "key": key,
            "start": str(prefix.start),
            "parent": prefix.parent or "",
            "scope": prefix.scope,
            "can_be_trimmed": str(int(prefix.can_be_trimmed)),
            "layout": prefix.layout,
        }
    }
    offset = 0
    for tensor in (tokens, *prefix.tensors, checksum):
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parse_header(data: bytes | memoryview, size: int) -> tuple[int, dict[str, Any]]:
    """Return the offset of the tensors, and the header, in which all offsets fit a file of this size.

    Args:
        data: The beginning of a file, which includes the whole header.
    """
    length = int.from_bytes(data[:8], "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise DamagedFileError("it is truncated, or not a safetensors file")
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
        end = 0
        for tensor in (tensor for name, tensor in header.items() if name != "__metadata__"):
            spec = TensorSpec("", str(tensor["dtype"]), tuple(int(side) for side in tensor["shape"]))
            if list(tensor["data_offsets"]) != [end, end + spec.nbytes] or min(spec.shape, default=0) < 0:
                raise DamagedFileError("the sizes of its tensors do not match their shapes")
            end += spec.nbytes
        if header["checksum"]["data_offsets"][1] != end or header["tokens"]["data_offsets"][0] != 0:
            raise DamagedFileError("it is not a file of the prefix cache")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as exc:
        raise DamagedFileError(f"its header is invalid ({type(exc).__name__})") from exc
    if size != 8 + length + end:
        raise DamagedFileError(f"it has {size} bytes, but {8 + length + end} according to its header")
    return 8 + length, header


def _reason(exc: Exception) -> str:
    return getattr(exc, "strerror", None) or str(exc) or type(exc).__name__


class Prefix(Protocol):
    """A stored state, in memory or in a file."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def scope(self) -> str: ...

    @property
    def can_be_trimmed(self) -> bool:
        """See ``StoredPrefix``."""


P = TypeVar("P", bound=Prefix)


def best_prefix(stored: Iterable[P], prompt: Tokens, scope: str) -> tuple[P | None, int]:
    """Return the first state that saves the most tokens of a prompt, and their number. Only states of this scope, and
    shared ones, are considered.
    """
    best, most = None, 0
    for each in stored:
        if each.scope in (scope, SHARED):
            # At least one token must be computed, to have logits to sample from.
            shared = min(common_prefix(each.tokens, prompt), len(prompt) - 1)
            if shared > most and (each.can_be_trimmed or shared == len(each.tokens)):
                best, most = each, shared
    return best, most


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the number of tokens that both have in common at the beginning."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size

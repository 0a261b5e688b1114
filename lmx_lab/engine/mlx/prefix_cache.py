"""Keep key-value caches of ended requests in memory and on disk, for later prompts with the same prefix.

Each turn of a session repeats the turns before it, and many requests share a system prompt. mlx-lm has a prefix cache
too; this one is limited in bytes, counts a hit as a use, and always leaves one token to compute.

Everything runs on the engine thread, but files are read and written by other threads. The engine thread only copies
arrays, in pieces between the steps of the batch. It passes them to the writing thread through a bounded queue, and
copies them from files that another thread has read. A state from disk is stored in the cache in memory, where the
request that waits for it finds it.

A file contains a state as tensors. Caches of keys and values are cut into blocks of tokens, so that a file may continue
another one and no tensor is large. Other caches, such as recurrent states and sliding windows, are stored whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as caches
from mlx_lm.models.cache import KVCache

from lmx_lab.engine.mlx.kv_cache import KvState
from lmx_lab.engine.prefix_files import (
    CLOSE_S,
    MAX_DEPTH,
    DamagedFileError,
    PrefixFiles,
    StoredPrefix,
    TensorSpec,
    Tokens,
    best_prefix,
    common_prefix,
)
from lmx_lab.engine.requests import MIN_GAIN_TOKENS
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.files import start_in_thread

log = logging.getLogger(__name__)
MIN_TOKENS = 8
"""Shorter prefixes are not stored, since the copy would cost more than it saves."""
MAX_ENTRIES = 256
BLOCK_BYTES = 2**21
"""Maximum size of a tensor of a cache of keys and values, unless a single token is larger."""
DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "I8": mx.int8, "I16": mx.int16, "I32": mx.int32,
    "I64": mx.int64, "U8": mx.uint8, "U16": mx.uint16, "U32": mx.uint32, "U64": mx.uint64, "BOOL": mx.bool_,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Arrays = list[tuple[str, mx.array]]
MAX_PENDING = 32
"""Maximum number of states that wait to be written. They belong to the cache in memory, and are not copied."""


@dataclass(frozen=True)
class CacheHit:
    tokens: int
    """Number of prompt tokens that need not be computed; always less than the length of the prompt."""
    state: KvState


@dataclass(eq=False)
class Entry:
    """A stored state."""

    tokens: Tokens
    state: KvState
    variant: str
    scope: str
    used_at: float
    """When it was last used (``time.perf_counter``)."""

    @property
    def can_be_trimmed(self) -> bool:
        return self.state.can_be_trimmed


class PrefixCache:
    """Stores states of at most ``limit_bytes``. The least recently used one is dropped first.

    A state has a *variant*: the name of a dependency other than its tokens, such as vectors that were added to the
    residual stream. A state is only used for prompts of the same variant. Its *scope* is that of the request that it
    comes from (``GenerationRequest.scope``); it is used for requests of the same scope, or of all if it is shared.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._entries: list[Entry] = []
        """In the order of their last use."""

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, prompt: Tokens, variant: str = "", *, scope: str = "") -> int:
        """Return how many tokens of the prompt ``find`` would save."""
        return self._best(prompt, variant, scope)[1]

    def find(self, prompt: Tokens, variant: str = "", *, scope: str = "") -> CacheHit | None:
        """Return the state of the longest stored prefix of a prompt, and count this as a use; None if there is none."""
        entry, length = self._best(prompt, variant, scope)
        if entry is None:
            return None
        self._use(entry)
        unused = len(entry.tokens) - length
        return CacheHit(length, entry.state.trimmed(unused) if unused else entry.state)

    def _use(self, entry: Entry) -> None:
        entry.used_at = time.perf_counter()
        self._entries.remove(entry)
        self._entries.append(entry)

    def _best(self, prompt: Tokens, variant: str, scope: str) -> tuple[Entry | None, int]:
        same = (entry for entry in self._entries if entry.variant == variant)
        entry, length = best_prefix(same, prompt, scope)
        return (entry, length) if length >= MIN_TOKENS else (None, 0)

    def store(self, tokens: Sequence[int] | Tokens, state: KvState, variant: str = "", *, scope: str = "") -> bool:
        """Store the state after these tokens, unless a stored one covers it. Drops a state that the new one covers.

        Returns whether it was stored.
        """
        key = np.asarray(tokens, dtype=np.int32)
        if len(key) < MIN_TOKENS or state.nbytes > self.limit_bytes:
            return False
        for other in self._entries:
            if (other.variant, other.scope) != (variant, scope):
                continue
            shared = common_prefix(other.tokens, key)
            if shared == len(key) and (other.state.can_be_trimmed or len(other.tokens) == len(key)):
                self._use(other)
                return False
            if shared == len(other.tokens) and state.can_be_trimmed:
                # The state of a session grows with each turn. Another prefix of it is dropped by a later turn.
                self._drop(other)
                break
        self._entries.append(Entry(key, state, variant, scope, time.perf_counter()))
        self.nbytes += state.nbytes
        self.shrink(self.limit_bytes)
        return True

    def shrink(self, limit_bytes: int) -> None:
        """Drop the least recently used states until at most ``limit_bytes`` are stored."""
        while self._entries and (self.nbytes > limit_bytes or len(self._entries) > MAX_ENTRIES):
            self.drop_oldest()

    @property
    def oldest_at(self) -> float:
        """When the least recently used state was used; there must be one."""
        return self._entries[0].used_at

    def drop_oldest(self) -> None:
        """Drop the least recently used state; there must be one."""
        self._drop(self._entries[0])

    def _drop(self, entry: Entry) -> None:
        self._entries.remove(entry)
        self.nbytes -= entry.state.nbytes


# On disk


class UnsupportedStateError(Exception):
    """The model has a kind of cache that cannot be stored in a file."""


def is_plain(state: KvState) -> bool:
    """Whether the state is keys and values of all tokens in every layer, so that it can be cut at any token."""
    return all(type(layer) is KVCache for layer in state.layers)


def describe(
    tokens: Tokens, state: KvState, *, start: int = 0, parent: str | None = None, scope: str = ""
) -> tuple[StoredPrefix, Arrays]:
    """Return the header of a file with this state, and its arrays, which are not evaluated yet.

    Args:
        start: Number of tokens that are in the files of ``parent``; 0 unless the state is plain.
        scope: See ``StoredPrefix``.

    Raises:
        UnsupportedStateError: the state cannot be stored.
    """
    arrays: Arrays = []
    if is_plain(state):
        layout: Any = "plain"
        for at, layer in enumerate(state.layers):
            for kind, array in (("keys", layer.keys), ("values", layer.values)):
                block = max(1, BLOCK_BYTES * array.shape[2] // max(1, array.nbytes))
                for first in range(start, layer.offset, block):
                    arrays.append((f"{at}.{kind}.{first}", array[:, :, first : min(first + block, layer.offset)]))
    else:
        layout = []
        for layer in state.layers:
            name = type(layer).__name__
            if getattr(caches, name, None) is not type(layer) or not hasattr(layer, "from_state"):
                raise UnsupportedStateError(f"a cache of the class {name}")
            layout.append([name, _flatten(layer.state, arrays)])
    if unknown := next((array.dtype for _, array in arrays if array.dtype not in NAMES), None):
        raise UnsupportedStateError(f"an array of the type {unknown}")
    stored = StoredPrefix(
        tokens=tokens,
        start=start,
        parent=parent,
        scope=scope,
        can_be_trimmed=state.can_be_trimmed,
        layout=json.dumps(layout),
        tensors=tuple(TensorSpec(name, NAMES[array.dtype], tuple(array.shape)) for name, array in arrays),
    )
    return stored, arrays


def _flatten(value: Any, arrays: Arrays) -> Any:
    """Return a state as JSON, in which arrays are replaced by their index, and append the arrays."""
    if isinstance(value, mx.array):
        arrays.append((str(len(arrays)), value))
        return {"array": len(arrays) - 1}
    if isinstance(value, list | tuple):
        return [_flatten(each, arrays) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedStateError(f"a value of the type {type(value).__name__}")


def to_bytes(array: mx.array) -> bytes:
    """Evaluate an array, and return a copy of its bytes."""
    flat = mx.contiguous(array).reshape(-1)
    return np.array(flat.view(mx.uint8), copy=False).tobytes() if flat.size else b""


class StateReader:
    """Builds a state from the tensors of its files, in pieces.

    Args:
        files: The headers and tensors of the files, in the order of their tokens.
    """

    def __init__(self, files: Sequence[tuple[StoredPrefix, Mapping[str, memoryview]]]) -> None:
        self._files = files
        self._tokens = len(files[-1][0].tokens)
        self._layers: list[Any] = []
        self._layout = json.loads(files[-1][0].layout)
        self._pieces = self._plain() if self._layout == "plain" else self._whole(*files[-1])

    def advance(self, nbytes: int) -> KvState | None:
        """Convert about this many bytes; return the state when it is complete.

        Raises:
            DamagedFileError: the tensors do not form a state of this model.
        """
        try:
            for converted in self._pieces:
                if (nbytes := nbytes - converted) <= 0:
                    return None
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as exc:
            raise DamagedFileError(
                f"its tensors do not form a state of this model ({type(exc).__name__}: {exc})"
            ) from exc
        return KvState(self._layers)

    def _plain(self) -> Iterator[int]:
        parts: dict[tuple[int, str], list[tuple[int, TensorSpec, memoryview]]] = {}
        for at, (stored, tensors) in enumerate(self._files):
            # A later file may continue an earlier one before its end.
            end = self._files[at + 1][0].start if at + 1 < len(self._files) else len(stored.tokens)
            for spec in stored.tensors:
                layer, kind, first = spec.name.split(".")
                if int(first) < end:
                    width = min(spec.shape[2], end - int(first))
                    parts.setdefault((int(layer), kind), []).append((width, spec, tensors[spec.name]))
        for at in range(len(parts) // 2):
            cache, converted = KVCache(), 0
            for kind in ("keys", "values"):
                blocks = [_array(spec, data)[:, :, :width] for width, spec, data in parts[at, kind]]
                array = mx.concatenate(blocks, axis=2) if len(blocks) > 1 else mx.contiguous(blocks[0])
                mx.eval(array)
                setattr(cache, kind, array)
                converted += array.nbytes
                if array.shape[2] != self._tokens:
                    raise DamagedFileError(f"it has {array.shape[2]} of {self._tokens} tokens")
            cache.offset = self._tokens
            self._layers.append(cache)
            yield converted

    def _whole(self, stored: StoredPrefix, tensors: Mapping[str, memoryview]) -> Iterator[int]:
        arrays = []
        for spec in stored.tensors:
            arrays.append(_array(spec, tensors[spec.name]))
            mx.eval(arrays[-1])
            yield spec.nbytes
        for name, value in self._layout:
            self._layers.append(getattr(caches, name).from_state(_unflatten(value, arrays)))


def _array(spec: TensorSpec, data: memoryview) -> mx.array:
    flat = mx.array(np.frombuffer(data, dtype=np.uint8))
    return flat.view(DTYPES[spec.dtype]).reshape(spec.shape)


def _unflatten(value: Any, arrays: Sequence[mx.array]) -> Any:
    if isinstance(value, dict):
        return arrays[value["array"]]
    if isinstance(value, list):
        return [_unflatten(each, arrays) for each in value]
    return value


class PrefixRead:
    """A state that is being read from disk, for the requests that wait for it.

    Args:
        files: The files of the state, in the order of their tokens; none if there is nothing to read.
        reading: Future with the tensors of these files.
    """

    def __init__(
        self,
        files: Sequence[StoredPrefix] = (),
        reading: Future[list[Mapping[str, memoryview]]] | None = None,
    ) -> None:
        self.files = files
        self.reading = reading
        self.done = reading is None
        """Whether the state is in memory, or could not be read."""
        self.tokens = 0
        """Number of tokens of the state; 0 if it could not be read."""
        self.reader: StateReader | None = None


NOTHING = PrefixRead()


class _Write:
    """A state that a thread writes to a file."""

    def __init__(self, files: PrefixFiles, stored: StoredPrefix, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._piece: bytes | None = b""
        self._queue: queue.Queue[bytes | None] = queue.Queue(8)
        taken = iter(self._queue.get, None)
        self.done = start_in_thread(lambda: files.write(stored, taken), name="lmx-lab-prefix-writer")

    def advance(self, nbytes: int, *, timeout_s: float) -> None:
        """Pass about this many bytes to the thread; fewer if its queue stays full for ``timeout_s``."""
        while nbytes > 0 and self._piece is not None and not self.done.done():
            self._piece = self._piece or next(self._pieces, None)
            try:
                self._queue.put(self._piece, block=timeout_s > 0, timeout=timeout_s or None)
            except queue.Full:
                return
            if self._piece is not None:
                nbytes -= len(self._piece)
                self._piece = b""

    def cancel(self) -> None:
        """End the thread, which discards the file unless it has all pieces."""
        while True:
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()
            else:
                return


class DiskPrefixes:
    """The files of one model, and the states that are being read and written.

    Args:
        arithmetic: See ``PrefixFiles.open``.
    """

    def __init__(self, files: PrefixFiles, entry: ModelEntry, arithmetic: Sequence[str]) -> None:
        self.piece_bytes = 2**23
        """Bytes that are copied between two steps, which takes a few milliseconds."""
        self._files = files
        files.start(entry, arithmetic)
        self._read: PrefixRead | None = None
        self._write: _Write | None = None
        self._pending: deque[tuple[Tokens, weakref.ref[KvState], str]] = deque(maxlen=MAX_PENDING)

    @property
    def is_busy(self) -> bool:
        """Whether ``advance`` has something to do."""
        return self._read is not None or self._write is not None or (bool(self._pending) and self._files.is_open)

    @property
    def written_bytes(self) -> int:
        return self._files.written_bytes

    def find(self, prompt: Tokens, prefixes: PrefixCache, *, scope: str) -> PrefixRead | None:
        """Return the state to wait for before a prompt is computed: ``NOTHING`` if no file is better than the cache in
        memory, None if this cannot be decided yet.
        """
        if self._files.wait_s:
            return None
        stored, tokens = self._files.best(prompt, scope)
        if stored is None or tokens - prefixes.longest(prompt, scope=scope) < MIN_GAIN_TOKENS:
            return NOTHING
        if self._read is not None:
            # One at a time, to limit the memory of files that were read.
            return self._read if self._read.files[-1] is stored else None
        files = self._files.files_of(stored)
        if not files or sum(file.nbytes for file in files) > prefixes.limit_bytes:
            return NOTHING
        reading = start_in_thread(lambda: self._files.load(files), name="lmx-lab-prefix-reader")
        self._read = PrefixRead(files, reading)
        return self._read

    def store(self, tokens: Sequence[int], state: KvState, *, scope: str) -> None:
        """Write a state of the cache in memory, unless it is dropped there before its turn."""
        self._pending.append((np.asarray(tokens, dtype=np.int32), weakref.ref(state), scope))

    def advance(self, prefixes: PrefixCache, *, idle: bool) -> None:
        """Copy a piece of the states that are being read and written.

        Args:
            idle: Whether there is nothing to compute, so that this may wait a few milliseconds.
        """
        timeout_s = 0.005 if idle else 0.0
        if self._read is not None:
            self._advance_read(self._read, prefixes, timeout_s)
        self._write = self._write or self._next_write()
        if self._write is not None:
            self._write.advance(self.piece_bytes, timeout_s=timeout_s)
            if idle and self._read is None:
                wait([self._write.done], timeout=timeout_s)
            if self._write.done.done():
                if (failure := self._write.done.exception()) is not None:
                    log.error("a state was not written to disk", exc_info=failure)
                self._write = None
        elif idle and self._files.opening is not None:
            wait([self._files.opening], timeout=timeout_s)

    def close(self, prefixes: PrefixCache | None) -> None:
        """Write the states that are not on disk yet, for ``CLOSE_S`` at most. Must be the last call.

        Args:
            prefixes: The cache in memory; None if it no longer exists.
        """
        until = time.perf_counter() + CLOSE_S
        self._read = None
        while prefixes is not None and self.is_busy and time.perf_counter() < until:
            self.advance(prefixes, idle=True)
        if self._write is not None:
            self._write.cancel()
        self._read = self._write = None
        self._pending.clear()

    def _advance_read(self, read: PrefixRead, prefixes: PrefixCache, timeout_s: float) -> None:
        assert read.reading is not None
        if timeout_s:
            wait([read.reading], timeout=timeout_s)
        if not read.reading.done():
            return
        if read.reader is None and (tensors := read.reading.result()):
            read.reader = StateReader(list(zip(read.files, tensors, strict=True)))
        state = None
        try:
            state = read.reader.advance(self.piece_bytes) if read.reader is not None else None
        except DamagedFileError as exc:
            self._files.reject(read.files[-1], exc)
            read.reader = None
        if read.reader is not None and state is None:
            return
        if state is not None:
            tokens = read.files[-1].tokens
            prefixes.store(tokens, state, scope=read.files[-1].scope)
            read.tokens = len(tokens)
        # The requests that refer to it do not need its tensors.
        read.done, read.reader, read.reading = True, None, None
        self._read = None

    def _next_write(self) -> _Write | None:
        while self._pending and self._files.is_open:
            tokens, reference, scope = self._pending.popleft()
            if (state := reference()) is None:
                continue
            # The tokens that are in files, and the last of these files.
            start, parent = 0, None
            best, shared = self._files.best(tokens, scope) if is_plain(state) else (None, 0)
            if best is None and not is_plain(state) and self._files.has(tokens, scope):
                continue
            if best is not None:
                if len(tokens) - shared < MIN_GAIN_TOKENS:
                    continue
                if shared >= MIN_GAIN_TOKENS and 0 < len(self._files.files_of(best)) < MAX_DEPTH:
                    start, parent = shared, self._files.name_of(best)
            try:
                stored, arrays = describe(tokens, state, start=start, parent=parent, scope=scope)
            except UnsupportedStateError as exc:
                log.debug("a state is kept in memory only: %s", exc)
                continue
            return _Write(self._files, stored, map(to_bytes, (array for _, array in arrays)))
        return None

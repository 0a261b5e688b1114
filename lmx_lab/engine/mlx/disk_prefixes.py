"""Keep the prefix cache of a model on disk. Runs on the engine thread; files are read and written by other threads.

The engine thread only copies arrays, in pieces between the steps of the batch: to the writing thread through a bounded
queue, and from the files that were read. A state that was read is put into the cache in memory, where the request that
waited for it finds it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait

import numpy as np

from lmx_lab.engine.mlx.kv_cache import KvState
from lmx_lab.engine.mlx.prefix_cache import PrefixCache
from lmx_lab.engine.mlx.state_tensors import StateReader, UnsupportedStateError, describe, is_plain, to_bytes
from lmx_lab.engine.prefix_files import (
    CLOSE_S,
    MAX_DEPTH,
    MIN_GAIN_TOKENS,
    OPEN_S,
    DamagedFileError,
    PrefixFiles,
    StoredPrefix,
    Tokens,
)
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.files import start_in_thread

log = logging.getLogger(__name__)
PIECE_BYTES = 2**23
"""Bytes that are copied between two steps, which takes a few milliseconds."""
QUEUE_PIECES = 8
MAX_PENDING = 32
"""Number of states that wait to be written. They are those in memory, and take no memory of their own."""
IDLE_WAIT_S = 0.005
"""Time for which the engine thread waits for a file if it has nothing to compute."""


class PrefixRead:
    """A state that is read from disk, for the requests that wait for it.

    Args:
        files: The files of the state, the one of the first tokens first; none if there is nothing to read.
    """

    def __init__(self, files: Sequence[StoredPrefix] = ()) -> None:
        self.files = files
        self.done = not files
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
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUE_PIECES)
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
    """The files of one model, and what is being read and written.

    Args:
        arithmetic: See ``PrefixFiles.open``.
    """

    def __init__(self, files: PrefixFiles, entry: ModelEntry, arithmetic: Sequence[str]) -> None:
        self._files = files
        self._open_until = time.perf_counter() + OPEN_S
        self._opening: Future[None] = start_in_thread(
            lambda: files.open(entry, arithmetic), name="lmx-lab-prefix-index"
        )
        self._read: PrefixRead | None = None
        self._reading: Future[list[Mapping[str, memoryview]]] | None = None
        self._write: _Write | None = None
        self._pending: deque[tuple[Tokens, weakref.ref[KvState]]] = deque(maxlen=MAX_PENDING)

    @property
    def is_busy(self) -> bool:
        """Whether ``advance`` has something to do."""
        return self._read is not None or self._write is not None or (bool(self._pending) and self._files.is_open)

    @property
    def written_bytes(self) -> int:
        return self._files.written_bytes

    def find(self, prompt: Tokens, prefixes: PrefixCache[KvState]) -> PrefixRead | None:
        """Return the state to wait for before a prompt is computed: ``NOTHING`` if no file is better than the cache in
        memory, None if this cannot be decided yet.
        """
        if not self._opening.done() and time.perf_counter() < self._open_until:
            return None
        stored, tokens = self._files.best(prompt)
        if stored is None or tokens - prefixes.longest(prompt) < MIN_GAIN_TOKENS:
            return NOTHING
        if self._read is not None:
            # One at a time, to limit the memory of files that were read.
            return self._read if self._read.files[-1] is stored else None
        files = self._files.files_of(stored)
        if not files or sum(file.nbytes for file in files) > prefixes.limit_bytes:
            return NOTHING
        self._read = PrefixRead(files)
        self._reading = start_in_thread(lambda: self._read_all(files), name="lmx-lab-prefix-reader")
        return self._read

    def _read_all(self, files: Sequence[StoredPrefix]) -> list[Mapping[str, memoryview]]:
        tensors = []
        for file in files:
            try:
                tensors.append(self._files.read(file))
            # An unexpected error, such as too little memory, must not end the requests of the engine.
            except Exception as exc:
                self._files.reject(file, exc)
                return []
        self._files.touch(files)
        return tensors

    def store(self, tokens: Sequence[int], state: KvState) -> None:
        """Write a state of the cache in memory, unless it is dropped there before its turn."""
        self._pending.append((np.asarray(tokens, dtype=np.int32), weakref.ref(state)))

    def advance(self, prefixes: PrefixCache[KvState], *, idle: bool) -> None:
        """Copy a piece of what is read and written.

        Args:
            idle: Whether there is nothing to compute, so that this may wait a few milliseconds.
        """
        timeout_s = IDLE_WAIT_S if idle else 0.0
        if self._read is not None:
            self._advance_read(self._read, prefixes, timeout_s)
        self._write = self._write or self._next_write()
        if self._write is not None:
            self._write.advance(PIECE_BYTES, timeout_s=timeout_s)
            if idle and self._read is None:
                wait([self._write.done], timeout=timeout_s)
            if self._write.done.done():
                if (failure := self._write.done.exception()) is not None:
                    log.error("a state was not written to disk", exc_info=failure)
                self._write = None
        elif idle and not self._opening.done():
            wait([self._opening], timeout=timeout_s)

    def close(self, prefixes: PrefixCache[KvState] | None) -> None:
        """Write what is in memory and not on disk yet, for ``CLOSE_S`` at most. Must be the last call.

        Args:
            prefixes: The cache in memory; None if it no longer exists.
        """
        until = time.perf_counter() + CLOSE_S
        self._read = None
        while prefixes is not None and self.is_busy and time.perf_counter() < until:
            self.advance(prefixes, idle=True)
        if self._write is not None:
            self._write.cancel()
        self._read = self._reading = self._write = None
        self._pending.clear()

    def _advance_read(self, read: PrefixRead, prefixes: PrefixCache[KvState], timeout_s: float) -> None:
        assert self._reading is not None
        if timeout_s and not self._reading.done():
            wait([self._reading], timeout=timeout_s)
        if not self._reading.done():
            return
        if read.reader is None and (tensors := self._reading.result()):
            read.reader = StateReader(list(zip(read.files, tensors, strict=True)))
        state = None
        try:
            state = read.reader.advance(PIECE_BYTES) if read.reader is not None else None
        except DamagedFileError as exc:
            self._files.reject(read.files[-1], exc)
            read.reader = None
        if read.reader is not None and state is None:
            return
        if state is not None:
            tokens = read.files[-1].tokens
            prefixes.store(tokens, state)
            read.tokens = len(tokens)
        read.done, read.reader = True, None
        self._read = self._reading = None

    def _next_write(self) -> _Write | None:
        while self._pending and self._files.is_open:
            tokens, reference = self._pending.popleft()
            if (state := reference()) is None:
                continue
            start, parent = self._continued(tokens, state)
            if start is None:
                continue
            try:
                stored, arrays = describe(tokens, state, start=start, parent=parent)
            except UnsupportedStateError as exc:
                log.debug("a state is kept in memory only: %s", exc)
                continue
            return _Write(self._files, stored, map(to_bytes, (array for _, array in arrays)))
        return None

    def _continued(self, tokens: Tokens, state: KvState) -> tuple[int | None, str | None]:
        """Return how many tokens of a state are in files, and the last of these files; None if a file has all."""
        if not is_plain(state):
            return (None, None) if self._files.has(tokens) else (0, None)
        stored, shared = self._files.best(tokens)
        if stored is None:
            return 0, None
        if len(tokens) - shared < MIN_GAIN_TOKENS:
            return None, None
        if shared < MIN_GAIN_TOKENS or not 0 < len(self._files.files_of(stored)) < MAX_DEPTH:
            return 0, None
        return shared, self._files.name_of(stored)

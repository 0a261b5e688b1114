"""Keep the slots of llama.cpp on disk. Belongs to the manager's loop.

llama.cpp saves and restores a slot as a file of its own format, in the private folder of its process. It does not check
these files, and a damaged one crashes the process (measured). The cache therefore stores their content with a checksum,
which is verified before a slot is restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from pathlib import Path

import numpy as np

from lmx_lab.engine.llama_cpp.completion import LlamaGeneration, Slot
from lmx_lab.engine.llama_cpp.connection import LlamaConnection, RefusedError
from lmx_lab.engine.prefix_files import (
    CLOSE_S,
    PrefixFiles,
    StoredPrefix,
    TensorSpec,
    Tokens,
)
from lmx_lab.engine.requests import MIN_GAIN_TOKENS
from lmx_lab.errors import EngineError
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.gguf.header import GgufHeader

log = logging.getLogger(__name__)
ARITHMETIC = ("kv_unified", "cache_type_k", "cache_type_v", "n_ubatch", "flash_attn_type")
"""Fields of ``CommonParams`` that change the values in the cache."""
SAVE_S = 10.0
"""Time limit for saving a slot."""
PIECE_BYTES = 2**23
HEAD_TOKENS = 8
"""Maximum number of values before the token ids in the list of a saved slot."""
LIST_OFFSET = 12
"""Position of that list in the file, after its magic number, version and length."""
RECURRENT = ("ssm.state_size", "wkv.head_size", "shortconv.l_cache", "attention.sliding_window")


def can_be_trimmed(header: GgufHeader) -> bool:
    """Return whether a slot of this model can be reused for a prompt that shares only a part of its tokens."""
    return not any(header.integer(f"{header.architecture}.{name}") for name in RECURRENT)


class SlotFiles:
    """Saves the slot of each answer, and restores slots for prompts that continue one.

    Args:
        folder: The private folder of the process.
    """

    def __init__(self, files: PrefixFiles, connection: LlamaConnection, folder: Path, *, trims: bool) -> None:
        self._files = files
        self._connection = connection
        self._folder = folder
        self._trims = trims
        self._waiting: dict[Slot, LlamaGeneration] = {}
        """The slots to save, and the answers that have filled them."""
        self._saving: asyncio.Task[None] | None = None
        self._restoring = asyncio.Lock()

    async def restore(self, answer: LlamaGeneration, slot: Slot, *, known: int) -> int:
        """Fill the slot of an answer from a file that begins like its prompt. Return the number of these tokens.

        Args:
            known: Number of tokens of the prompt that the slot begins with.
        """
        tokens = np.asarray(answer.prompt, dtype=np.int32)
        if (left_s := self._files.wait_s) and self._files.opening is not None:
            await asyncio.wait([asyncio.wrap_future(self._files.opening)], timeout=left_s)
        stored, saved = self._files.best(tokens, answer.request.scope)
        if stored is None or saved - known < MIN_GAIN_TOKENS:
            return 0
        # A unique name, because the thread of a cancelled request may still write its file.
        path = self._folder / f"restored-{secrets.token_hex(4)}.bin"
        # One at a time, to limit the memory of files that were read.
        async with self._restoring:
            try:
                tensors = await in_thread(lambda: self._files.load([stored]))
                if not tensors:
                    return 0
                try:
                    await in_thread(lambda: path.write_bytes(tensors[0]["state"]))
                    slot.scope = None
                    await self._connection.post(f"/slots/{slot.id}?action=restore", {"filename": path.name})
                    slot.scope = stored.scope
                finally:
                    await in_thread(lambda: path.unlink(missing_ok=True))
                return saved
            except RefusedError as exc:
                self._files.reject(stored, exc)
            except OSError as exc:
                log.warning("%s cannot be written: %s; the prompt is computed again", self._folder, exc.strerror)
            except EngineError:
                # The process has ended. The request itself reports that.
                pass
            return 0

    @property
    def written_bytes(self) -> int:
        """Number of bytes that were written to the disk."""
        return self._files.written_bytes

    def save(self, answer: LlamaGeneration, slot: Slot) -> None:
        """Save the slot of an answer that has ended, after the slots of earlier answers."""
        if not self._files.is_open:
            return
        self._waiting[slot] = answer
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_all(), name="lmx-lab llama.cpp slots")

    async def save_now(self, slot: Slot) -> None:
        """Save a slot before another request takes it, if that was not done yet."""
        async with slot.lock:
            if (answer := self._waiting.pop(slot, None)) is None:
                return
            prompt: Tokens = np.asarray(answer.prompt, dtype=np.int32)
            length, scope = len(prompt) + answer.output_tokens - 1, answer.request.scope
            if length - self._files.best(prompt, scope)[1] < MIN_GAIN_TOKENS:
                return
            # The next file of the slot overwrites one that llama.cpp writes after SAVE_S has passed.
            path = self._folder / f"saved-{slot.id}.bin"
            try:
                async with asyncio.timeout(SAVE_S):
                    saved = await self._connection.post(f"/slots/{slot.id}?action=save", {"filename": path.name})
                await in_thread(lambda: self._keep(path, prompt, scope, int(saved["n_saved"])))
            except (RefusedError, EngineError, OSError, TimeoutError) as exc:
                log.debug("a slot was not saved: %s", exc)
            finally:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    async def stop(self) -> None:
        """Continue to save the waiting slots for ``CLOSE_S`` at most, and stop."""
        if self._saving is not None:
            await asyncio.wait([self._saving], timeout=CLOSE_S)
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
        self._waiting.clear()

    async def _save_all(self) -> None:
        while self._waiting:
            await self.save_now(next(iter(self._waiting)))

    def _keep(self, path: Path, prompt: Tokens, scope: str, count: int) -> None:
        """Write a saved slot to a file of the cache. Runs on another thread."""
        with open(path, "rb") as file:
            head = file.read(LIST_OFFSET + 4 * (HEAD_TOKENS + count))
            values = np.frombuffer(head[LIST_OFFSET : len(head) // 4 * 4], dtype=np.int32)
            lists = (values[first : first + count] for first in range(HEAD_TOKENS))
            found = (each for each in lists if len(each) == count and np.array_equal(each[: len(prompt)], prompt))
            if (tokens := next(found, None)) is None:
                return  # llama.cpp has cleared the slot
            size = file.seek(0, 2)
            file.seek(0)
            stored = StoredPrefix(
                tokens=tokens,
                scope=scope,
                can_be_trimmed=self._trims,
                layout='"slot"',
                tensors=(TensorSpec("state", "U8", (size,)),),
            )
            self._files.write(stored, iter(lambda: file.read(PIECE_BYTES), b""))

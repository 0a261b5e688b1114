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
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmx_lab.engine.llama_cpp.completion import LlamaGeneration
from lmx_lab.engine.llama_cpp.connection import LlamaConnection, RefusedError
from lmx_lab.engine.prefix_files import (
    CLOSE_S,
    MIN_GAIN_TOKENS,
    OPEN_S,
    DamagedFileError,
    PrefixFiles,
    StoredPrefix,
    TensorSpec,
    Tokens,
    common_prefix,
)
from lmx_lab.errors import EngineError
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.gguf.header import GgufHeader

log = logging.getLogger(__name__)
ARITHMETIC = ("kv_unified", "cache_type_k", "cache_type_v", "n_ubatch", "flash_attn_type")
"""Fields of ``CommonParams`` that change the values in the cache."""
SAVE_S = 10.0
"""Time for saving a slot. If another request takes the slot first, llama.cpp waits for the end of that request."""
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
        opening: The work that lists the files.
    """

    def __init__(
        self,
        files: PrefixFiles,
        connection: LlamaConnection,
        folder: Path,
        opening: asyncio.Future[None],
        *,
        trims: bool,
    ) -> None:
        self._files = files
        self._connection = connection
        self._folder = folder
        self._trims = trims
        self._opening = opening
        self._open_until = time.perf_counter() + OPEN_S
        self._recent: deque[Tokens] = deque(maxlen=64)
        """Prompts whose states llama.cpp probably has in memory."""
        # If there are too many answers to save, the oldest are not saved.
        self._waiting: deque[LlamaGeneration] = deque(maxlen=8)
        self._saving: asyncio.Task[None] | None = None
        self._restoring = asyncio.Lock()
        self._last_slot: int | None = None

    async def restore(self, prompt: list[int]) -> int:
        """Restore a slot that begins like the prompt, unless llama.cpp has as much in memory. Return its tokens.

        llama.cpp chooses the slot of a request by its tokens, so the restored one is used if it is free by then.
        """
        tokens = np.asarray(prompt, dtype=np.int32)
        if not self._opening.done():
            await asyncio.wait([self._opening], timeout=max(0.0, self._open_until - time.perf_counter()))
        stored, saved = self._files.best(tokens)
        in_memory = max((common_prefix(tokens, other) for other in self._recent), default=0)
        self._recent.append(tokens)
        if stored is None or saved - in_memory < MIN_GAIN_TOKENS:
            return 0
        # One at a time, to limit the memory of files that were read.
        async with self._restoring:
            try:
                return saved if await self._restore(stored) else 0
            except (DamagedFileError, RefusedError) as exc:
                self._files.reject(stored, exc)
            except OSError as exc:
                log.warning("%s cannot be written: %s; the prompt is computed again", self._folder, exc.strerror)
            except EngineError:
                # The process has ended. The request itself reports that.
                pass
            return 0

    async def _restore(self, stored: StoredPrefix) -> bool:
        # A unique name, because the thread of a cancelled request may still write its file.
        path = self._folder / f"restored-{secrets.token_hex(4)}.bin"
        state = (await in_thread(lambda: self._files.read(stored)))["state"]
        try:
            await in_thread(lambda: path.write_bytes(state))
            idle = [slot for slot in await self._idle_slots() if slot["id"] != self._last_slot]
            if not idle:
                return False
            # Overwrite the slot with the fewest tokens. The last restored one may still wait for its request.
            self._last_slot = min(idle, key=lambda slot: int(slot.get("n_prompt_tokens", 0)))["id"]
            await self._connection.post(f"/slots/{self._last_slot}?action=restore", {"filename": path.name})
        finally:
            await in_thread(lambda: path.unlink(missing_ok=True))
        await in_thread(lambda: self._files.touch([stored]))
        return True

    async def _idle_slots(self) -> list[Mapping[str, Any]]:
        return [slot for slot in await self._connection.get("/slots") if not slot["is_processing"]]

    @property
    def written_bytes(self) -> int:
        """Number of bytes that were written to the disk."""
        return self._files.written_bytes

    def save(self, answer: LlamaGeneration) -> None:
        """Save the slot of an answer that has ended, after the slots of earlier answers."""
        if not self._files.is_open:
            return
        self._waiting.append(answer)
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_all(), name="lmx-lab llama.cpp slots")

    async def stop(self) -> None:
        """Continue to save the waiting slots for ``CLOSE_S`` at most, and stop."""
        if self._saving is not None:
            await asyncio.wait([self._saving], timeout=CLOSE_S)
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
        self._waiting.clear()
        self._opening.cancel()

    async def _save_all(self) -> None:
        while self._waiting:
            answer = self._waiting.popleft()
            try:
                async with asyncio.timeout(SAVE_S):
                    await self._save(answer)
            except (RefusedError, EngineError, OSError, TimeoutError) as exc:
                log.debug("a slot was not saved: %s", exc)

    async def _save(self, answer: LlamaGeneration) -> None:
        prompt: Tokens = np.asarray(answer.prompt, dtype=np.int32)
        length = len(prompt) + answer.output_tokens - 1
        if length - self._files.best(prompt)[1] < MIN_GAIN_TOKENS:
            return
        slots = [slot for slot in await self._idle_slots() if slot["id"] == answer.row.slot]
        # Another request may have taken the slot. If it has ended, the file shows that.
        if not slots or int(slots[0].get("n_prompt_tokens", 0)) < len(prompt):
            return
        # Remove files that llama.cpp wrote after SAVE_S had passed.
        for late in self._folder.glob("saved-*.bin"):
            late.unlink(missing_ok=True)
        path = self._folder / f"saved-{secrets.token_hex(4)}.bin"
        try:
            saved = await self._connection.post(f"/slots/{answer.row.slot}?action=save", {"filename": path.name})
            await in_thread(lambda: self._keep(path, prompt, int(saved["n_saved"])))
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _keep(self, path: Path, prompt: Tokens, count: int) -> None:
        """Write a saved slot to a file of the cache. Runs on another thread."""
        with open(path, "rb") as file:
            head = file.read(LIST_OFFSET + 4 * (HEAD_TOKENS + count))
            values = np.frombuffer(head[LIST_OFFSET : len(head) // 4 * 4], dtype=np.int32)
            lists = (values[first : first + count] for first in range(HEAD_TOKENS))
            found = (each for each in lists if len(each) == count and np.array_equal(each[: len(prompt)], prompt))
            if (tokens := next(found, None)) is None:
                return  # the slot of another request
            size = file.seek(0, 2)
            file.seek(0)
            stored = StoredPrefix(
                tokens=tokens,
                can_be_trimmed=self._trims,
                layout='"slot"',
                tensors=(TensorSpec("state", "U8", (size,)),),
            )
            self._files.write(stored, iter(lambda: file.read(PIECE_BYTES), b""))

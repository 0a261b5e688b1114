"""Choose the slots of a llama.cpp process, so that a request continues only prefixes of its scope or shared ones.

llama.cpp itself would choose the slot with the most similar tokens, even if they are those of another caller. Its cache
of states in memory would do the same, so it is turned off. When a conversation needs a slot, the state of the previous
conversation is therefore saved here, in a file of the process's private folder, which is removed with the process.
Belongs to the manager's loop.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmx_lab.engine.answers import shared_length
from lmx_lab.engine.llama_cpp.completion import TRIAL_SLOT, LlamaGeneration, Slot
from lmx_lab.engine.llama_cpp.connection import LlamaConnection, RefusedError
from lmx_lab.engine.requests import SHARED

if TYPE_CHECKING:
    from lmx_lab.engine.llama_cpp.slot_files import SlotFiles

log = logging.getLogger(__name__)
MIN_SIMILARITY = 0.1
"""Share of the prompt that a slot must begin with to be used for it. Otherwise, the longest unused slot is taken."""
MIN_KEPT = 0.5
"""Share of the tokens of a slot below which its state is saved before a request that continues the rest of it."""
MIN_GAIN_TOKENS = 32
"""Minimum number of tokens for which a state is saved or restored. Computing fewer takes about as long as a file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedState:
    """The state of a slot in a file."""

    scope: str
    tokens: list[int]
    path: Path
    nbytes: int


class SlotStates:
    """The slots for requests, and the saved states of conversations that have no slot.

    Args:
        running: Returns the generations that have a slot, which are at most as many as ``slots``.
        files: Keeps states on disk; None if that is off.
        folder: The private folder of the process.
        limit_bytes: Maximum size of all saved states. The least recently used ones are dropped first.
        reserve_bytes: Disk space that must remain free.
    """

    def __init__(
        self,
        connection: LlamaConnection,
        running: Callable[[], Collection[LlamaGeneration]],
        *,
        slots: int,
        files: SlotFiles | None,
        folder: Path,
        limit_bytes: int,
        reserve_bytes: int,
    ) -> None:
        self._connection = connection
        self._running = running
        self._slots = [Slot(id=TRIAL_SLOT + 1 + number) for number in range(slots)]
        self._files = files
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._reserve_bytes = reserve_bytes
        self._saved: list[SavedState] = []
        """In the order of their last use."""

    async def take(self, generation: LlamaGeneration, prompt: list[int]) -> Slot:
        """Return a slot for a generation that is running, with as many tokens of its prompt as are known.

        Raises:
            EngineError: the process has ended.
        """
        scope, running = generation.request.scope, self._running()
        scopes = (scope, SHARED)

        def usable(slot: Slot) -> int:
            length = shared_length(prompt, slot.tokens) if slot.scope in scopes else 0
            return length if length > MIN_SIMILARITY * len(prompt) else 0

        free = [slot for slot in self._slots if slot.user in (None, generation) or slot.user not in running]
        slot = max(free, key=lambda each: (usable(each), -each.used_at))
        length = usable(slot)
        slot.used_at, slot.user = time.perf_counter(), generation
        if self._files is not None:
            await self._files.save_now(slot)
        if length < MIN_KEPT * len(slot.tokens) or slot.scope not in (None, scope):
            await self._save(slot)
        states = [state for state in self._saved if state.scope in scopes]
        lengths = [shared_length(prompt, state.tokens) for state in states]
        if (saved := max(lengths, default=0)) - length >= MIN_GAIN_TOKENS:
            length = saved if await self._restore(states[lengths.index(saved)], slot) else 0
        if self._files is not None and not generation.output_tokens:
            generation.row.restored_tokens = await self._files.restore(generation, slot, known=length)
        if slot.scope not in scopes:
            # If this is cancelled, the content of the slot is not known.
            slot.scope = None
            await self._connection.post(f"/slots/{slot.id}?action=erase", {})
        slot.scope, slot.tokens = scope, prompt
        return slot

    async def _save(self, slot: Slot) -> None:
        """Save the state of a slot, unless it is short or a saved one covers it."""
        scope, tokens = slot.scope, slot.tokens
        if scope is None or len(tokens) < MIN_GAIN_TOKENS or not self._limit_bytes:
            return
        known = [state for state in self._saved if state.scope == scope]
        if any(shared_length(tokens, state.tokens) == len(tokens) for state in known):
            return
        # The file of a cancelled request is overwritten by the next one.
        file = self._folder / f"saving-{slot.id}.bin"
        try:
            written = await self._connection.post(f"/slots/{slot.id}?action=save", {"filename": file.name})
            path = file.rename(self._folder / f"state-{secrets.token_hex(4)}.bin")
        except (RefusedError, OSError) as exc:
            log.debug("the state of a slot was not saved: %s", exc)
            file.unlink(missing_ok=True)
            return
        self._saved.append(SavedState(scope=scope, tokens=tokens, path=path, nbytes=int(written["n_written"])))
        for state in known:
            if shared_length(tokens, state.tokens) == len(state.tokens):
                self._drop(state)
        while self._saved and (
            sum(state.nbytes for state in self._saved) > self._limit_bytes
            or shutil.disk_usage(self._folder).free < self._reserve_bytes
        ):
            self._drop(self._saved[0])

    async def _restore(self, state: SavedState, slot: Slot) -> bool:
        """Fill a slot with a saved state, and return whether that succeeded. If not, its content is not known."""
        slot.scope = None
        try:
            await self._connection.post(f"/slots/{slot.id}?action=restore", {"filename": state.path.name})
        except RefusedError:
            self._drop(state)
            return False
        slot.scope = state.scope
        if state in self._saved:
            self._saved.append(self._saved.pop(self._saved.index(state)))
        return True

    def _drop(self, state: SavedState) -> None:
        if state in self._saved:
            self._saved.remove(state)
            state.path.unlink(missing_ok=True)

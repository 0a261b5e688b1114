"""Choose the slots of llama.cpp for requests, and save the states of conversations that have lost their slots.

Belongs to the manager's loop. A request continues the longest prefix of its prompt that a slot or a saved state has. If
another answer is computed in that slot, the request waits until the answer ends or is interrupted, unless computing the
prefix is faster. llama.cpp computes only slots with consecutive numbers together (measured: four answers in the slots
0, 2, 4 and 6 took 1.6 times the CPU time per token of those in 0 to 3). A request therefore gets a slot next to those
in use, into which the state of another slot is copied.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmx_lab.engine.answers import shared_length
from lmx_lab.engine.llama_cpp.completion import EXACT_PROMPT_TOKENS, EXACT_TOKENS, TRIAL_SLOT, LlamaGeneration, Slot
from lmx_lab.engine.llama_cpp.connection import END_S, LlamaConnection, RefusedError
from lmx_lab.engine.requests import MIN_GAIN_TOKENS, SHARED

if TYPE_CHECKING:
    from lmx_lab.engine.llama_cpp.slot_files import SlotFiles

log = logging.getLogger(__name__)
MIN_SIMILARITY = 0.1
"""Share of the prompt that a slot must begin with to be used for it. Otherwise, the longest unused slot is taken."""
MIN_KEPT = 0.5
"""Share of the tokens of a slot below which its state is saved before a request that continues the rest of it."""
COPIED_TOKENS = 20
"""Number of tokens whose state is copied in the time that computing one takes (measured: 40)."""
PATIENCE = 0.25
"""Maximum time to wait for an answer that cannot be interrupted and may be long, as a share of the time in which the
awaited tokens would be computed. A client that stops an answer and sends the next turn is noticed sooner."""
PATIENCE_TOKENS = 4
"""The same as a number of tokens of that answer. A closed connection is noticed when the second token after it is
sent."""


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
        self.token_s = 0.002
        """Time that a token of the last long prompt took."""

    async def take(self, generation: LlamaGeneration, prompt: list[int], *, is_exact: bool = False) -> Slot:
        """Return a slot for a generation that is running, with the longest known prefix of its prompt.

        Args:
            is_exact: Whether to use only ``Slot.exact_tokens`` as the prefix, and no other slots or files.

        Raises:
            EngineError: the process has ended.
        """
        scope = generation.request.scope
        scopes = (scope, SHARED)
        refused: set[Slot] = set()
        """The slots whose state cannot be copied now."""
        while True:
            shared = {slot: shared_length(prompt, slot.tokens) if slot.scope in scopes else 0 for slot in self._slots}
            usable = {slot for slot in self._slots if not is_exact or shared[slot] <= slot.exact_tokens}
            lengths = {slot: length if slot in usable else 0 for slot, length in shared.items()}
            slot = self._choose(generation, lengths, len(prompt), refused)
            known, state = lengths[slot], None
            if is_exact:
                break
            for saved in self._saved:
                length = shared_length(prompt, saved.tokens) if saved.scope in scopes else 0
                if length > known and _is_worth_copying(saved.tokens, length - lengths[slot]):
                    known, state = length, saved
            sources = [each for each in self._slots if each not in refused]
            source = max(sources, key=lambda each: lengths[each], default=slot)
            if source is slot or not _is_worth_copying(source.tokens, lengths[source] - known):
                break
            if not self._limit_bytes or not await self._publish(source, generation, lengths[source], known):
                refused.add(source)
        slot.used_at, slot.user = time.perf_counter(), generation
        if self._files is not None:
            await self._files.save_now(slot)
        async with slot.lock:
            if lengths[slot] < MIN_KEPT * len(slot.tokens) or slot.scope not in (None, scope):
                await self._save(slot)
            generation.row.uses_cache = slot in usable
            is_short = len(prompt) <= EXACT_PROMPT_TOKENS and (is_exact or lengths[slot] <= slot.exact_tokens)
            slot.exact_tokens = EXACT_TOKENS if is_short else min(lengths[slot], slot.exact_tokens)
            if state is not None:
                slot.exact_tokens = 0
                known = known if await self._restore(state, slot) else 0
            if self._files is not None and not is_exact and not generation.output_tokens:
                slot.exact_tokens = 0
                generation.row.restored_tokens = await self._files.restore(generation, slot, known=known)
            if slot.scope not in (scope, SHARED):
                # If the request is cancelled here, the content of the slot is not known.
                slot.scope = None
                await self._connection.post(f"/slots/{slot.id}?action=erase", {})
            slot.scope, slot.tokens = scope, prompt
        return slot

    def _choose(
        self, generation: LlamaGeneration, lengths: Mapping[Slot, int], tokens: int, refused: Collection[Slot]
    ) -> Slot:
        """Return a slot that no other generation uses.

        It is next to those in use, unless another free slot has a longer prefix that cannot be copied.

        Args:
            lengths: Length of the prefix of the prompt that each slot has, in tokens.
            tokens: Number of tokens of the prompt.
        """
        running = self._running()
        used = {slot.id for slot in self._slots if slot.user in running and slot.user is not generation}

        def rank(slot: Slot) -> tuple[int, bool, float]:
            usable = lengths[slot] if lengths[slot] > MIN_SIMILARITY * tokens else 0
            return usable, not slot.lock.locked(), -slot.used_at

        def neighbours(slot: Slot) -> int:
            return len({slot.id - 1, slot.id + 1} & used)

        free = [slot for slot in self._slots if slot.id not in used]
        best, beside = max(free, key=rank), max(free, key=lambda slot: (neighbours(slot), rank(slot)))
        gain = rank(best)[0] - lengths[beside]
        is_copied = best not in refused and self._limit_bytes and _is_worth_copying(best.tokens, gain)
        return beside if gain < MIN_GAIN_TOKENS or is_copied else best

    async def _publish(self, source: Slot, generation: LlamaGeneration, length: int, known: int) -> bool:
        """Save the state of a slot as soon as llama.cpp does not compute it.

        Args:
            length: Number of tokens of its state that the generation needs.
            known: Number of tokens that the generation has from elsewhere.

        Returns:
            Whether slots and saved states should be compared again: the state was saved in time, or the generation that
            used the slot has left it.
        """
        user = source.user if source.user is not generation and source.user in self._running() else None
        wait_s = END_S if user is None else self._patience_s(user, length - known)
        source.awaited = (*source.awaited, length)
        try:
            async with asyncio.timeout(wait_s):
                await source.lock.acquire()
        except TimeoutError:
            return False
        finally:
            awaited = list(source.awaited)
            awaited.remove(length)
            source.awaited = tuple(awaited)
        try:
            if user is not None and user not in self._running():
                return True
            await self._save(source)
        finally:
            source.lock.release()
        return any(
            saved.scope == source.scope and shared_length(source.tokens, saved.tokens) > known for saved in self._saved
        )

    def _patience_s(self, user: LlamaGeneration, missing: int) -> float:
        """Return how long to wait for the state of a slot in use before the missing tokens are computed instead."""
        computing_s, tokens = missing * self.token_s, user.output_tokens
        if user.row.can_continue(user):
            return END_S
        if not tokens:
            # It is interrupted as soon as it has computed these tokens.
            return computing_s
        token_s = (time.perf_counter() - user.first_token_at) / tokens
        is_soon = (user.max_tokens - tokens) * token_s < computing_s
        return computing_s if is_soon else max(PATIENCE * computing_s, PATIENCE_TOKENS * token_s)

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
        # A request that was cancelled has computed only a part of its prompt.
        tokens = tokens[: int(written["n_saved"])]
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


def _is_worth_copying(tokens: list[int], gain: int) -> bool:
    """Return whether a state with these tokens is copied faster than ``gain`` tokens are computed."""
    return gain >= MIN_GAIN_TOKENS + len(tokens) // COPIED_TOKENS

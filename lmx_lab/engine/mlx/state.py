"""The engine's state and its steps. Everything here happens on the engine thread; only ``snapshot`` is read elsewhere.

MLX streams are thread-local: arrays made here stay here. What leaves is ints, floats, strings and numpy arrays.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lmx_lab.engine.cpu_blas import ThreadChoice, configure_blas
from lmx_lab.engine.encoders import LoadedEncoder, load_encoder
from lmx_lab.engine.interface import NOTHING_LOADED
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.encoding import EncodeJob, Encoding
from lmx_lab.engine.mlx.loop import Generating
from lmx_lab.engine.mlx.model import LoadedModel, load_chat
from lmx_lab.engine.mlx.request import Generation
from lmx_lab.errors import EngineDeadError, LabError, NotLoadedError, OutOfMemoryError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot, EngineState, PinnedModel, UnloadCause
from lmx_lab.values.models import Kind, LoadReport, ModelEntry
from lmx_lab.weights.files import check_files
from lmx_lab.weights.fingerprint import is_loaded, require_unchanged, with_marks

T = TypeVar("T")
log = logging.getLogger(__name__)
Loaded = LoadedModel | LoadedEncoder
ENCODE_S = 0.1
"""How long a step computes texts while no answer is generated: every command waits for its end."""
LEAST_ENCODE_S = 0.01


@dataclass(kw_only=True)
class Swap:
    """A load or unload that waits for running requests to end, until ``deadline`` at the latest."""

    perform: Callable[[], Any]
    why: str
    """What the requests that do not end in time are told."""
    deadline: float
    finish_queued: bool
    """Whether requests in the queue are still served before it."""
    pinned_too: bool
    """Whether requests to pinned models have to end as well."""
    done: Future[Any] = field(default_factory=Future)


class EngineCore:
    """The models in memory and what is done with them: one *main* model of any kind, and pinned encoders beside it."""

    def __init__(self, settings: Settings, *, beside_bytes: Callable[[], int] = lambda: 0) -> None:
        """
        Args:
            beside_bytes: What other engines take of the memory limit.
        """
        self._settings = settings
        self._others_bytes = beside_bytes
        self._limit_bytes = memory.limit_bytes(settings.memory_limit_bytes)
        self._main: Loaded | None = None
        self._pinned: dict[Kind, LoadedEncoder] = {}
        report = configure_blas(settings.blas, settings.threads)
        threads = ThreadChoice(report)
        self.generating = Generating(settings, threads, limit_bytes=self._limit_bytes)
        self.encoding = Encoding(
            threads,
            queue_limit=settings.slots + settings.queue_limit,
            limit_bytes=self._limit_bytes,
            make_room=self.generating.shrink_prefixes,
            note_peak=self.generating.note_peak,
        )
        self._swaps: deque[Swap] = deque()
        self._used_at = time.perf_counter()
        self.snapshot = EngineSnapshot(
            memory_total_bytes=memory.total_bytes(), progress_at=time.perf_counter(), blas=report
        )

    @property
    def main(self) -> Loaded | None:
        """The loaded model; its tokenizer may be used by the threads that turn texts into tokens."""
        return self._main

    def encoders(self) -> list[LoadedEncoder]:
        """Those in memory, the pinned ones first."""
        pinned = list(self._pinned.values())
        return [*pinned, self._main] if isinstance(self._main, LoadedEncoder) else pinned

    # Commands

    @property
    def idle(self) -> bool:
        """Nothing to do until a command comes."""
        return self.generating.idle and self.encoding.idle and not self._swaps

    @property
    def idle_left_s(self) -> float | None:
        """How long until the model has been idle for too long; None when that is no matter."""
        if self._settings.idle_unload_s is None or self._main is None or not self.idle:
            return None
        used_at = max(self._used_at, self.generating.ended_at)
        return max(0.0, used_at + self._settings.idle_unload_s - time.perf_counter())

    def submit(self, generations: Sequence[Generation]) -> None:
        """Take the answers to one request into the queue, all or none.

        Raises:
            NotLoadedError: its model has gone, or is about to.
            QueueFullError: too many wait.
        """
        first = generations[0]
        if self._swaps or self._main is None or first.model() is not self._main:
            raise _is_going(first.model_id)
        self.generating.add(generations)
        self._publish()

    def cancel(self, generation: Generation) -> None:
        """The reader has left: free the slot, tell nobody."""
        self.generating.cancel(generation)

    def encode(self, job: EncodeJob) -> None:
        """Take texts into the queue.

        Raises:
            NotLoadedError: their model has gone, or is about to.
            QueueFullError: too many wait.
        """
        encoder = job.encoder()
        if encoder is None or encoder not in self.encoders() or any(self._touched(swap, [job]) for swap in self._swaps):
            raise _is_going(job.model_id)
        self.encoding.add(job)
        self._publish()

    def give_up(self, job: EncodeJob) -> None:
        """Nobody waits for these texts any more."""
        self.encoding.cancel(job)
        self._publish()

    def swap(
        self,
        perform: Callable[[], T],
        *,
        why: str,
        timeout_s: float,
        finish_queued: bool = False,
        pinned_too: bool = False,
    ) -> Future[T]:
        """Change the model by ``perform`` once running requests have ended, at most ``timeout_s`` from now.

        Swaps happen one after the other, in the order asked for, whether or not somebody still waits for the result.
        From now until then no request is taken; those in the queue end with an error, or are served first. Pinned
        models go on answering, unless ``pinned_too``.
        """
        swap = Swap(
            perform=perform,
            why=why,
            deadline=time.perf_counter() + timeout_s,
            finish_queued=finish_queued,
            pinned_too=pinned_too,
        )
        if not finish_queued:
            error = NotLoadedError(f"{why} before this request began; ask again when a model is loaded")
            self.generating.end_all(self.generating.queued, error)
            self.encoding.end_all(self._touched(swap, self.encoding.queued), error)
        # Marked as running, it cannot be cancelled by a caller who leaves.
        swap.done.set_running_or_notify_cancel()
        self._swaps.append(swap)
        return swap.done

    def already(self, entry: ModelEntry) -> LoadReport | None:
        """The report of loading what is loaded, and stays so: nobody need be drained for it."""
        if self._swaps or self._main is None or not is_loaded(self._main.entry, entry):
            return None
        return LoadReport(model=entry.id, load_s=0.0, memory_bytes=self._main.memory_bytes)

    def load(self, entry: ModelEntry) -> LoadReport:
        """Put ``entry`` in the place of what is loaded; on failure, load that again and say so in the error."""
        # Files that would block a load or never end are refused while the current model still serves.
        check_files(entry.path)
        previous = self._main.entry if self._main else None
        started = time.perf_counter()
        self.unload()
        failure = self._bring_up(entry)
        if failure is not None:
            restored = self._restore(previous)
            self._publish()
            raise type(failure)(f"{failure.message}{restored}", param=failure.param)
        self._publish()
        assert self._main is not None
        return LoadReport(model=entry.id, load_s=time.perf_counter() - started, memory_bytes=self._main.memory_bytes)

    def pin(self, entry: ModelEntry) -> LoadReport:
        """Keep an encoder in memory from now on, in the place of the one of its kind; the main model is not touched."""
        started = time.perf_counter()
        before = self._pinned.get(entry.kind)
        if before is None or not is_loaded(before.entry, entry):
            failure = self._bring_up(entry, pinned=True)
            if failure is not None:
                raise failure
        self._publish()
        pinned = self._pinned[entry.kind]
        return LoadReport(model=entry.id, load_s=time.perf_counter() - started, memory_bytes=pinned.memory_bytes)

    def unpin(self, kind: Kind) -> None:
        """Keep the encoder of this kind no more. What it was asked for and has not done ends with an error."""
        pinned = self._pinned.get(kind)
        if pinned is None or pinned is self._main:
            self._pinned.pop(kind, None)
            return
        mine = [job for job in self.encoding.queued + self.encoding.running if job.encoder() is pinned]
        self.encoding.end_all(mine, NotLoadedError(f"{pinned.entry.id} was unloaded before this request ended"))
        del self._pinned[kind], pinned, mine
        self._share()
        memory.release()
        self._publish()

    def unload(self, cause: UnloadCause = "asked") -> int:
        """Drop the model and return the bytes that this freed, measured. Whatever still runs ends with an error."""
        self._end_main(NotLoadedError("the model was unloaded before this request ended"))
        unloaded = self._main.entry.id if self._main else self.snapshot.unloaded_model
        before = memory.used_bytes()
        self._main = None
        self.generating.use(None)
        memory.release()
        self.snapshot = replace(self.snapshot, unloaded_model=unloaded, unload_cause=cause if unloaded else None)
        self._publish()
        return max(0, before - memory.used_bytes())

    def unload_if_idle(self) -> None:
        """Unload a model that nobody has used for the time set."""
        if self.idle_left_s == 0:
            log.info("%s was not used for %g s", self.snapshot.model, self._settings.idle_unload_s)
            self.unload("idle")

    def close(self, error: LabError) -> None:
        """The thread ends: every request gets its end, MLX its memory."""
        self._end_main(error)
        self.encoding.end_all(self.encoding.queued + self.encoding.running, error)
        while self._swaps:
            self._swaps.popleft().done.set_exception(error)
        self._main = None
        self._pinned.clear()
        self.generating.use(None)
        memory.release()
        self._publish(state="dead" if isinstance(error, EngineDeadError) else "empty")

    def _bring_up(self, entry: ModelEntry, *, pinned: bool = False) -> LabError | None:
        """Load, or return why not: an exception would hold frames, and with them the weights, in memory."""
        if not pinned:
            self._publish(state="loading")
        if (there := self._in_memory(entry)) is not None:
            self._take_in(there, pinned=pinned)
            return None
        try:
            model = self._read(entry, limit_bytes=self._limit_bytes - self._bytes_beside(entry, pinned=pinned))
        except LabError as exc:
            failure = type(exc)(exc.message, param=exc.param)
        except Exception as exc:
            log.exception("%s could not be loaded", entry.id)
            what = f"{type(exc).__name__}: {exc}"
            failure = UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {what}", param="model")
        else:
            self._take_in(model, pinned=pinned)
            return None
        memory.release()
        return failure

    def _read(self, entry: ModelEntry, *, limit_bytes: int) -> Loaded:
        entry, load = with_marks(entry), load_chat if entry.kind == "chat" else load_encoder
        check_files(entry.path)
        model: Loaded = load(entry, limit_bytes=limit_bytes, dtype=self._settings.dtype)
        require_unchanged(entry)
        return model

    def _in_memory(self, entry: ModelEntry) -> LoadedEncoder | None:
        """An encoder that is pinned already, or loaded, serves as both."""
        return next((model for model in self.encoders() if is_loaded(model.entry, entry)), None)

    def _bytes_beside(self, entry: ModelEntry, *, pinned: bool) -> int:
        """What is in memory and stays there when the entry comes."""
        pins = [model.memory_bytes for kind, model in self._pinned.items() if not (pinned and kind == entry.kind)]
        return self._others_bytes() + sum(pins) + (self._main.memory_bytes if pinned and self._main else 0)

    def _take_in(self, model: Loaded, *, pinned: bool) -> None:
        if pinned:
            assert isinstance(model, LoadedEncoder)
            self._pinned[model.entry.kind] = model
            self._share()
            memory.release()
            return
        self._main = model
        self._share()
        self.generating.use(model if isinstance(model, LoadedModel) else None)
        self._used_at = time.perf_counter()
        self.snapshot = replace(self.snapshot, unloaded_model=None, unload_cause=None)

    def _share(self) -> None:
        """Tell who generates how much of the limit is taken."""
        self.generating.share(self._others_bytes() + sum(pin.memory_bytes for pin in self._pinned.values()))

    def _restore(self, previous: ModelEntry | None) -> str:
        if previous is None:
            return NOTHING_LOADED
        failure = self._bring_up(previous)
        if failure is not None:
            return f"; the previous model {previous.id} could not be loaded again either: {failure.message}"
        return f"; the previous model {previous.id} is loaded again"

    # Steps

    def step(self) -> None:
        """One round: a step of the answers, about as long for texts, one delivery per reader's loop."""
        started = time.perf_counter()
        busy = not self.generating.idle
        try:
            self.generating.step()
        except OutOfMemoryError as exc:
            self.encoding.end_all(self._of_main(self.encoding.running + self.encoding.queued), exc)
            self.unload("memory")
        if not self.encoding.idle:
            self._encode(time.perf_counter() - started, busy=busy)
        self._settle_swaps()
        self._publish()

    def _encode(self, generating_s: float, *, busy: bool) -> None:
        uses_main = bool(self._of_main(self.encoding.running + self.encoding.queued))
        self.encoding.step(max(generating_s, LEAST_ENCODE_S) if busy else ENCODE_S, busy=busy)
        if uses_main:
            self._used_at = time.perf_counter()

    def _settle_swaps(self) -> None:
        while self._swaps:
            swap = self._swaps[0]
            if time.perf_counter() > swap.deadline:
                error = NotLoadedError(f"{swap.why} before this request ended")
                self._end_main(error)
                self.encoding.end_all(self._touched(swap, self.encoding.queued + self.encoding.running), error)
            running = [*self.generating.running, *self._touched(swap, self.encoding.running)]
            queued = [*self.generating.queued, *self._touched(swap, self.encoding.queued)]
            if running or (swap.finish_queued and queued):
                return
            self._swaps.popleft()
            try:
                swap.done.set_result(swap.perform())
            except Exception as exc:
                swap.done.set_exception(exc)

    def _touched(self, swap: Swap, jobs: Sequence[EncodeJob]) -> list[EncodeJob]:
        """Those that have to end before it."""
        return list(jobs) if swap.pinned_too else self._of_main(jobs)

    def _of_main(self, jobs: Sequence[EncodeJob]) -> list[EncodeJob]:
        pinned = list(self._pinned.values())
        return [job for job in jobs if job.encoder() not in pinned]

    def _end_main(self, error: LabError) -> None:
        """End the requests of the main model."""
        self.generating.end_all(self.generating.queued + self.generating.running, error)
        self.encoding.end_all(self._of_main(self.encoding.queued + self.encoding.running), error)

    def _publish(self, state: EngineState | None = None) -> None:
        """Renew the snapshot, then hand each reader's loop its items in one call, and texts their rows."""
        main, generating, totals = self._main, self.generating, self.generating.totals
        self.snapshot = replace(
            self.snapshot,
            state=state or ("ready" if main else "empty"),
            entry=main.entry if main else None,
            model_memory_bytes=main.memory_bytes if main else 0,
            context_length=main.context_length if main else None,
            pinned=tuple(PinnedModel(entry=it.entry, memory_bytes=it.memory_bytes) for it in self._pinned.values()),
            active_requests=len(generating.running) + len(self.encoding.running),
            queued_requests=len(generating.queued) + len(self.encoding.queued),
            encode_requests=len(self.encoding.running) + len(self.encoding.queued),
            prefix_cache_bytes=generating.prefix_cache_bytes,
            place_free_s=generating.place_free_s,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            output_tokens=totals.output_tokens,
            encoded_tokens=self.encoding.tokens,
            memory_used_bytes=memory.used_bytes(),
            memory_peak_bytes=max(self.snapshot.memory_peak_bytes, memory.used_bytes()),
            progress_at=time.perf_counter(),
        )
        self.encoding.deliver()
        if generating.deliver():
            self._publish(state)


def _is_going(model: str) -> NotLoadedError:
    return NotLoadedError(f"{model} is being unloaded; load a model first: POST /admin/models/load")

"""Hold the models of the MLX engine, and perform its steps. Everything here runs on the engine thread.

Other threads read only ``snapshot``, ``failure`` and the models in memory. MLX streams are thread-local, so MLX arrays
are used on this thread only. Results are ints, floats, strings and numpy arrays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lmx_lab.engine.admission import LOAD_FIRST, AdmissionControl
from lmx_lab.engine.cpu_blas import ThreadChoice, configure_blas
from lmx_lab.engine.encoders import LoadedEncoder, load_encoder
from lmx_lab.engine.interface import EngineHost
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.batch import MlxGeneration
from lmx_lab.engine.mlx.encoding import EncodeJob, EncodingLoop
from lmx_lab.engine.mlx.loop import GenerationLoop
from lmx_lab.engine.mlx.model import LoadedModel, load_chat
from lmx_lab.engine.mlx.prefill import PREFILL_STEP_S
from lmx_lab.engine.mlx.steering import RequestSteering
from lmx_lab.engine.mlx.tracing import TraceJob, TraceLoop
from lmx_lab.errors import EngineDeadError, LabError, NotLoadedError, OutOfMemoryError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot, EngineState, PinnedModel
from lmx_lab.values.models import Kind, LoadReport, LoadSpec, ModelEntry
from lmx_lab.weights.files import check_files
from lmx_lab.weights.fingerprint import is_loaded, require_unchanged

log = logging.getLogger(__name__)
Loaded = LoadedModel | LoadedEncoder


class MlxCore:
    """The models in memory, one *main* model of any kind, pinned encoders in addition to it, and their requests."""

    encode_s = 0.1
    """Time for which a step computes texts while no answer is generated. Commands wait for the end of the step."""

    def __init__(self, settings: Settings, host: EngineHost, post: Callable[[Callable[[], object]], object]) -> None:
        self._settings = settings
        self._host = host
        self._limit_bytes = memory.limit_bytes(settings.memory_limit_bytes)
        memory.limit_kept_bytes(self._limit_bytes)
        # Models with the entries of their loads, because one encoder may be both the main model and pinned.
        self._main: tuple[ModelEntry, Loaded] | None = None
        self._pinned: dict[Kind, tuple[ModelEntry, LoadedEncoder]] = {}
        report = configure_blas(settings.blas, settings.threads)
        self._threads = threads = ThreadChoice(report)
        self._mean_s = 0.0
        self._ended: EngineState | None = None
        """The state after ``close``."""
        self.generating = GenerationLoop(
            settings,
            threads,
            turns=host.turns,
            blas=report,
            limit_bytes=self._limit_bytes,
            used_bytes=self._used_bytes,
            other_bytes=self._other_bytes,
            on_change=self._publish,
            post=post,
        )
        self._deliver = self.generating.answers.deliver
        self.encoding = EncodingLoop(
            threads,
            limit_bytes=self._limit_bytes,
            used_bytes=self._used_bytes,
            make_room=self.generating.shrink_prefixes,
            note_peak=self.generating.note_peak,
        )
        self.tracing = TraceLoop(
            threads,
            limit_bytes=self._limit_bytes,
            used_bytes=self._used_bytes,
            trace_bytes=settings.trace_bytes,
            make_room=self.generating.shrink_prefixes,
            note_peak=self.generating.note_peak,
        )
        self.failure: LabError | None = None
        """Why the main model left memory without ``unload``."""
        self.snapshot = EngineSnapshot(
            memory_total_bytes=memory.total_bytes(),
            memory_is_of_device=memory.is_of_device(),
            progress_at=time.perf_counter(),
            blas=report,
        )

    @property
    def main(self) -> Loaded | None:
        """The main model. Threads that tokenize may use its tokenizer."""
        return self._main[1] if self._main is not None else None

    def _in_memory(self) -> list[tuple[ModelEntry, Loaded]]:
        """Return the pinned models and the main one, with their entries."""
        return [*list(self._pinned.values()), *([self._main] if self._main is not None else [])]

    def model_of(self, entry: ModelEntry) -> Loaded:
        """Return the model in memory that was loaded or pinned with this entry object. May be called from any thread.

        Raises:
            NotLoadedError, OutOfMemoryError: the model is no longer in memory.
        """
        for loaded_entry, model in self._in_memory():
            if loaded_entry is entry:
                return model
        if (failure := self.failure) is not None:
            raise type(failure)(failure.message)
        raise NotLoadedError(f"{entry.id} has been unloaded; {LOAD_FIRST}")

    # Commands

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute until the next command."""
        idle = self.generating.idle and self.encoding.idle and self.tracing.idle
        return idle and not self.generating.is_saving

    def submit(self, generations: Sequence[MlxGeneration]) -> None:
        """Queue the answers to one request.

        Raises:
            NotLoadedError: the model has been unloaded, or is about to be.
            InvalidRequestError: the request has vectors that do not fit the model.
        """
        first = generations[0]
        first.permit.check()
        model = first.row.model()
        if model is None or model is not self.main:
            raise NotLoadedError(f"{first.model} has been unloaded; {LOAD_FIRST}")
        if first.request.steer:
            steering = RequestSteering.of(first.request.steer, model.hook_points)
            for generation in generations:
                generation.row.steering = steering
        self.generating.add(generations)
        self._deliver()

    def encode(self, job: EncodeJob) -> None:
        """Queue the texts of a request.

        Raises:
            NotLoadedError: the model has been unloaded, or is about to be.
            QueueFullError: the texts of all requests together are too long.
        """
        job.permit.check()
        encoder = job.encoder()
        if encoder is None or all(encoder is not model for _, model in self._in_memory()):
            raise NotLoadedError(f"{job.model_id} has been unloaded; {LOAD_FIRST}")
        self.encoding.add(job)
        self._deliver()

    def cancel_encoding(self, job: EncodeJob) -> None:
        """Cancel texts whose result is no longer needed."""
        self.encoding.cancel(job)
        self._deliver()

    def trace(self, job: TraceJob) -> None:
        """Queue a trace.

        Raises:
            NotLoadedError: the model has been unloaded, or is about to be.
        """
        job.permit.check()
        model = job.model()
        if model is None or model is not self.main:
            raise NotLoadedError(f"{job.model_id} has been unloaded; {LOAD_FIRST}")
        self.tracing.add(job)
        self._deliver()

    def cancel_trace(self, job: TraceJob) -> None:
        """Cancel a trace that is no longer needed."""
        self.tracing.cancel(job)
        self._deliver()

    def end_requests(self, admission: AdmissionControl, error: LabError, *, queued_only: bool) -> None:
        """End the requests that hold permits of this admission control."""
        self.generating.answers.end_requests(admission, error, queued_only=queued_only)
        self.encoding.end_requests(admission, error, queued_only=queued_only)
        self.tracing.end_requests(admission, error, queued_only=queued_only)
        self._deliver()

    def load(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """Load the main model. Called only while there is no main model.

        Raises:
            LabError: the model could not be loaded; the memory is released.
        """
        started = time.perf_counter()
        model = self._encoder_in_memory(entry) or self._read(entry, spec, self._limit_bytes - self._other_bytes())
        if isinstance(model, LabError):
            self._deliver()
            raise model
        self._main, self.failure = (entry, model), None
        self.snapshot = replace(self.snapshot, unloaded_model=None, unload_cause=None)
        self.generating.use(
            model if isinstance(model, LoadedModel) else None, prompt_lookup=spec.prompt_lookup is not False
        )
        self._deliver()
        return self.snapshot.load_report(time.perf_counter() - started)

    def pin(self, entry: ModelEntry, spec: LoadSpec) -> LoadReport:
        """Load an encoder in addition to the main model, in place of the pinned encoder of the same kind.

        Raises:
            LabError: the encoder could not be loaded; nothing has changed.
        """
        started = time.perf_counter()
        other_bytes = self._other_bytes(excluding=entry.kind) + (self.main.memory_bytes if self.main is not None else 0)
        model = self._encoder_in_memory(entry) or self._read(entry, spec, self._limit_bytes - other_bytes)
        if isinstance(model, LabError):
            raise model
        assert isinstance(model, LoadedEncoder)
        self._pinned[entry.kind] = (entry, model)
        memory.release()
        self._deliver()
        load_time_ms = (time.perf_counter() - started) * 1e3
        return LoadReport(model=entry.id, load_time_ms=load_time_ms, vram_gb=model.memory_bytes / 1e9)

    def unpin(self, kind: Kind) -> None:
        """Drop the pinned encoder of this kind. Its requests end with an error, unless it is also the main model."""
        entry, pinned = self._pinned.pop(kind, (None, None))
        if entry is not None and pinned is not self.main:
            jobs = [job for job in self.encoding.queued + self.encoding.running if job.encoder() is pinned]
            self.encoding.end_all(jobs, NotLoadedError(f"{entry.id} was unloaded before this request ended"))
            del jobs
        del pinned
        memory.release()
        self._deliver()

    def unload(self) -> int:
        """Drop the main model, and return the measured number of bytes that this released. Remaining requests end."""
        self._end_main(NotLoadedError("the model was unloaded before this request ended"))
        before = memory.used_bytes()
        self._drop_main()
        self.failure = None
        self.snapshot = replace(self.snapshot, unloaded_model=None, unload_cause=None)
        self._deliver()
        return max(0, before - memory.used_bytes())

    def close(self, error: LabError) -> None:
        """End every request with this error, and release all memory. Called at the end of the thread."""
        self.generating.answers.end_all(error)
        self.encoding.end_all(self.encoding.queued + self.encoding.running, error)
        self.tracing.end_all(self.tracing.queued + self.tracing.running, error)
        self.failure = error
        self._pinned.clear()
        self._drop_main()
        self._ended = "dead" if isinstance(error, EngineDeadError) else "empty"
        self._deliver()

    def _read(self, entry: ModelEntry, spec: LoadSpec, limit_bytes: int) -> Loaded | LabError:
        """Load a model and return it, or return the error. A raised exception would refer to frames, and so keep the
        weights in memory.
        """
        try:
            check_files(entry.path)
            dtype = self._settings.dtype
            model: Loaded = (
                load_chat(entry, limit_bytes=limit_bytes, dtype=dtype, context_length=spec.context_length)
                if entry.kind == "chat"
                else load_encoder(entry, limit_bytes=limit_bytes, dtype=dtype)
            )
            require_unchanged(entry)
        except LabError as exc:
            failure = type(exc)(exc.message, param=exc.param)
        except Exception as exc:
            log.exception("%s could not be loaded", entry.id)
            what = f"{type(exc).__name__}: {exc}"
            failure = UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {what}", param="model")
        else:
            return model
        memory.release()
        return failure

    def _encoder_in_memory(self, entry: ModelEntry) -> LoadedEncoder | None:
        """Return the encoder in memory that was loaded from the same files; None if there is none."""
        for loaded_entry, model in self._in_memory():
            if isinstance(model, LoadedEncoder) and is_loaded(loaded_entry, entry):
                return model
        return None

    def _other_bytes(self, *, excluding: Kind | None = None) -> int:
        """Return the memory of other engines and of the pinned models, except the one of the kind ``excluding``."""
        pinned = sum(model.memory_bytes for kind, (_, model) in self._pinned.items() if kind != excluding)
        return (0 if memory.is_of_device() else self._host.used_by_others()) + pinned

    def _used_bytes(self) -> int:
        """Return the memory that MLX uses and, unless its models are on a GPU, that of other engines."""
        return memory.used_bytes() + (0 if memory.is_of_device() else self._host.used_by_others())

    # Steps

    def step(self) -> None:
        """Perform one step of the answers, work on texts and traces for about the time of their tokens, and deliver the
        results to the loop of each reader.
        """
        started = time.perf_counter()
        busy = not self.generating.idle
        lost = False
        try:
            self.generating.step()
        except OutOfMemoryError as exc:
            model = self.snapshot.model
            self._end_main(exc)
            self._drop_main()
            why = f"{model} was unloaded because memory ran out; load it again, or a smaller one"
            self.failure = OutOfMemoryError(why)
            self.snapshot = replace(self.snapshot, unloaded_model=model, unload_cause="memory")
            lost = True
        traces = not self.tracing.idle and not lost
        if traces and busy:
            # The step only starts the computation of the next tokens. Its time is known when the computation has ended.
            self._threads.wait()
        limit_s = time.perf_counter() - started
        if traces and busy:
            # The step may have been slow because other programs used the processors, so the mean limits its time.
            self._mean_s += 0.2 * (limit_s - self._mean_s) if self._mean_s else limit_s
            limit_s = min(limit_s, self._mean_s)
        if not self.encoding.idle:
            limit_s /= 2 if traces else 1
            # Beside a part of a prompt, texts do not get the time of this part as well.
            encode_s = min(limit_s, self.generating.decode_s or limit_s)
            self.encoding.step(max(encode_s, 0.01) if busy else self.encode_s, busy=busy)
        if traces:
            self.tracing.step(limit_s if busy else PREFILL_STEP_S, busy=busy)
        self._deliver()
        if lost:
            self._host.lost_model(False)

    def _drop_main(self) -> None:
        self._main = None
        self.generating.use(None)
        memory.release()

    def _end_main(self, error: LabError) -> None:
        """End the requests of the main model."""
        self.generating.answers.end_all(error)
        pinned = [model for _, model in self._pinned.values()]
        jobs = [job for job in self.encoding.queued + self.encoding.running if job.encoder() not in pinned]
        self.encoding.end_all(jobs, error)
        self.tracing.end_all(self.tracing.queued + self.tracing.running, error)

    def _publish(self) -> None:
        """Replace the snapshot, then deliver the results of texts and traces."""
        entry, main = self._main or (None, None)
        answers, totals = self.generating.answers, replace(self.generating.totals)
        answers.count(totals)
        used_bytes = memory.used_bytes()
        encoded, traced = self.encoding.counts(), self.tracing.counts()
        generating, encoding, tracing = self.generating, self.encoding, self.tracing
        self.snapshot = replace(
            self.snapshot,
            state=self._ended or ("ready" if main else "empty"),
            entry=entry,
            model_memory_bytes=main.memory_bytes if main else 0,
            context_length=main.context_length if main else None,
            slots=self._settings.slots if isinstance(main, LoadedModel) else None,
            pinned=tuple(
                PinnedModel(entry=entry, memory_bytes=model.memory_bytes) for entry, model in self._pinned.values()
            ),
            active_requests=len(answers.scheduler.running) + encoded[0] + traced[0],
            queued_requests=len(answers.scheduler.queued) + encoded[1] + traced[1],
            encode_requests=sum(encoded),
            prefix_cache_bytes=generating.prefix_cache_bytes,
            slot_free_s=answers.slot_free_s,
            memory_used_bytes=used_bytes,
            memory_peak_bytes=max(self.snapshot.memory_peak_bytes, used_bytes),
            progress_at=time.perf_counter(),
            totals=replace(totals, encoded_tokens=encoding.tokens),
        )
        encoding.deliver()
        tracing.deliver()

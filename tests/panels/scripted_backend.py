"""A backend whose results are set by tests, and a reader of panels without a browser."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, Self

from lmx_lab.backend import AnswerCost, DocumentRanking, Progress, ServerState
from lmx_lab.panels.panel import Panel
from lmx_lab.panels.workbench import Workbench
from lmx_lab.server.translate import timings, usage
from lmx_lab.values.encoding import Vectors
from lmx_lab.values.generation import Delta, FinishReason, GenerationReport
from lmx_lab.values.models import LoadReport, LoadSpec
from lmx_lab.wire.admin import ModelEvent, ModelRecord, ModelRecords, Preference, RequestEvent, Sample
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody

WAIT_S = 60.0
LOOK_S = 0.1


class ScriptedAnswer:
    """An answer whose deltas come from a queue. A text there is a status, a cost ends the answer, None does too."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self.status = "sent"
        self._backend = backend
        self._cost: AnswerCost | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            while not self._ended:
                step = await _next(self._backend.steps)
                if isinstance(step, Delta):
                    return step
                if isinstance(step, str):
                    self.status = step
                else:
                    self._cost, self._ended = step, True
        except Exception:
            self._ended = True
            raise
        raise StopAsyncIteration

    def cost(self) -> AnswerCost:
        assert self._cost is not None, "the test gives no cost"
        return self._cost

    def close(self) -> None:
        self._backend.stopped += not self._ended
        self._ended = True


class ScriptedBackend:
    """A ``Backend`` whose results come from queues; an exception in a queue is raised."""

    def __init__(self) -> None:
        self.now = ServerState(state="running", place="the kernel's loop", url="http://127.0.0.1:8400")
        self.measured: Sample | None = None
        self.preference: Preference | None = None
        self.records = [record("tiny"), record("tiny-two")]
        self.scans = 0
        self.requests: list[tuple[str, Any]] = []
        self.loads: asyncio.Queue[Any] = asyncio.Queue()
        self.unloads: asyncio.Queue[Any] = asyncio.Queue()
        self.published: asyncio.Queue[Any] = asyncio.Queue()
        self.steps: asyncio.Queue[Any] = asyncio.Queue()
        """The steps of answers: see ``ScriptedAnswer``."""
        self.rankings: asyncio.Queue[Any] = asyncio.Queue()
        self.stopped = 0
        """Number of answers that were stopped before their end."""

    def set_state(self, **values: Any) -> None:
        self.now = replace(self.now, **values)

    def state(self) -> ServerState:
        return self.now

    def sample(self) -> Sample | None:
        return self.measured

    async def events(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        while True:
            yield await _next(self.published)

    async def models(self) -> ModelRecords:
        self.scans += 1
        return ModelRecords(models=list(self.records), preference=self.preference)

    async def load(self, spec: LoadSpec, *, progress: Progress | None = None) -> LoadReport:
        self.requests.append(("load", spec.model))
        await _next(self.loads)
        return LoadReport(model=spec.model, load_s=0.001, memory_bytes=100_000_000)

    async def cancel_load(self, model: str) -> None:
        self.requests.append(("cancel", model))

    async def unload(
        self, model: str | None = None, *, wait: bool | None = None, progress: Progress | None = None
    ) -> float:
        self.requests.append(("unload", self.now.model) if wait is None else ("unload", (model, wait)))
        return float(await _next(self.unloads))

    async def generate(self, request: ChatRequest, *, batch: bool = False) -> ScriptedAnswer:
        self.requests.append(("generate", request))
        return ScriptedAnswer(self)

    async def embed(self, body: EmbeddingsBody) -> Vectors:
        raise NotImplementedError

    async def rerank(self, body: RerankBody) -> DocumentRanking:
        self.requests.append(("rerank", (body.query, list(body.texts), body.top_n)))
        ranking: DocumentRanking = await _next(self.rankings)
        return ranking


async def _next(values: asyncio.Queue[Any]) -> Any:
    value = await values.get()
    if isinstance(value, BaseException):
        raise value
    return value


def delta(text: str = "", *, tokens: int = 1, reasoning: str = "") -> Delta:
    return Delta(text=text, tokens=tokens, reasoning=reasoning)


def cost(reason: FinishReason = "stop", tokens: int = 2) -> AnswerCost:
    """The cost of an answer at 31.5 tok/s."""
    report = GenerationReport(
        model="tiny",
        finish_reason=reason,
        prompt_tokens=9,
        cached_tokens=0,
        output_tokens=tokens,
        queue_s=0.0,
        prefill_s=0.1,
        ttft_s=0.12,
        decode_s=tokens / 31.54,
        peak_memory_bytes=0,
    )
    return AnswerCost(
        model="tiny", finish_reason=reason, usage=usage([report]), timings=timings(report), ttft_s=report.ttft_s
    )


def record(model: str, **fields: Any) -> ModelRecord:
    plain = {"loaded": False, "vram_gb": None, "format": "mlx", "kind": "chat", "size_gb": 0.25}
    return ModelRecord(
        **{"id": model, "path": f"/{model}", "quantization": None, "context_length": 512, **plain, **fields}
    )


class Refused(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Reader:
    """Sends requests to a panel as a view does, and waits for its state."""

    def __init__(self, panel: Panel, workbench: Workbench) -> None:
        self.panel = panel
        self._workbench = workbench
        self._numbers = map(str, itertools.count())
        self._replies: dict[str, queue.SimpleQueue[Any]] = {}
        self._changed = threading.Condition()
        self.frames: list[tuple[str, Any]] = []
        """Every trait that was set, and its value."""
        panel.send = self._receive  # type: ignore[method-assign]
        panel.observe(self._note)

    def ask(self, request: str, **fields: Any) -> Any:
        """Return the result of a request.

        Raises:
            Refused: the panel has refused the request.
        """
        reply = self.send(request, **fields).get(timeout=WAIT_S)
        if not reply["ok"]:
            raise Refused(**reply["error"])
        return reply["result"]

    def send(self, request: str, **fields: Any) -> queue.SimpleQueue[Any]:
        """Send a request without waiting; the queue receives its reply."""
        number = next(self._numbers)
        replies = self._replies[number] = queue.SimpleQueue()
        self.panel._handle_custom_msg({"id": number, "do": request, **fields}, [])
        return replies

    def until(self, condition: Callable[[Any], object]) -> None:
        """Wait until a condition is true of the panel. It is checked when a trait has changed, and regularly."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while not (met := condition(self.panel)) and time.monotonic() < deadline:
                self._changed.wait(LOOK_S)
        state = {name: getattr(self.panel, name) for name in self.panel.trait_names(sync=True) if name[0] != "_"}
        assert met, f"the condition was never true; the panel has {state}"

    def give(self, values: asyncio.Queue[Any], *given: Any) -> None:
        """Put values into a queue of the scripted backend."""

        async def put() -> None:
            for value in given:
                await values.put(value)

        self._workbench.submit(put()).result(WAIT_S)

    def _receive(self, content: Any, *_rest: Any) -> None:
        self._replies[content["id"]].put(content)

    def _note(self, change: Any) -> None:
        with self._changed:
            self.frames.append((change["name"], change["new"]))
            self._changed.notify_all()

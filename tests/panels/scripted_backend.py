"""What surrounds a panel in its tests: a lab that does exactly what a test says, and a reader without a browser."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmx_lab.backend import ChatPiece, Ranked, ServerState
from lmx_lab.panels.panel import Panel
from lmx_lab.panels.workbench import Workbench
from lmx_lab.wire.admin import LoadAnswer, ModelEvent, ModelRecord, ModelRecords, Preference, RequestEvent, Sample

WAIT_S = 60.0
LOOK_S = 0.1


class ScriptedSource:
    """A lab whose answers the test gives one by one: put a value into a queue, or an exception to be raised."""

    can_cancel_loads = True

    def __init__(self) -> None:
        self.now = ServerState(state="running", place="the kernel's loop", url="http://127.0.0.1:8400")
        self.figures: Sample | None = None
        self.preference: Preference | None = None
        self.records = [record("tiny"), record("tiny-two")]
        self.scans = 0
        self.asked: list[tuple[str, Any]] = []
        self.loads: asyncio.Queue[Any] = asyncio.Queue()
        self.unloads: asyncio.Queue[Any] = asyncio.Queue()
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.pieces: asyncio.Queue[Any] = asyncio.Queue()
        """None ends an answer."""
        self.rankings: asyncio.Queue[Any] = asyncio.Queue()
        self.left = 0
        """How many answers were left before their end."""

    def is_now(self, **values: Any) -> None:
        self.now = replace(self.now, **values)

    def state(self) -> ServerState:
        return self.now

    def sample(self) -> Sample | None:
        return self.figures

    async def models(self) -> ModelRecords:
        self.scans += 1
        return ModelRecords(models=list(self.records), preference=self.preference)

    async def load(self, model: str) -> LoadAnswer:
        self.asked.append(("load", model))
        await _given(self.loads)
        return LoadAnswer(model=model, load_time_ms=1.0, vram_gb=0.1)

    async def cancel_load(self, model: str) -> None:
        self.asked.append(("cancel", model))

    async def unload(self) -> float:
        self.asked.append(("unload", self.now.model))
        return float(await _given(self.unloads))

    async def progress(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        while True:
            yield await _given(self.events)

    async def chat(self, request: Mapping[str, Any]) -> AsyncGenerator[ChatPiece, None]:
        self.asked.append(("chat", request))
        try:
            while (piece := await _given(self.pieces)) is not None:
                yield piece
        except (GeneratorExit, asyncio.CancelledError):
            self.left += 1
            raise

    async def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> Ranked:
        self.asked.append(("rerank", (query, list(documents), top_n)))
        ranked: Ranked = await _given(self.rankings)
        return ranked


async def _given(values: asyncio.Queue[Any]) -> Any:
    value = await values.get()
    if isinstance(value, BaseException):
        raise value
    return value


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
    """Asks a panel as a view does, and waits for what it shows."""

    def __init__(self, panel: Panel, workbench: Workbench) -> None:
        self.panel = panel
        self._workbench = workbench
        self._numbers = map(str, itertools.count())
        self._replies: dict[str, queue.SimpleQueue[Any]] = {}
        self._changed = threading.Condition()
        self.frames: list[tuple[str, Any]] = []
        """Every trait that was set, and to what."""
        panel.send = self._hear  # type: ignore[method-assign]
        panel.observe(self._note)

    def ask(self, what: str, **fields: Any) -> Any:
        """The result.

        Raises:
            Refused: what else the panel has answered.
        """
        reply = self.tell(what, **fields).get(timeout=WAIT_S)
        if not reply["ok"]:
            raise Refused(**reply["error"])
        return reply["result"]

    def tell(self, what: str, **fields: Any) -> queue.SimpleQueue[Any]:
        """Ask without waiting; the reply comes into the queue."""
        number = next(self._numbers)
        replies = self._replies[number] = queue.SimpleQueue()
        self.panel._handle_custom_msg({"id": number, "do": what, **fields}, [])
        return replies

    def until(self, holds: Callable[[Any], object]) -> None:
        """Wait until it holds of the panel; it is looked at whenever a trait has changed, and now and then."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while not (came := holds(self.panel)) and time.monotonic() < deadline:
                self._changed.wait(LOOK_S)
        state = {name: getattr(self.panel, name) for name in self.panel.trait_names(sync=True) if name[0] != "_"}
        assert came, f"it never came about; the panel has {state}"

    def give(self, values: asyncio.Queue[Any], *given: Any) -> None:
        """Let a scripted lab go on."""

        async def put() -> None:
            for value in given:
                await values.put(value)

        self._workbench.submit(put()).result(WAIT_S)

    def _hear(self, content: Any, *_rest: Any) -> None:
        self._replies[content["id"]].put(content)

    def _note(self, change: Any) -> None:
        with self._changed:
            self.frames.append((change["name"], change["new"]))
            self._changed.notify_all()

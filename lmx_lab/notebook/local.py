"""The lab of this process as its panels see it. Nothing here goes over the server's loop, which a cell may block."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from lmx_lab.errors import HostingError
from lmx_lab.notebook.arguments import chat_request, rerank_body
from lmx_lab.panels.source import ChatPiece, ChatStats, Ranked, ServerState
from lmx_lab.server import InferenceServer
from lmx_lab.server.admin import alisting
from lmx_lab.server.events import sample
from lmx_lab.server.generation import Generation
from lmx_lab.server.rerank import rerank_request
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.generation import Delta
from lmx_lab.values.models import LoadSpec
from lmx_lab.wire.admin import LoadAnswer, ModelEvent, ModelRecords, RequestEvent, Sample

if TYPE_CHECKING:
    from lmx_lab.notebook.lab import Lab

LAGGING_S = 1.0
REMARK_S = 0.5
"""How often who waits for a first token is told what it waits for."""
REMEDY = 'Put long cells under %%offload, or launch(loop="thread").'


class InProcess:
    """A ``Source`` over the services of a running lab."""

    can_cancel_loads = True

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._last: tuple[EngineSnapshot, float] | None = None
        # Looking for the notebook's server takes a while, and is wanted twice a second.
        self._proxy_path = lab.proxy_path

    def state(self) -> ServerState:
        lab, now = self._lab, self._lab.engine.snapshot
        note = "" if lab.running else "This server was stopped; run the launch cell again."
        late_s = lab.lag.now_s if lab.running else 0.0
        return ServerState(
            state="stopped" if not lab.running else "lagging" if late_s > LAGGING_S else "running",
            place=lab.place,
            url=lab.url,
            lan_url=lab.lan_url,
            proxy_url=lab.proxy_url,
            proxy_path=self._proxy_path,
            model=now.model,
            pinned=tuple(pinned.entry.id for pinned in now.pinned),
            note=note or self._blocked(late_s),
        )

    def _blocked(self, late_s: float) -> str:
        """What a cell does, or did, to those whom the kernel's loop serves; in whole seconds while it grows."""
        if self._lab.mode == "thread":
            return ""  # no cell does that to it: the machine slept, or native code holds Python's lock
        if late_s > LAGGING_S:
            return f"A cell has kept the server's loop from running for {late_s:.0f} s: its clients wait. {REMEDY}"
        worst = self._lab.lag.worst
        if worst is None:
            return ""
        at = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - worst.ended_at)))
        return f"Until {at} a cell kept the server's loop from running for {worst.seconds:.1f} s. {REMEDY}"

    def sample(self) -> Sample | None:
        if not self._lab.running:
            self._last = None
            return None
        snapshot, now = self._lab.engine.snapshot, time.monotonic()
        before, then = self._last or (snapshot, now - 1)
        self._last = snapshot, now
        return sample(before, snapshot, max(now - then, 1e-3))

    async def models(self) -> ModelRecords:
        return await alisting(self._lab.catalog, self._lab.engine)

    async def load(self, model: str) -> LoadAnswer:
        report = await self._server.manager.load(LoadSpec(model=model))
        return LoadAnswer(model=report.model, load_time_ms=report.load_s * 1e3, vram_gb=report.memory_bytes / 1e9)

    async def cancel_load(self, model: str) -> None:
        await self._server.manager.cancel_load(model)

    async def unload(self) -> float:
        return await self._server.manager.unload() / 1e9

    async def progress(self) -> AsyncGenerator[ModelEvent | RequestEvent, None]:
        with self._server.feed.subscribe() as events:
            async for event in events:
                yield event

    async def chat(self, request: Mapping[str, Any]) -> AsyncGenerator[ChatPiece, None]:
        parameters = {name: value for name, value in request.items() if name != "messages"}
        asked = chat_request(request["messages"], parameters)
        _, (generation,) = await self._server.inference.start(asked, local=True)
        async with generation, aclosing(_pieces(generation)) as pieces:
            async for piece in pieces:
                yield piece
        report = generation.finished()
        yield ChatPiece(
            stats=ChatStats(
                model=report.model,
                finish_reason=report.finish_reason,
                prompt_tokens=report.prompt_tokens,
                output_tokens=report.output_tokens,
                tokens_per_second=report.tokens_per_second,
                ttft_ms=report.ttft_s * 1e3,
            )
        )

    async def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> Ranked:
        body = rerank_body(query, documents, model=None, top_n=top_n, truncate=True)
        started = time.perf_counter()
        ranking = await self._server.inference.rerank(rerank_request(body), local=True)
        return Ranked(
            order=tuple((index, float(ranking.scores[index])) for index in ranking.order(top_n)),
            model=ranking.report.model,
            method=ranking.method,
            took_ms=(time.perf_counter() - started) * 1e3,
        )

    @property
    def _server(self) -> InferenceServer:
        if not self._lab.running:
            raise HostingError("this server was stopped; run the launch cell again")
        return self._lab.services


async def _pieces(generation: Generation) -> AsyncGenerator[ChatPiece, None]:
    """The deltas, and while there is none yet, what it waits for."""
    begun = False
    while True:
        try:
            delta = await asyncio.wait_for(_next(generation), None if begun else REMARK_S)
        except TimeoutError:
            yield ChatPiece(remark=generation.remark)
            continue
        if delta is None:
            return
        begun = True
        yield ChatPiece(text=delta.text, reasoning=delta.reasoning, tokens=delta.tokens)


async def _next(generation: Generation) -> Delta | None:
    return await anext(generation, None)

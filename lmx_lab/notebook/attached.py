"""A lab whose server runs elsewhere: in another kernel, another process, on another machine."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from lmx_lab.bench.targets import ChatTarget
from lmx_lab.client import AsyncLabClient, as_array
from lmx_lab.errors import HostingError, LabError
from lmx_lab.notebook.arguments import model_name
from lmx_lab.notebook.bench import Measuring
from lmx_lab.notebook.launching import current
from lmx_lab.notebook.remote import RemoteCost, RemoteGeneration, RemoteLoad
from lmx_lab.notebook.remote_source import AttachedSource
from lmx_lab.notebook.reply import ModelList, Reply, ReplyStream
from lmx_lab.notebook.rerank_result import RerankResult
from lmx_lab.panels.source import Source
from lmx_lab.panels.workbench import Workbench
from lmx_lab.portal import LoopThread, receive
from lmx_lab.values.encoding import Vectors
from lmx_lab.values.models import EngineChoice, LoadReport, LoadSpec
from lmx_lab.wire.admin import NotReady
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody

if TYPE_CHECKING:
    import ipywidgets

    from lmx_lab.notebook.report import Snapshot

T = TypeVar("T")
LOOK_S = 2.0
"""A look at the lab waits no longer for its server."""
CLOSE_S = 2.0
KEPT = 8
_KEPT: dict[str, AttachedLab] = {}
"""By address, the last whose panels were asked for: of ``attach(url).panel()`` nobody else holds the lab."""


def attach(url: str, *, api_key: str | None = None) -> AttachedLab:
    """A lab over the server at this address, with the verbs that ``launch()``'s has; also ``with attach(url) as lab``.

    Args:
        url: As the server prints it, or through a proxy; a slash or ``/v1`` at its end does not matter.
        api_key: The server's key, or Jupyter's token where Jupyter is in front of it.

    Raises:
        UnreachableError: nothing answers there, or something else than an LMX Lab server.
        UnauthorizedError: it needs a key, or another one.
        HostingError: it is the server of the very loop that would wait for it.
    """
    lab = AttachedLab(url, api_key=api_key)
    try:
        lab.start()
    except BaseException:
        lab.stop()
        raise
    return lab


class AttachedLab(Measuring):
    """A connection to a server, and the verbs on it. Made by ``attach()``; ``stop()`` ends the connection alone.

    Blocking verbs work in scripts, in cells and beside running loops: the connection has a loop of its own. Dropping it
    ends the connection too; ``panel()`` keeps it until there are panels of another connection to the same address.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._client = AsyncLabClient(url, api_key=api_key)
        self._key = api_key
        self._thread = LoopThread("lmx-lab-attached")
        self._version = ""
        # Also where nobody stops it: when it is dropped, and at exit.
        self._end = weakref.finalize(self, _end, self._thread, self._client)
        self._line = Line(self._thread, self._end)

    def start(self) -> None:
        """Connect, and see that the lab's server answers and takes the key. ``attach()`` does this.

        Raises:
            LabError: as ``attach()``.
        """
        self._check_loop()
        self._line.check()
        self._thread.start()
        self._version = self._block(self._greet())

    async def _greet(self) -> str:
        version = await self._client.version()
        await self._client.models()
        return version

    def _check_loop(self) -> None:
        """
        Raises:
            HostingError: the server needs the loop of whoever would wait for it here.
        """
        own = current()
        if own is None or own.mode != "kernel" or not _is_at(self.url, own.port, [own.url, *own.lan_urls]):
            return
        # None in a thread without a loop, which may wait.
        if asyncio._get_running_loop() is own._loop:
            raise HostingError(
                f"{self.url} is served by this kernel's own loop, which would wait for itself; "
                "use lmx_lab.current(), or launch(loop='thread')"
            )

    daemon = None
    """Nothing is started for a server elsewhere."""

    # Address

    @property
    def url(self) -> str:
        """The server's address."""
        return self._client.url

    @property
    def openai(self) -> dict[str, str]:
        """Arguments for a chat-format client: ``OpenAI(**lab.openai)``."""
        return {"base_url": f"{self.url}/v1", "api_key": self._key or "lmx-lab"}

    @property
    def running(self) -> bool:
        """Whether this connection is open; the server may have gone."""
        return self._line.open

    # Models

    def load(self, model: str | os.PathLike[str], *, engine: EngineChoice = "auto") -> LoadReport:
        """Load a model on the server, by id or by a path there, in the place of what is loaded; shows progress.

        Interrupting ends the waiting, not the load.

        Args:
            engine: Engine that must run the model; ``auto`` selects it by the model's format.

        Raises:
            AdminForbiddenError: the server lets only its own machine do this.
            LabError: why not, and what is loaded now.
        """
        spec = LoadSpec(model=model_name(model), engine=engine)
        return self._watch(spec.model, self._begin(spec))

    async def aload(self, model: str | os.PathLike[str], *, engine: EngineChoice = "auto") -> LoadReport:
        spec = LoadSpec(model=model_name(model), engine=engine)
        return await self._awatch(spec.model, self._begin(spec))

    async def _begin(self, spec: LoadSpec) -> RemoteLoad:
        return RemoteLoad(self._client, spec)

    def unload(self) -> float:
        """Unload the server's model; returns the GB (10^9 bytes) that this freed."""
        return self._block(self._unload())

    async def aunload(self) -> float:
        return await self._hand_over(self._unload())

    async def _unload(self) -> float:
        return (await self._client.unload()).freed_vram_gb

    def models(self) -> ModelList:
        """What is on the server's disk, and which of it is loaded."""
        return self._block(self._models())

    async def amodels(self) -> ModelList:
        return await self._hand_over(self._models())

    async def _models(self) -> ModelList:
        return ModelList.of(await self._client.models())

    # What the verbs do

    async def _chat(self, request: ChatRequest) -> Reply:
        # Streamed all the same: that tells when the first token came.
        generation = await RemoteGeneration.begun(self._client, request)
        whole = await generation.whole()
        return _reply(whole.text, generation.finished()).including(whole)

    async def _stream(self, request: ChatRequest) -> ReplyStream:
        generation = await RemoteGeneration.begun(self._client, request)
        return ReplyStream(generation, finish=_reply, block=self._block, hand_over=self._hand_over)

    async def _embed(self, body: EmbeddingsBody) -> Vectors:
        answer = await self._client.embed(body.model_copy(update={"encoding_format": "base64"}))
        vectors = as_array(answer)
        return vectors[0] if body.is_single else vectors

    async def _rerank(self, body: RerankBody) -> RerankResult:
        answer = await self._client.rerank(body.model_copy(update={"return_documents": False}))
        order = [(item.index, item.relevance_score) for item in answer.results]
        tokens = answer.usage.prompt_tokens
        return self._displayed(
            RerankResult(body.query, body.texts, order, model=answer.model, method=answer.method, tokens=tokens)
        )

    def _as_target(self) -> ChatTarget:
        return ChatTarget(self.url, api_key=self._key, name="lab")

    def _bench_folder(self) -> None:
        """This user's: the server's home may be on another machine."""

    # Lifetime

    def stop(self) -> None:
        """End the connection, and with it what this lab has asked for; the server goes on. Idempotent."""
        self._end()
        if _KEPT.get(self.url) is self:
            del _KEPT[self.url]
        self._rest()

    close = stop

    async def astop(self) -> None:
        await asyncio.to_thread(self.stop)

    aclose = astop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.astop()

    # The way to the connection's loop

    def _block(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            self._check_loop()
        except HostingError:
            work.close()
            raise
        return self._line.block(work)

    async def _hand_over(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._line.hand_over(work)

    # Looks

    def _facts(self) -> dict[str, str]:
        return {"LMX Lab": self._state(), "address": self.url}

    def _source(self) -> AttachedSource:
        # Panels outlive the lab, and must not hold it.
        line = self._line
        return AttachedSource(self._client, running=lambda: line.open, hand_over=line.hand_over)

    @property
    def workbench(self) -> Workbench:
        """What the panels share; it rests when the lab is stopped or dropped."""
        held = self._workbench
        workbench = super().workbench
        if workbench is not held:
            # At exit nobody looks any more, and the kernel's messages may have ended.
            weakref.finalize(self, _rest, self._end, workbench, workbench.source).atexit = False
        return workbench

    def panel(self, *names: str) -> ipywidgets.DOMWidget:
        """The panels, as one widget: ``models``, ``metrics``, ``chat`` and ``rerank``, or those that are named.

        There is one instance of each; shown again, it is the same one in another place.

        Raises:
            InvalidRequestError: there is no such panel.
            ImportError: anywidget or ipywidgets is not installed.
        """
        widget = super().panel(*names)
        if self.running:
            _KEPT.pop(self.url, None)
            _KEPT[self.url] = self
            while len(_KEPT) > KEPT:
                del _KEPT[next(iter(_KEPT))]
        return widget

    def snapshot(self) -> Snapshot:
        """The lab as of now: server, models, figures, versions, machine.

        Raises:
            HostingError: it is the server of the very loop that would wait for it.
        """
        self._check_loop()
        return super().snapshot()

    def _state(self) -> str:
        if not self.running:
            return "connection stopped"
        try:
            self._check_loop()
            now = self._thread.run(self._client.ready(), LOOK_S)
        except (LabError, TimeoutError) as exc:
            return f"elsewhere, does not answer now: {exc}"
        model = "no model ready" if isinstance(now, NotReady) else f"{now.model} ({now.vram_gb:.2f} GB)"
        return f"elsewhere, version {self._version}, {model}"


class Line:
    """The way to a connection's loop, as long as its lab is there, which it does not hold."""

    def __init__(self, thread: LoopThread, end: weakref.finalize[Any, Any]) -> None:
        self._thread = thread
        self._end = end

    @property
    def open(self) -> bool:
        return self._end.alive

    def check(self) -> None:
        """
        Raises:
            HostingError: the connection was stopped, or its lab was dropped.
        """
        if not self.open:
            raise HostingError("this connection was stopped; attach() makes a new one")

    def block(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work on the connection's loop, and wait."""
        self._check_for(work)
        return self._thread.run(work)

    async def hand_over(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for other loops; cancelling this cancels the work."""
        self._check_for(work)
        if self._thread.loop is asyncio.get_running_loop():
            return await work
        return await receive(self._thread.submit(work))

    def _check_for(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self.check()
        except HostingError:
            work.close()
            raise


def _reply(text: str, cost: RemoteCost) -> Reply:
    return Reply(
        text=text,
        model=cost.model,
        finish_reason=cost.finish_reason,
        usage=cost.usage,
        timings=cost.timings,
        ttft_s=cost.ttft_s,
    )


def _is_at(url: str, port: int, addresses: list[str]) -> bool:
    where = urlsplit(url)
    return url in addresses or (where.port == port and where.hostname in ("localhost", "127.0.0.1", "::1"))


def _end(thread: LoopThread, client: AsyncLabClient) -> None:
    try:
        with suppress(LabError, TimeoutError):
            thread.run(client.aclose(), CLOSE_S)
    finally:
        thread.stop()


def _rest(end: Callable[[], object], workbench: Workbench, source: Source) -> None:
    """End what the panels do for a lab that was dropped; they show it once more, as stopped."""

    def rest() -> None:
        # First, and not left to the other finalizer, which comes after this one.
        end()
        workbench.rest()

    if workbench.source is source:
        # Whoever dropped it last may be the panels' own loop, which cannot wait for its end.
        threading.Thread(target=rest, name="lmx-lab-rest", daemon=True).start()

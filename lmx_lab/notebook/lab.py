"""The lab as its user sees it: the verbs, the addresses, the looks.

Every blocking verb has an ``a…`` twin; both do the same work on the server's loop.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lmx_lab.bench.targets import ChatTarget
from lmx_lab.notebook.arguments import model_name
from lmx_lab.notebook.bench import Measuring
from lmx_lab.notebook.loading import Loading, Work
from lmx_lab.notebook.local import InProcess
from lmx_lab.notebook.reply import ModelList, Reply, ReplyStream
from lmx_lab.notebook.rerank_result import RerankResult
from lmx_lab.notebook.serving import Serving
from lmx_lab.server.admin import alisting, listing
from lmx_lab.server.embeddings import embedding_request
from lmx_lab.server.generation import Generation
from lmx_lab.server.rerank import rerank_request
from lmx_lab.server.translate import timings, usage
from lmx_lab.values.encoding import Vectors
from lmx_lab.values.generation import GenerationReport
from lmx_lab.values.models import EngineChoice, Kind, LoadReport, LoadSpec
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody

if TYPE_CHECKING:
    from lmx_lab.daemon.tools.python_tools import PythonTools
    from lmx_lab.notebook.daemon import LabDaemon


class Lab(Serving, Measuring):
    """A running inference server and the verbs on it. Made by ``launch()``; ``stop()`` ends it.

    Programs with a loop of their own use it directly: ``async with Lab(settings) as lab``.
    """

    # The daemon

    @property
    def daemon(self) -> LabDaemon | None:
        """The daemon in front of this lab; None without ``launch(daemon=True)``, or when it was stopped."""
        return self._daemon if self._daemon is not None and self._daemon.running else None

    @property
    def daemon_tools(self) -> PythonTools | None:
        """The Python functions of the daemon that it has, or had."""
        return self._daemon_tools

    def start_daemon(self, *, explicit_port: bool = False, tools: PythonTools | None = None) -> LabDaemon:
        """Start the daemon in front of this lab, or return the one that runs. ``launch(daemon=True)`` does this.

        Args:
            explicit_port: Whether ``settings.daemon_port`` alone will do; otherwise the next free one is taken.
            tools: Python functions of another daemon to go on with.

        Raises:
            DaemonRunningError: this home has a daemon elsewhere; the lab runs nevertheless.
            HostingError: it could not be started; the lab runs nevertheless.
        """
        self._check_running()
        # Kept also where the start fails: the cell that mends it finds them.
        self._daemon_tools = tools = tools or self._daemon_tools
        # Here and not above: what MCP needs takes half a second to import.
        from lmx_lab.notebook.daemon import LabDaemon

        if (running := self.daemon) is not None:
            return running
        daemon = LabDaemon(
            self.workbench,
            settings=self.settings,
            explicit_port=explicit_port,
            upstream_url=self.url,
            upstream_api_key=self.settings.api_key,
            tools=tools,
        )
        self._daemon_tools = daemon.tools
        daemon.start()
        self._daemon = daemon
        return daemon

    # Addresses

    @property
    def port(self) -> int:
        return self._addresses.port

    @property
    def url(self) -> str:
        """The address for programs on this machine."""
        return self._addresses.url

    @property
    def lan_url(self) -> str | None:
        """The address for other hosts; None when only this machine is served."""
        return next(iter(self.lan_urls), None)

    @property
    def lan_urls(self) -> list[str]:
        """All of them, the likeliest first."""
        return self._addresses.lan_urls

    @property
    def proxy_url(self) -> str | None:
        """The address through the notebook's web front (Hub, Binder, Colab, VS Code); None where there is none."""
        return self._addresses.proxy_url

    @property
    def proxy_path(self) -> str | None:
        """The same for pages of the Jupyter server above, as a path on it; None without jupyter-server-proxy there."""
        return self._addresses.proxy_path

    @property
    def openai(self) -> dict[str, str]:
        """Arguments for a chat-format client: ``OpenAI(**lab.openai)``.

        On the kernel's loop call it from another process or through ``asyncio.to_thread``: a cell that waits for its
        own kernel's server waits for ever.
        """
        return {"base_url": f"{self.url}/v1", "api_key": self.settings.api_key or "lmx-lab"}

    # Models

    def load(self, model: str | os.PathLike[str], *, engine: EngineChoice = "auto") -> LoadReport:
        """Load a model by id (fetched first where needed) or path, in the place of what is loaded; shows progress.

        Interrupting ends the waiting, not the load.

        Args:
            engine: Engine that must run the model; ``auto`` selects it by the model's format.

        Raises:
            LabError: why not, and what is loaded now.
        """
        spec = LoadSpec(model=model_name(model), engine=engine)
        return self._watch(spec.model, self._begin(lambda: self.engine.load(spec)))

    async def aload(self, model: str | os.PathLike[str], *, engine: EngineChoice = "auto") -> LoadReport:
        spec = LoadSpec(model=model_name(model), engine=engine)
        return await self._awatch(spec.model, self._begin(lambda: self.engine.load(spec)))

    def pin_encoders(self) -> None:
        """Load the models that the settings ``embedder`` and ``reranker`` name, fetched first where needed.

        ``launch()``, ``with`` and ``async with`` do this. What is there already, stays.

        Raises:
            LabError: one of them could not be loaded; the server runs nevertheless.
        """
        for name, kind in self._unpinned():
            self._watch(name, self._begin(partial(self.engine.load, LoadSpec(model=name, pin=kind))))

    async def apin_encoders(self) -> None:
        for name, kind in self._unpinned():
            await self._awatch(name, self._begin(partial(self.engine.load, LoadSpec(model=name, pin=kind))))

    def _unpinned(self) -> list[tuple[str, Kind]]:
        there = {pinned.entry.kind for pinned in self.engine.snapshot.pinned}
        wanted: list[tuple[str | None, Kind]] = [
            (self.settings.embedder, "embedding"),
            (self.settings.reranker, "rerank"),
        ]
        return [(name, kind) for name, kind in wanted if name is not None and kind not in there]

    async def _begin(self, work: Work) -> Loading:
        return Loading(self._server, work)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.pin_encoders()
        except BaseException:
            self.stop()
            raise
        return self

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            await self.apin_encoders()
        except BaseException:
            await self.astop()
            raise
        return self

    def unload(self) -> float:
        """Unload the model; returns the GB (10^9 bytes) that this freed."""
        return self._block(self.engine.unload()) / 1e9

    async def aunload(self) -> float:
        return await self._hand_over(self.engine.unload()) / 1e9

    def models(self) -> ModelList:
        """What is on disk, and which of it is loaded."""
        self._check_running()
        return ModelList.of(listing(self.catalog, self.engine))

    async def amodels(self) -> ModelList:
        self._check_running()
        return ModelList.of(await alisting(self.catalog, self.engine))

    # What the verbs do

    async def _chat(self, request: ChatRequest) -> Reply:
        generation = await self._generation(request)
        whole = await generation.whole()
        return self._reply(whole.text, generation.finished()).including(whole)

    async def _stream(self, request: ChatRequest) -> ReplyStream:
        generation = await self._generation(request)
        return ReplyStream(generation, finish=self._reply, block=self._block, hand_over=self._hand_over)

    async def _generation(self, request: ChatRequest) -> Generation:
        _, (generation,) = await self._server.inference.start(request, local=True)
        return generation

    def _reply(self, text: str, report: GenerationReport) -> Reply:
        return Reply(
            text=text,
            model=report.model,
            finish_reason=report.finish_reason,
            usage=usage([report]),
            timings=timings(report),
            ttft_s=report.ttft_s,
            report=report,
        )

    async def _embed(self, body: EmbeddingsBody) -> Vectors:
        vectors = (await self._server.inference.embed(embedding_request(body), local=True)).vectors
        return vectors[0] if body.is_single else vectors

    async def _rerank(self, body: RerankBody) -> RerankResult:
        ranking = await self._server.inference.rerank(rerank_request(body), local=True)
        return self._displayed(RerankResult.by_engine(body.query, body.texts, ranking, top_n=body.top_n))

    def _as_target(self) -> ChatTarget:
        return ChatTarget(self.url, api_key=self.settings.api_key, name="lab")

    def _bench_folder(self) -> Path:
        return self.settings.home / "bench"

    # Looks

    def _facts(self) -> dict[str, str]:
        now = self.engine.snapshot
        facts = {
            "LMX Lab": f"running on {self.place}" if self.running else "stopped",
            "address": self.url,
            "LAN address": self.lan_url or "",
            "browser address": self.proxy_url or self._addresses.browser_step or "",
            "model": f"{now.model} ({now.model_memory_bytes / 1e9:.2f} GB)" if now.model else "none loaded",
            "daemon": self.daemon.url if self.daemon is not None else "",
            "kept beside": ", ".join(f"{it.entry.id} ({it.memory_bytes / 1e9:.2f} GB)" for it in now.pinned),
        }
        return {name: value for name, value in facts.items() if value}

    @property
    def place(self) -> str:
        """Where the server runs, in words."""
        return "the kernel's loop" if self.mode == "kernel" else "a thread of its own"

    def _source(self) -> InProcess:
        return InProcess(self)

    def _close(self) -> None:
        super()._close()
        self._rest()

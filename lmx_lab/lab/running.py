"""The lab as its user sees it: the verbs, the addresses, the looks.

Every blocking verb has an ``a…`` twin; both do the same work on the server's loop.
"""

from __future__ import annotations

import asyncio
import html
import os
from functools import partial
from typing import Any, Literal, Self, overload

from lmx_lab.engine import GenerationReport, InputType, LoadReport, Vectors
from lmx_lab.lab.loading import Loading, Work
from lmx_lab.lab.prompt import Documents, Prompt, Texts, chat_request, embeddings_body, model_name, rerank_body
from lmx_lab.lab.serving import Serving
from lmx_lab.progress import bar
from lmx_lab.rankings import RerankResult
from lmx_lab.replies import ModelList, Reply, ReplyStream
from lmx_lab.server.admin import records
from lmx_lab.server.embeddings import embedding_request
from lmx_lab.server.generations import Generation
from lmx_lab.server.rerank import rerank_request
from lmx_lab.server.translate import timings, usage
from lmx_lab.weights import Kind
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody


class Lab(Serving):
    """A running inference server and the verbs on it. Made by ``launch()``; ``stop()`` ends it.

    Programs with a loop of their own use it directly: ``async with Lab(settings) as lab``.
    """

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
    def openai(self) -> dict[str, str]:
        """Arguments for a chat-format client: ``OpenAI(**lab.openai)``.

        On the kernel's loop call it from another process or through ``asyncio.to_thread``: a cell that waits for its
        own kernel's server waits for ever.
        """
        return {"base_url": f"{self.url}/v1", "api_key": self.settings.api_key or "lmx-lab"}

    # Models

    def load(self, model: str | os.PathLike[str]) -> LoadReport:
        """Load a model by id (fetched first where needed) or path, in the place of what is loaded; shows progress.

        Interrupting ends the waiting, not the load.

        Raises:
            LabError: why not, and what is loaded now.
        """
        name = model_name(model)
        return self._watch(name, lambda: self._server.loader.load(name, local=True))

    async def aload(self, model: str | os.PathLike[str]) -> LoadReport:
        name = model_name(model)
        return await self._awatch(name, lambda: self._server.loader.load(name, local=True))

    def pin_encoders(self) -> None:
        """Load the models that the settings ``embedder`` and ``reranker`` name, fetched first where needed.

        ``launch()``, ``with`` and ``async with`` do this. What is there already, stays.

        Raises:
            LabError: one of them could not be loaded; the server runs nevertheless.
        """
        for name, kind in self._unpinned():
            self._watch(name, partial(self._server.loader.pin, name, kind=kind))

    async def apin_encoders(self) -> None:
        for name, kind in self._unpinned():
            await self._awatch(name, partial(self._server.loader.pin, name, kind=kind))

    def _unpinned(self) -> list[tuple[str, Kind]]:
        there = {pinned.entry.kind for pinned in self.engine.snapshot.pinned}
        wanted: list[tuple[str | None, Kind]] = [
            (self.settings.embedder, "embedding"),
            (self.settings.reranker, "rerank"),
        ]
        return [(name, kind) for name, kind in wanted if name is not None and kind not in there]

    def _watch(self, title: str, work: Work) -> LoadReport:
        """A load to its end, its progress shown."""
        loading = self._block(self._begin(work))
        with bar(title) as shown:
            while (step := self._block(loading.step())) is not None:
                shown.update(step)
        return self._block(loading.result())

    async def _awatch(self, title: str, work: Work) -> LoadReport:
        loading = await self._hand_over(self._begin(work))
        with bar(title) as shown:
            while (step := await self._hand_over(loading.step())) is not None:
                shown.update(step)
        return await self._hand_over(loading.result())

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
        return self._block(self._server.loader.unload()) / 1e9

    async def aunload(self) -> float:
        return await self._hand_over(self._server.loader.unload()) / 1e9

    def models(self) -> ModelList:
        """What is on disk, and which of it is loaded."""
        self._check_running()
        return ModelList(records(self.catalog.scan(), self.engine.snapshot))

    async def amodels(self) -> ModelList:
        return await asyncio.to_thread(self.models)

    # Chat

    @overload
    def chat(self, prompt: Prompt, *, stream: Literal[False] = False, **parameters: Any) -> Reply: ...
    @overload
    def chat(self, prompt: Prompt, *, stream: Literal[True], **parameters: Any) -> ReplyStream: ...
    def chat(self, prompt: Prompt, *, stream: bool = False, **parameters: Any) -> Reply | ReplyStream:
        """Ask the loaded model; ``prompt`` is a text or a list of messages.

        With ``stream=True`` iterate the result for text as it comes. Interrupting ends the generation.

        Args:
            parameters: of the chat format: ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``max_tokens``, ``stop``,
                ``seed``, penalties, ``logit_bias``, ``ignore_eos``, ``tools``, ``tool_choice``, ``reasoning_effort``,
                ``response_format``, which may be a pydantic model's class; also ``system``. A reply is one text: no
                ``n``, no ``logprobs``.

        Raises:
            NotLoadedError: load a model first.
            InvalidRequestError: a parameter that does not exist or is out of range.
        """
        request = chat_request(prompt, parameters)
        if stream:
            return self._block(self._stream(request))
        return self._block(self._chat(request))

    async def achat(self, prompt: Prompt, **parameters: Any) -> Reply:
        return await self._hand_over(self._chat(chat_request(prompt, parameters)))

    async def astream(self, prompt: Prompt, **parameters: Any) -> ReplyStream:
        """``async for piece in await lab.astream("…")``."""
        return await self._hand_over(self._stream(chat_request(prompt, parameters)))

    async def _chat(self, request: ChatRequest) -> Reply:
        generation = await self._generation(request)
        whole = await generation.whole()
        return self._reply(whole.text, generation.finished()).including(whole)

    async def _stream(self, request: ChatRequest) -> ReplyStream:
        generation = await self._generation(request)
        return ReplyStream(generation, finish=self._reply, block=self._block, hand_over=self._hand_over)

    async def _generation(self, request: ChatRequest) -> Generation:
        _, (generation,) = await self._server.chat.start(request, local=True)
        return generation

    def _reply(self, text: str, report: GenerationReport) -> Reply:
        return Reply(
            text=text,
            model=report.model,
            finish_reason=report.finish_reason,
            usage=usage([report]),
            timings=timings(report),
            report=report,
        )

    # Vectors and scores

    def embed(
        self,
        texts: Texts,
        *,
        model: str | os.PathLike[str] | None = None,
        dimensions: int | None = None,
        input_type: InputType | None = None,
        truncate: bool = False,
    ) -> Vectors:
        """The vectors of texts, float32: one row for each, or for a single text the row alone.

        Args:
            model: An embedding model in memory; None takes the pinned one, else the loaded one.
            dimensions: Keep so many leading components and normalize again.
            input_type: Which of the prompts in the model's files goes before each text; many models have none.
            truncate: Cut what is too long for the model, instead of refusing it.

        Raises:
            NotLoadedError: load an embedding model first.
            ContextLengthError: a text is too long.
        """
        body = embeddings_body(texts, model=model, dimensions=dimensions, input_type=input_type, truncate=truncate)
        return self._block(self._embed(body))

    async def aembed(
        self,
        texts: Texts,
        *,
        model: str | os.PathLike[str] | None = None,
        dimensions: int | None = None,
        input_type: InputType | None = None,
        truncate: bool = False,
    ) -> Vectors:
        body = embeddings_body(texts, model=model, dimensions=dimensions, input_type=input_type, truncate=truncate)
        return await self._hand_over(self._embed(body))

    async def _embed(self, body: EmbeddingsBody) -> Vectors:
        vectors = (await self._server.encoding.embed(embedding_request(body), local=True)).vectors
        return vectors[0] if body.is_single else vectors

    def rerank(
        self,
        query: str,
        documents: Documents,
        *,
        top_n: int | None = None,
        model: str | os.PathLike[str] | None = None,
        truncate: bool = False,
    ) -> RerankResult:
        """Documents by relevance to a query: rows with rank, score, index and document; ``.df`` is a data frame.

        Args:
            documents: Texts, or objects whose ``text`` counts.
            top_n: Leave out the rows after these.
            model: A reranker or an embedding model in memory; None takes a reranker first.
            truncate: Cut documents that are too long for the model, instead of refusing them.

        Raises:
            NotLoadedError: load a reranker or an embedding model first.
            ContextLengthError: a document is too long.
        """
        body = rerank_body(query, documents, top_n=top_n, model=model, truncate=truncate)
        return self._block(self._rerank(body))

    async def arerank(
        self,
        query: str,
        documents: Documents,
        *,
        top_n: int | None = None,
        model: str | os.PathLike[str] | None = None,
        truncate: bool = False,
    ) -> RerankResult:
        body = rerank_body(query, documents, top_n=top_n, model=model, truncate=truncate)
        return await self._hand_over(self._rerank(body))

    async def _rerank(self, body: RerankBody) -> RerankResult:
        ranking = await self._server.encoding.rerank(rerank_request(body), local=True)
        return RerankResult(body.query, body.texts, ranking, top_n=body.top_n)

    # Looks

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._facts().items())

    def _repr_html_(self) -> str:
        left = "style='text-align:left'"
        rows = "".join(
            f"<tr><th {left}>{html.escape(name)}</th><td {left}><code>{html.escape(value)}</code></td></tr>"
            for name, value in self._facts().items()
        )
        return f"<table>{rows}</table>"

    def _facts(self) -> dict[str, str]:
        now = self.engine.snapshot
        facts = {
            "LMX Lab": f"running on {self._place()}" if self.running else "stopped",
            "address": self.url,
            "LAN address": self.lan_url or "",
            "browser address": self.proxy_url or "",
            "model": f"{now.model} ({now.model_memory_bytes / 1e9:.2f} GB)" if now.model else "none loaded",
            "kept beside": ", ".join(f"{it.entry.id} ({it.memory_bytes / 1e9:.2f} GB)" for it in now.pinned),
        }
        return {name: value for name, value in facts.items() if value}

    def _place(self) -> str:
        return "the kernel's loop" if self.mode == "kernel" else "a thread of its own"

"""The verbs of a lab, whether its server runs in this process or elsewhere: what they take, and both of their forms."""

from __future__ import annotations

import html
import os
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Literal, Protocol, TypeVar, overload

from lmx_lab.notebook.arguments import Documents, Prompt, Texts, chat_request, embeddings_body, rerank_body
from lmx_lab.notebook.reply import Reply, ReplyStream
from lmx_lab.notebook.rerank_result import RerankResult
from lmx_lab.progress import Step, bar
from lmx_lab.values.encoding import InputType, Vectors
from lmx_lab.values.models import LoadReport
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.embeddings import EmbeddingsBody
from lmx_lab.wire.rerank import RerankBody

T = TypeVar("T")


class Load(Protocol):
    """A load that is under way."""

    async def step(self) -> Step | None:
        """The next thing to show; None when the load is over."""

    async def result(self) -> LoadReport: ...


class Verbs(ABC):
    """Blocking verbs and their twins, over the few methods in which labs differ."""

    @abstractmethod
    def _block(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work where the server, or the connection to it, is served, and wait. An interrupt cancels it."""

    @abstractmethod
    async def _hand_over(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for callers on a loop of their own."""

    @abstractmethod
    async def _chat(self, request: ChatRequest) -> Reply: ...

    @abstractmethod
    async def _stream(self, request: ChatRequest) -> ReplyStream: ...

    @abstractmethod
    async def _embed(self, body: EmbeddingsBody) -> Vectors: ...

    @abstractmethod
    async def _rerank(self, body: RerankBody) -> RerankResult: ...

    @abstractmethod
    def _facts(self) -> dict[str, str]:
        """What its looks say, by name."""

    # Loads

    def _watch(self, title: str, begin: Coroutine[Any, Any, Load]) -> LoadReport:
        """A load to its end, its progress shown."""
        loading = self._block(begin)
        with bar(title) as shown:
            while (step := self._block(loading.step())) is not None:
                shown.update(step)
        return self._block(loading.result())

    async def _awatch(self, title: str, begin: Coroutine[Any, Any, Load]) -> LoadReport:
        loading = await self._hand_over(begin)
        with bar(title) as shown:
            while (step := await self._hand_over(loading.step())) is not None:
                shown.update(step)
        return await self._hand_over(loading.result())

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

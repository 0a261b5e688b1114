"""The lab as its user sees it: the verbs, the addresses, the looks.

Every blocking verb has an ``a…`` twin; both do the same work on the server's loop.
"""

from __future__ import annotations

import asyncio
import html
import os
from typing import Any, Literal, overload

from lmx_lab.engine import GenerationReport, LoadReport
from lmx_lab.lab.loading import Loading
from lmx_lab.lab.prompt import Prompt, chat_request, model_name
from lmx_lab.lab.serving import Serving
from lmx_lab.progress import bar
from lmx_lab.replies import ModelList, Reply, ReplyStream
from lmx_lab.server.admin import records
from lmx_lab.server.generations import Generation
from lmx_lab.server.translate import timings, usage
from lmx_lab.wire.chat import ChatRequest


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
        loading = self._block(self._begin_load(name))
        with bar(name) as shown:
            while (step := self._block(loading.step())) is not None:
                shown.update(step)
        return self._block(loading.result())

    async def aload(self, model: str | os.PathLike[str]) -> LoadReport:
        name = model_name(model)
        loading = await self._hand_over(self._begin_load(name))
        with bar(name) as shown:
            while (step := await self._hand_over(loading.step())) is not None:
                shown.update(step)
        return await self._hand_over(loading.result())

    async def _begin_load(self, model: str) -> Loading:
        return Loading(self._server, model)

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
                ``seed``, penalties, ``logit_bias``, ``ignore_eos``; also ``system``. A reply is one text: no ``n``, no
                ``logprobs``.

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
        text = (await generation.whole()).text
        return self._reply(text, generation.finished())

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
        }
        return {name: value for name, value in facts.items() if value}

    def _place(self) -> str:
        return "the kernel's loop" if self.mode == "kernel" else "a thread of its own"

"""Targets of a measurement: a chat-format server at an address, and an engine of this process without HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import TypeIs

from lmx_lab.bench.chunks import Chunk, ServerFigures, chunk_of
from lmx_lab.bench.http_stream import Address, Exchange
from lmx_lab.client import AsyncLabClient, ChatFormatClient
from lmx_lab.client.chat_chunks import ChunkReader, TokenUsage
from lmx_lab.client.chat_format import DONE, END_S
from lmx_lab.client.errors import was_sent
from lmx_lab.client.streams import next_until
from lmx_lab.errors import (
    ConnectionLostError,
    InvalidRequestError,
    LabError,
    ModelNotFoundError,
    NotLoadedError,
    UnauthorizedError,
    UnclearModelError,
)

# Measuring another server does not need MLX.
if TYPE_CHECKING:
    from lmx_lab.engine import ModelManager
    from lmx_lab.values.generation import GenerationReport

LAB_FIELDS = {"temperature": 0, "ignore_eos": True}
"""Fields for a lab's server: all answers have the requested length and are deterministic."""
NAMES_SHOWN = 5
"""Number of model names in an error message."""


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Facts about the target. Unknown values are ``None``."""

    engine: str | None = None
    """Name and version of the server. A lab with llama.cpp adds its version: ``lmx-lab 1.0, llama.cpp-2026.10``."""
    model: str | None = None
    quantization: str | None = None
    device: str | None = None
    threads: int | None = None
    blas: str | None = None


class Target(Protocol):
    """Something that answers chats. It can be used on several event loops, one after the other."""

    @property
    def name(self) -> str: ...

    async def describe(self) -> TargetFacts:
        """The facts about the target and its current model.

        Raises:
            LabError: the target does not answer, or has no model.
        """

    def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Send a chat request with ``messages`` and ``max_tokens``; the target adds its own fields.

        The first chunk is empty and has the time when the request was sent. Closing the generator cancels the request.

        Raises:
            LabError: before the first chunk or after any. ``UnreachableError``, but not its subclasses, means that
                there was no reply.
        """


class ChatTarget:
    """Any server with the chat-completions format, over HTTP.

    Each request has its own connection, which is opened before its time is measured. Answers of a lab's server have the
    requested length; those of other servers may be shorter.

    Args:
        url: Address, with or without ``/v1`` at the end.
        model: By default the loaded model of a lab, or the only model that another server lists.
        name: Name in tables; by default the address.
        known: Facts that the server does not report, such as ``TargetFacts(engine="llama.cpp", device="cpu")``.
        extra: Additional fields of each request, such as ``{"ignore_eos": True}`` for llama.cpp and vLLM.

    Raises:
        InvalidRequestError: the address or the key is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        name: str | None = None,
        known: TargetFacts | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._address = Address(url, api_key)
        self.url = self._address.url
        self.name = name or self.url.partition("://")[2]
        self._model = model
        self._api_key = api_key
        self._known = known or TargetFacts()
        self._extra = dict(extra or {})
        self._is_lab: bool | None = None

    def __repr__(self) -> str:
        return f"<ChatTarget {self.name}>"

    async def describe(self) -> TargetFacts:
        names: list[str] = []
        async with ChatFormatClient(self.url, self._api_key) as client:
            try:
                names = await client.models()
                self._is_lab = client.is_lab
            except LabError as exc:
                # For example, mlx_lm.server lists the hub cache only, and fails if there is none.
                if self._model is None or isinstance(exc, UnauthorizedError) or not was_sent(exc):
                    raise
        if not self._is_lab and not self._model:
            self._model = self._only(names)
        found = await self._lab_facts() if self._is_lab else TargetFacts(model=self._model)
        given = {name: value for name, value in vars(self._known).items() if value is not None}
        return replace(found, **given)

    def _only(self, names: list[str]) -> str:
        """The only listed model. The first of several is no default: some servers list all that they could load."""
        if not names:
            raise ModelNotFoundError(f"{self.url} lists no models; give the name of one as model=")
        if len(names) > 1:
            more = len(names) - NAMES_SHOWN
            listed = ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
            raise UnclearModelError(f"{self.url} lists {len(names)} models ({listed:.400}); choose one with model=")
        return names[0]

    async def _lab_facts(self) -> TargetFacts:
        async with AsyncLabClient(self.url, api_key=self._api_key) as client:
            version, listed = await client.version(), await client.models()
        if self._model is None:
            chosen = [record for record in listed.models if record.loaded and record.kind == "chat"]
        else:
            chosen = [record for record in listed.models if record.id == self._model]
        if not chosen:
            missing = "chat model in memory" if self._model is None else f"model {self._model!r:.80}"
            raise NotLoadedError(f"{self.url} has no {missing}; load one first")
        record, compute = chosen[0], listed.compute
        versions = {engine.name: engine.version for engine in listed.engines}
        facts = _engine_facts(
            f"lmx-lab {version}",
            llama=f"{record.engine}-{versions.get(record.engine)}" if record.engine == "llama.cpp" else None,
            blas=compute.blas if compute else None,
            threads=compute.threads if compute else None,
        )
        return replace(facts, model=record.id, quantization=record.quantization)

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        if self._is_lab is None:
            # Not every server lists its models. Other errors occur again with the request.
            try:
                await self.describe()
            except UnclearModelError:
                raise
            except LabError:
                pass
        lab_fields = LAB_FIELDS if self._is_lab else {}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        request = {"model": self._model or "default", **body, **stream, **lab_fields, **self._extra}
        async with Exchange(self._address, _json(request)) as exchange:
            yield Chunk(at_s=exchange.send())
            async with aclosing(self._chunks(exchange)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _chunks(self, exchange: Exchange) -> AsyncGenerator[Chunk, None]:
        reader, until_s = ChunkReader(self.url), None
        async with aclosing(exchange.events()) as events:
            while (event := await next_until(events, until_s)) is not None and (event.data or "").strip() != DONE:
                yield chunk_of(reader.read(event.data) if event.data else None, event.at_s)
                if reader.finished and until_s is None:
                    until_s = asyncio.get_running_loop().time() + END_S
        if not reader.finished:
            raise ConnectionLostError(f"{self.url} ended the stream before the answer's end; send the request again")


class EngineTarget:
    """An engine of this process with its loaded model, without HTTP."""

    def __init__(self, engine: ModelManager, *, name: str = "engine") -> None:
        self.name = name
        self._engine = engine

    def __repr__(self) -> str:
        return f"<EngineTarget {self.name}>"

    async def describe(self) -> TargetFacts:
        now = self._engine.snapshot
        if now.entry is None:
            raise NotLoadedError("the engine has no model in memory; load one first")
        facts = _engine_facts(
            "lmx-lab, bare",
            llama=self._engine.fingerprint if now.entry.format == "gguf" else None,
            blas=now.blas.name if now.blas else None,
            threads=now.blas.threads if now.blas else None,
        )
        return replace(facts, model=now.entry.id, quantization=now.entry.quantization)

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        from lmx_lab.engine import ChatPrompt, GenerationRequest, Sampling

        request = GenerationRequest(
            prompt=ChatPrompt(messages=tuple(body["messages"])),
            sampling=Sampling(temperature=0),
            max_tokens=body["max_tokens"],
            ignore_eos=True,
        )
        sent_at_s = time.perf_counter()
        async with await self._engine.submit(request) as stream:
            yield Chunk(at_s=sent_at_s)
            async for delta in stream:
                yield Chunk(at_s=time.perf_counter(), tokens=delta.tokens)
            if stream.report is not None:
                yield _last(stream.report)


def as_target(target: Target | str | ModelManager) -> Target:
    """Convert an address to a ``ChatTarget``, and an engine to an ``EngineTarget``.

    Raises:
        InvalidRequestError: it is neither of these nor a target.
    """
    if isinstance(target, str):
        return ChatTarget(target)
    if _is_engine(target):
        return EngineTarget(target)
    if not callable(getattr(target, "ask", None)):
        text = f"{type(target).__name__} cannot be measured; give an address such as http://127.0.0.1:8400, or a target"
        if hasattr(target, "bench"):
            # A lab may serve on the loop that a blocking call would stop.
            text = "a lab is measured by its own bench(...), which takes the fields of a Sweep and compare="
        raise InvalidRequestError(text, param="target")
    return target


def _is_engine(target: object) -> TypeIs[ModelManager]:
    known = sys.modules.get("lmx_lab.engine")
    return known is not None and isinstance(target, known.ModelManager)


def _engine_facts(lab: str, *, llama: str | None, blas: str | None, threads: int | None) -> TargetFacts:
    """The facts about a lab's engine.

    Args:
        llama: Name and version of llama.cpp; None for MLX, whose version is in the provenance.
        blas, threads: BLAS and threads of MLX.
    """
    on_gpu = blas == "unused"
    if llama is None:
        device = None if blas is None else "gpu" if on_gpu else "cpu"
        return TargetFacts(engine=lab, device=device, threads=threads, blas=blas)
    # llama.cpp uses as many threads as OpenBLAS. If MLX uses a GPU, it is unknown whether llama.cpp does.
    own_threads = threads if blas == "openblas" else None
    return TargetFacts(engine=f"{lab}, {llama}", device="cpu" if blas and not on_gpu else None, threads=own_threads)


def _last(report: GenerationReport) -> Chunk:
    return Chunk(
        at_s=time.perf_counter(),
        finish_reason=report.finish_reason,
        usage=TokenUsage(prompt=report.prompt_tokens, cached=report.cached_tokens, completion=report.output_tokens),
        server=ServerFigures(
            queue_ms=report.queue_s * 1e3,
            ttft_ms=report.ttft_s * 1e3,
            prefill_tok_s=report.prompt_tokens_per_second or None,
            decode_tok_s=report.tokens_per_second or None,
            peak_memory_gb=report.peak_memory_bytes / 1e9,
        ),
    )


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as exc:
        raise InvalidRequestError(f"the request is not valid JSON: {exc!s:.200}; give plain values") from exc

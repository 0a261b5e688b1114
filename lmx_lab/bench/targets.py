"""What can be measured: a chat-format server by its address, and the bare engine without HTTP."""

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
from lmx_lab.bench.exchange import Address, Exchange
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

# Whoever measures another server need not wait for MLX.
if TYPE_CHECKING:
    from lmx_lab.engine import Engine, GenerationReport

TO_THE_END = {"temperature": 0, "ignore_eos": True}
"""What the lab is asked besides: every answer as long as wanted, and the same each time."""


FEW = 5
"""Names in an error."""


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What computes the answers. ``None`` is what nobody could say."""

    engine: str | None = None
    """Of a lab its version, and after it llama.cpp's where that computes: ``lmx-lab 1.0, llama.cpp-2026.10``."""
    model: str | None = None
    quantization: str | None = None
    device: str | None = None
    threads: int | None = None
    blas: str | None = None


class Target(Protocol):
    """Something that answers chats, on any event loop and on several after each other."""

    @property
    def name(self) -> str: ...

    async def describe(self) -> TargetFacts:
        """What answers now.

        Raises:
            LabError: nobody does, or without a model.
        """

    def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Ask for a chat: ``messages`` and ``max_tokens`` in the chat format; the target adds what is its own.

        The first chunk is empty and says when the request was sent. Closing the generator ends the answer.

        Raises:
            LabError: before the first chunk or after any. ``UnreachableError`` itself says that nobody is there.
        """


class ChatTarget:
    """A server that speaks the chat-completions format, of any make, over HTTP.

    Each request has a connection of its own, which is there before the clock runs. Of a lab's server the answers are
    as long as they were asked for; of others, where the model ends them.

    Args:
        url: With or without ``/v1`` at its end.
        model: By default the loaded one of a lab, and the only one that another server lists.
        name: For tables; by default the address.
        known: What the server does not say of itself, such as ``TargetFacts(engine="llama.cpp", device="cpu")``.
        extra: Fields that are sent besides; ``{"ignore_eos": True}`` is known to llama.cpp and vLLM.

    Raises:
        InvalidRequestError: an address or a key that could never do.
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
                # mlx_lm.server, for one, lists only what is in a hub's cache, and fails without one.
                if self._model is None or isinstance(exc, UnauthorizedError) or not was_sent(exc):
                    raise
        if not self._is_lab and not self._model:
            self._model = self._only(names)
        found = await self._of_lab() if self._is_lab else TargetFacts(model=self._model)
        given = {name: value for name, value in vars(self._known).items() if value is not None}
        return replace(found, **given)

    def _only(self, names: list[str]) -> str:
        """Some servers load what is asked for, and list all that could be: the first need not be what they serve."""
        if not names:
            raise ModelNotFoundError(f"{self.url} lists no model; give the name of one as model=")
        if len(names) > 1:
            listed = ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")
            raise UnclearModelError(f"{self.url} lists {len(names)} models ({listed:.400}); name one as model=")
        return names[0]

    async def _of_lab(self) -> TargetFacts:
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
        computed = _computed(
            f"lmx-lab {version}",
            llama=f"{record.engine}-{versions.get(record.engine)}" if record.engine == "llama.cpp" else None,
            blas=compute.blas if compute else None,
            threads=compute.threads if compute else None,
        )
        return replace(computed, model=record.id, quantization=record.quantization)

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        if self._is_lab is None:
            # Not every server lists its models. What else is amiss, the answer will tell.
            try:
                await self.describe()
            except UnclearModelError:
                raise
            except LabError:
                pass
        own = TO_THE_END if self._is_lab else {}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        asked = {"model": self._model or "default", **body, **stream, **own, **self._extra}
        async with Exchange(self._address, _json(asked)) as exchange:
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
            raise ConnectionLostError(f"{self.url} ended the stream before the answer's end; ask again")


class EngineTarget:
    """An engine of this process, asked without HTTP; what it has loaded answers."""

    def __init__(self, engine: Engine, *, name: str = "engine") -> None:
        self.name = name
        self._engine = engine

    def __repr__(self) -> str:
        return f"<EngineTarget {self.name}>"

    async def describe(self) -> TargetFacts:
        now = self._engine.snapshot
        if now.entry is None:
            raise NotLoadedError("the engine has no model in memory; load one first")
        computed = _computed(
            "lmx-lab, bare",
            llama=self._engine.fingerprint if now.entry.format == "gguf" else None,
            blas=now.blas.name if now.blas else None,
            threads=now.blas.threads if now.blas else None,
        )
        return replace(computed, model=now.entry.id, quantization=now.entry.quantization)

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


def as_target(target: Target | str | Engine) -> Target:
    """An address as a ``ChatTarget``, an engine as an ``EngineTarget``.

    Raises:
        InvalidRequestError: it is none of these.
    """
    if isinstance(target, str):
        return ChatTarget(target)
    if _is_engine(target):
        return EngineTarget(target)
    if not callable(getattr(target, "ask", None)):
        said = f"{type(target).__name__} cannot be measured; give an address such as http://127.0.0.1:8400, or a target"
        if hasattr(target, "bench"):
            # Blocking for a lab of this process takes its own kind of waiting.
            said = "a lab is measured by its own bench(...), which takes the fields of a Sweep and compare="
        raise InvalidRequestError(said, param="target")
    return target


def _is_engine(target: object) -> TypeIs[Engine]:
    known = sys.modules.get("lmx_lab.engine")
    return known is not None and isinstance(target, known.Engine)


def _computed(lab: str, *, llama: str | None, blas: str | None, threads: int | None) -> TargetFacts:
    """What a lab computes with.

    Args:
        llama: The version of llama.cpp, if it is that; None is MLX, whose version is in the provenance.
        blas, threads: MLX's.
    """
    on_gpu = blas == "unused"
    if llama is None:
        device = None if blas is None else "gpu" if on_gpu else "cpu"
        return TargetFacts(engine=lab, device=device, threads=threads, blas=blas)
    # It takes as many threads as OpenBLAS does; where MLX has a GPU, its wheel need not know that GPU.
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
        raise InvalidRequestError(f"the request cannot be written as JSON: {exc!s:.200}; give plain values") from exc

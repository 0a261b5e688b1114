"""Provide the targets of a measurement: a chat-format server, and an engine of this process without HTTP."""

from __future__ import annotations

import asyncio
import copy
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast, get_args

from lmx_lab.backend import Backend, load_or_cancel
from lmx_lab.bench.http_stream import ChatEndpoint, TimedRequest
from lmx_lab.bench.sample import Chunk, ServerMetrics, measure_chunk
from lmx_lab.client import AsyncLabClient, ChatFormatClient
from lmx_lab.client.chat_format import DONE, MAX_OPEN_S, ChunkReader, TokenUsage, next_until, write_stream_request
from lmx_lab.client.connection import was_sent
from lmx_lab.errors import (
    ConnectionLostError,
    InvalidRequestError,
    LabError,
    ModelNotFoundError,
    NotLoadedError,
    UnauthorizedError,
    UnclearModelError,
    first_names,
)
from lmx_lab.values.models import EngineChoice, LoadSpec

# The engine is imported only for types and in EngineTarget, because measuring another server does not need MLX.
if TYPE_CHECKING:
    from lmx_lab.engine import ModelManager


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Facts about the target. Unknown values are ``None``."""

    engine: str | None = None
    """Name and version of the server. An LMX Lab server adds the version of llama.cpp if that runs the model:
    ``lmx-lab 1.0, llama.cpp-2026.10``."""
    model: str | None = None
    quantization: str | None = None
    device: str | None = None
    threads: int | None = None
    blas: str | None = None


class Target(Protocol):
    """Something that answers chats and can be measured. It can be used on several event loops, one after the other."""

    @property
    def name(self) -> str: ...

    async def describe(self) -> TargetFacts:
        """Return facts about the target and its current model.

        Raises:
            LabError: the target does not answer, or has no model.
        """

    def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Send a chat request with ``messages`` and ``max_tokens``, and yield the chunks of the answer.

        The target adds its own fields to the request. The first chunk is empty and has the time at which the request
        was sent. Closing the generator cancels the request.

        Raises:
            LabError: before the first chunk or after any chunk. ``UnreachableError``, but not its subclasses, means
                that there was no reply.
        """


class ChatTarget:
    """Any chat-format server, over HTTP.

    Each request has its own connection, which is opened before the time is measured. Answers of LMX Lab servers
    have the requested length; those of other servers may be shorter.

    Args:
        url: The address, with or without ``/v1`` at the end.
        model: The model to measure; by default the loaded model of an LMX Lab server, or the only model that another
            server lists.
        name: The target's name in tables; by default the address.
        known: Facts that the server does not report, such as ``TargetFacts(engine="llama.cpp", device="cpu")``.
        extra: Additional fields of each request, such as ``{"ignore_eos": True}`` for llama.cpp and vLLM.
        max_open_s: Time for which a stream may stay open after the finish reason; then the answer counts as complete.

    Raises:
        InvalidRequestError: the address or the key is not valid.
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
        max_open_s: float = MAX_OPEN_S,
    ) -> None:
        self._endpoint = ChatEndpoint(url, api_key)
        self.url = self._endpoint.url
        self.name = name or self.url.partition("://")[2]
        self._model = model
        self._api_key = api_key
        self._known = known or TargetFacts()
        self._extra = dict(extra or {})
        self._max_open_s = max_open_s
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
                # Store the kind of server, so that the list is not requested again before each request.
                if was_sent(exc):
                    self._is_lab = bool(client.is_lab)
                # For example, mlx_lm.server lists the hub cache only, and fails if there is none.
                if self._model is None or isinstance(exc, UnauthorizedError) or not was_sent(exc):
                    raise
        if not self._is_lab and not self._model:
            if not names:
                raise ModelNotFoundError(f"{self.url} lists no models; give the name of a model with model=")
            # Some servers list all models that they could load, so the first of several is not used by default.
            if len(names) > 1:
                first = first_names(names, 5)
                raise UnclearModelError(f"{self.url} lists {len(names)} models ({first:.400}); choose one with model=")
            self._model = names[0]
        found = TargetFacts(model=self._model)
        if self._is_lab:
            async with AsyncLabClient(self.url, api_key=self._api_key) as client:
                version, listed = await client.version(), await client.models()
            if self._model is None:
                chosen = [record for record in listed.models if record.loaded and record.kind == "chat"]
                # The main model answers requests that name none.
                chosen.sort(key=lambda record: not record.main)
            else:
                chosen = [record for record in listed.models if record.id == self._model]
            if not chosen:
                missing = "loaded chat model" if self._model is None else f"model {self._model!r:.80}"
                raise NotLoadedError(f"{self.url} has no {missing}; load one first")
            record, compute = chosen[0], listed.compute
            versions = {engine.name: engine.version for engine in listed.engines}
            facts = _engine_facts(
                f"lmx-lab {version}",
                llama=f"{record.engine}-{versions.get(record.engine)}" if record.engine == "llama.cpp" else None,
                blas=compute.blas if compute else None,
                threads=compute.threads if compute else None,
            )
            found = replace(facts, model=record.id, quantization=record.quantization)
        given = {name: value for name, value in vars(self._known).items() if value is not None}
        return replace(found, **given)

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        if self._is_lab is None:
            # Some servers do not list their models. Other errors will occur again with the request.
            try:
                await self.describe()
            except UnclearModelError:
                raise
            except LabError:
                pass
        # All answers of LMX Lab servers are deterministic and have the requested length.
        lab_fields = {"temperature": 0, "ignore_eos": True} if self._is_lab else {}
        request = {"model": self._model or "default", **body, **lab_fields, **self._extra}
        content = write_stream_request(request)
        async with TimedRequest(self._endpoint, content) as sent:
            yield Chunk(at_s=sent.send())
            reader, until_s = ChunkReader(self.url), None
            async with aclosing(sent.events()) as events:
                while (event := await next_until(events, until_s)) is not None and (event.data or "").strip() != DONE:
                    yield measure_chunk(reader.read(event.data) if event.data else None, event.at_s)
                    if reader.finished and until_s is None:
                        until_s = asyncio.get_running_loop().time() + self._max_open_s
        if not reader.finished:
            raise ConnectionLostError(f"{self.url} ended the stream before the answer was complete; try again")


class EngineTarget:
    """An engine of this process with its loaded model, measured without HTTP."""

    def __init__(self, engine: ModelManager, *, name: str = "engine") -> None:
        self.name = name
        self._engine = engine

    def __repr__(self) -> str:
        return f"<EngineTarget {self.name}>"

    async def describe(self) -> TargetFacts:
        now = self._engine.snapshot
        if now.entry is None:
            raise NotLoadedError("the engine has no loaded model; load one first")
        facts = _engine_facts(
            "lmx-lab, bare",
            llama=self._engine.fingerprint if now.entry.format == "gguf" else None,
            blas=now.blas.name if now.blas else None,
            threads=now.blas.threads if now.blas else None,
        )
        return replace(facts, model=now.entry.id, quantization=now.entry.quantization)

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        # Imported here, because measuring a server does not need the engine.
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
            if (report := stream.report) is not None:
                yield Chunk(
                    at_s=time.perf_counter(),
                    finish_reason=report.finish_reason,
                    usage=TokenUsage(
                        prompt=report.prompt_tokens, cached=report.cached_tokens, completion=report.output_tokens
                    ),
                    server=ServerMetrics(
                        queue_ms=report.queue_s * 1e3,
                        ttft_ms=report.ttft_s * 1e3,
                        prefill_tok_s=report.prompt_tokens_per_second or None,
                        decode_tok_s=report.tokens_per_second or None,
                        peak_memory_gb=report.peak_memory_bytes / 1e9,
                        drafted_tokens=report.drafted_tokens,
                        accepted_tokens=report.accepted_tokens,
                    ),
                )


class EngineSide:
    """A lab whose model is loaded with one engine before it is measured.

    Args:
        target: Sends the requests to the lab.
        spec: The load. Its engine is the name in tables.
    """

    def __init__(self, target: Target, backend: Backend, spec: LoadSpec) -> None:
        self.name: str = spec.engine
        self.spec = spec
        self.failure: LabError | None = None
        """Why the last load has failed. It is the error of all requests up to the next load."""
        self._target = target
        self._backend = backend

    async def load(self) -> None:
        """Load the model, unless it is in memory with this engine. Cancelling this cancels the load."""
        self.failure = None
        try:
            await load_or_cancel(self._backend, self.spec)
        except LabError as exc:
            self.failure = exc

    async def describe(self) -> TargetFacts:
        return await self._target.describe()

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        if self.failure is not None:
            raise self.failure
        async with aclosing(self._target.ask(body)) as chunks:
            async for chunk in chunks:
                yield chunk


def engine_sides(target: Target, backend: Backend, model: str, engines: Sequence[str]) -> list[EngineSide]:
    """Return a side for each engine that a lab is to be measured with.

    Raises:
        InvalidRequestError: there is no such engine, or one is given twice.
    """
    choices = [name for name in get_args(EngineChoice) if name != "auto"]
    for engine in engines:
        if engine not in choices:
            raise InvalidRequestError(
                f"the engine {engine!r:.80} is unknown; give {' or '.join(choices)}", param="engine"
            )
        if engines.count(engine) > 1:
            raise InvalidRequestError(f"the engine {engine} is given twice; give each engine once", param="engine")
    return [EngineSide(target, backend, LoadSpec(model=model, engine=cast(EngineChoice, it))) for it in engines]


def as_target(target: Target | str | ModelManager, name: str | None = None) -> Target:
    """Convert an address to a ``ChatTarget``, and an engine to an ``EngineTarget``; a target gets the given name.

    Raises:
        InvalidRequestError: the argument is none of these.
    """
    if isinstance(target, str):
        return ChatTarget(target, name=name)
    # If the module of the engine was not imported, the target cannot be an engine.
    if (known := sys.modules.get("lmx_lab.engine")) is not None and isinstance(target, known.ModelManager):
        return EngineTarget(target, name=name or "engine")
    if not callable(getattr(target, "ask", None)):
        text = f"{type(target).__name__} cannot be measured; give an address such as http://127.0.0.1:8400, or a target"
        if hasattr(target, "bench"):
            # The lab may serve on the event loop that this call would block.
            text = "a lab cannot be measured by run(); call its method bench(), which takes the fields of a Sweep"
        raise InvalidRequestError(text, param="target")
    if name is not None:
        target = copy.copy(target)
        cast(Any, target).name = name
    return cast("Target", target)


def _engine_facts(lab: str, *, llama: str | None, blas: str | None, threads: int | None) -> TargetFacts:
    """Return the facts about an engine of LMX Lab.

    Args:
        lab: Name and version of LMX Lab.
        llama: Name and version of llama.cpp; None for MLX, whose version is in the provenance.
        blas, threads: The BLAS of MLX and its threads.
    """
    on_gpu = blas == "unused"
    if llama is None:
        device = None if blas is None else "gpu" if on_gpu else "cpu"
        return TargetFacts(engine=lab, device=device, threads=threads, blas=blas)
    # llama.cpp uses as many threads as OpenBLAS. If MLX uses a GPU, it is not known whether llama.cpp does.
    own_threads = threads if blas == "openblas" else None
    return TargetFacts(engine=f"{lab}, {llama}", device="cpu" if blas and not on_gpu else None, threads=own_threads)

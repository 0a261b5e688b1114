"""Ollama's API for models: ``/api/tags``, ``/api/show``, ``/api/ps``, ``/api/version`` and ``/api/pull``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from lmx_lab.broadcast import Feed
from lmx_lab.engine import ModelManager
from lmx_lab.engine.lookup import public_id
from lmx_lab.errors import InvalidRequestError, LabError, ModelNotFoundError, QueueFullError, UnusableModelError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.errors import detail_for, status_of
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import JSON_LINES, json_lines
from lmx_lab.http.streaming import EventStream, while_connected
from lmx_lab.server.admin import check_admin, find_model, listed_models
from lmx_lab.server.answers import ignored_header, json_response
from lmx_lab.server.ollama import known_model, listed_name, ollama_error
from lmx_lab.server.openapi import OLLAMA_COMMON_ERRORS, OLLAMA_ERRORS, OLLAMA_LISTING_ERRORS
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.catalog import Catalog
from lmx_lab.weights.facts import read_gguf
from lmx_lab.weights.files import in_thread, read_json
from lmx_lab.weights.store import Progress
from lmx_lab.weights.tokenizer_files import can_infill, main_template
from lmx_lab.wire.ollama import (
    OllamaError,
    OllamaModel,
    OllamaModelDetails,
    OllamaModelInfo,
    OllamaModelRequest,
    OllamaModels,
    OllamaPullProgress,
    OllamaPullRequest,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaShowRequest,
    OllamaVersion,
)

log = logging.getLogger(__name__)
STAGES: Mapping[str, str] = {"download": "downloading", "verify": "verifying", "convert": "converting"}
"""Words for the stages of a download; clients show them."""
THINKING_MARKS = ("enable_thinking", "<think>", "reasoning_effort", "[THINK]")
"""Texts in the templates of models that reason."""
CONFIG_NAMES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""Names of properties in GGUF files and in ``config.json``."""


def ollama_model_routes(manager: ModelManager) -> APIRouter:
    """Return the router of the routes about models."""
    settings = manager.settings
    router = APIRouter(prefix="/api", tags=["ollama"], route_class=StrictRoute)
    downloads = Downloads(manager.catalog, may_download=settings.downloads)

    @router.get("/version", responses=OLLAMA_COMMON_ERRORS)
    async def version() -> OllamaVersion:
        """Return the version of Ollama whose API this is."""
        # The version of Ollama whose API this is. Clients compare it with the oldest version that they support. The
        # version of this server is in the header ``x-lmx-lab``.
        return OllamaVersion(version="0.13.0")

    @router.get("/tags", responses=OLLAMA_COMMON_ERRORS)
    async def tags(request: Request) -> OllamaModels:
        """List the models on this disk in Ollama's format."""
        local = is_local(request.scope)
        models = []
        for listed in (await listed_models(manager))[0]:
            entry, name = listed.entry, listed_name(public_id(listed.entry.id, local=local))
            model = OllamaModel(
                name=name,
                model=name,
                modified_at=_time(entry.modified_at),
                size=entry.size_bytes,
                digest=_digest(entry),
                details=_details(entry),
            )
            models.append(model)
        return OllamaModels(models=models)

    @router.get("/ps", responses=OLLAMA_COMMON_ERRORS)
    async def running(request: Request) -> OllamaRunningModels:
        """List the models in memory in Ollama's format."""
        return OllamaRunningModels(models=list(_running(manager, local=is_local(request.scope))))

    @router.post("/show", response_model=OllamaModelInfo, responses=OLLAMA_LISTING_ERRORS)
    async def show(body: OllamaShowRequest, request: Request) -> Response:
        """Describe a model on this disk: its template, its capabilities, and its context length."""
        name, local = _named(body, settings), is_local(request.scope)
        now = manager.snapshot
        entry = now.entry
        if name is not None:
            # If the model has several formats, this is the one that is listed.
            try:
                entry = (await find_model(name, manager, local=local)).entry
            except ModelNotFoundError:
                # With this setting, an unknown name means the loaded model.
                if not settings.any_model or entry is None:
                    raise
        if entry is None:
            raise ModelNotFoundError("no model is loaded; name one that /api/tags lists", param="model")
        now = manager.snapshot
        context_length = now.context_length if entry is now.entry else entry.context_length
        info = await in_thread(functools.partial(_describe, entry, context_length, local=local))
        return json_response(info.model_dump_json(), body.ignored())

    @router.post(
        "/pull",
        response_model=OllamaPullProgress,
        responses={
            200: json_lines(OllamaPullProgress, OllamaError, description="The progress, and the status `success`"),
            **OLLAMA_ERRORS,
        },
    )
    async def pull(body: OllamaPullRequest, request: Request) -> Response:
        """Download a model without loading it. The download continues if the client disconnects, and further requests
        join it.
        """
        name, local = _named(body, settings), is_local(request.scope)
        check_admin(manager, local=local)
        download = await while_connected(request, downloads.join(name or "", local=local))
        headers = ignored_header(body.ignored())
        if body.stream is False:
            await while_connected(request, download.wait())
            return Response(SUCCESS, media_type="application/json", headers=headers)
        lines = _pull_lines(download, request)
        return EventStream(lines, headers=headers, media_type=JSON_LINES, keep_alive=download.line)

    return router


def _named(body: OllamaModelRequest, settings: Settings) -> str | None:
    name = body.model or body.name
    if name is None:
        raise InvalidRequestError("model: is missing; send the name of a model, as /api/tags lists it", param="model")
    return known_model(name, settings)


# Listings


def _running(manager: ModelManager, *, local: bool) -> Iterator[OllamaRunningModel]:
    now = manager.snapshot
    for model in now.models:
        entry, size, is_main = model.entry, model.memory_bytes, model is now.main
        stays = model.ttl_s is None or (model.pinned and not is_main)
        idle_s = 0.0 if model.idle_since is None else time.perf_counter() - model.idle_since
        left_s = max(0.0, (model.ttl_s or 0.0) - idle_s)
        name = listed_name(public_id(entry.id, local=local))
        yield OllamaRunningModel(
            name=name,
            model=name,
            size=size,
            digest=_digest(entry),
            details=_details(entry),
            # Without an idle time, the model stays in memory.
            expires_at="9999-12-31T23:59:59+00:00" if stays else _time(time.time() + left_s),
            size_vram=size,
            context_length=entry.context_length if model.pinned and not is_main else model.context_length,
        )


def _details(entry: ModelEntry) -> OllamaModelDetails:
    return OllamaModelDetails(
        format=entry.format,
        family=entry.architecture,
        families=[entry.architecture],
        quantization_level=entry.quantization or "",
    )


def _digest(entry: ModelEntry) -> str:
    return hashlib.sha256(f"{entry.id} {entry.format} {entry.size_bytes} {entry.modified_at}".encode()).hexdigest()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# Descriptions


def _describe(entry: ModelEntry, context_length: int | None, *, local: bool) -> OllamaModelInfo:
    """Describe a model. Reads its files, so it is called on a thread."""
    name, architecture = listed_name(public_id(entry.id, local=local)), entry.architecture
    template, infill = "", False
    if entry.kind == "chat":
        template, infill = main_template(entry), can_infill(entry)
    capabilities: list[Any] = []
    if "chat" in entry.kinds:
        # Models whose template does not support tools get their descriptions as text.
        capabilities += ("completion", "tools")
        if any(mark in template for mark in THINKING_MARKS) or entry.format == "echo":
            capabilities.append("thinking")
        if infill:
            capabilities.append("insert")
    if "embedding" in entry.kinds:
        capabilities.append("embedding")
    given: dict[str, Any] = {}
    with contextlib.suppress(UnusableModelError, OSError):
        if entry.format == "gguf":
            header = read_gguf(entry.path)
            parameters = sum(math.prod(tensor.shape) for tensor in header.tensors)
            given = {"general.parameter_count": parameters, **header.metadata}
        elif entry.format == "mlx":
            config = read_json(entry.path / "config.json")
            given = {f"{architecture}.{key}": config.get(its_key) for key, its_key in CONFIG_NAMES.items()}
    # Neither longer texts nor more values are shown.
    shown = {
        key: value
        for key, value in given.items()
        if (isinstance(value, float) and math.isfinite(value))
        or isinstance(value, int)
        or (isinstance(value, str) and len(value) <= 1000)
    }
    # The keys are those of GGUF files.
    shared = {
        "general.architecture": architecture,
        "general.basename": name.removesuffix(":latest"),
        f"{architecture}.context_length": context_length,
    }
    return OllamaModelInfo(
        modified_at=_time(entry.modified_at),
        modelfile=f"FROM {name}\n",
        parameters=f"num_ctx {context_length}" if context_length is not None else "",
        # Continue searches the template of a model that can fill gaps for this word.
        template=template + "{#- .Suffix: the prompt may have a suffix -#}" if infill else template,
        details=_details(entry),
        model_info=dict(list(shown.items())[:256]) | {key: value for key, value in shared.items() if value is not None},
        capabilities=capabilities,
    )


# Downloads

SUCCESS = '{"status":"success"}\n'


class Download:
    """One download of a model, for all clients that wait for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.changes: Feed[None] = Feed()
        self._digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
        """Clients show one bar for each digest; it identifies the download."""
        self._progress: Progress | None = None
        self.task: asyncio.Task[None] | None = None

    def report(self, progress: Progress) -> None:
        """Record the progress. May be called on any thread."""
        self._progress = progress
        self.changes.publish(None)

    def line(self) -> str:
        """Return a line with the current progress."""
        now = self._progress
        if now is None:
            return '{"status":"pulling manifest"}\n'
        shown = {"completed": now.done_bytes, "total": now.total_bytes} if now.total_bytes else {}
        status = f"{STAGES.get(now.stage, now.stage)} {self.name}"
        line = OllamaPullProgress(status=status, digest=self._digest if shown else None, **shown)
        return line.model_dump_json(exclude_none=True) + "\n"

    async def wait(self) -> None:
        """Wait for the end. Cancelling the caller does not cancel the download.

        Raises:
            LabError: the download failed.
        """
        assert self.task is not None
        await asyncio.shield(self.task)


class Downloads:
    """The downloads that are in progress.

    Args:
        may_download: Whether models that are not on this disk may be downloaded.
        limit: Largest number of downloads at the same time.
    """

    def __init__(self, catalog: Catalog, *, may_download: bool, limit: int = 4) -> None:
        self._limit = limit
        self._catalog = catalog
        self._may_download = may_download
        self._running: dict[str, Download] = {}

    async def join(self, name: str, *, local: bool) -> Download:
        """Return the download of a model, which is started unless it is in progress.

        Args:
            local: Whether the caller is on this machine, and may download models.

        Raises:
            ModelNotFoundError: the model is not on this disk, and may not be downloaded.
            QueueFullError: too many other downloads are in progress.
        """
        may_download = local and self._may_download and await in_thread(lambda: self._catalog.can_fetch(name))
        if not may_download:
            await in_thread(lambda: self._catalog.resolve(name, local=local))
        if (download := self._running.get(name)) is not None:
            return download
        if len(self._running) >= self._limit:
            raise QueueFullError(
                f"{self._limit} models are being downloaded, which is the limit; try again later", retry_after_s=30
            )
        download = self._running[name] = Download(name)

        async def run() -> None:
            try:
                if may_download:
                    fetch = functools.partial(self._catalog.fetch, name, download.report)
                    await in_thread(fetch, name="lmx-lab-fetch")
            finally:
                del self._running[name]
                download.changes.close()

        download.task = asyncio.create_task(run(), name=f"lmx-lab pull {name}")
        # Retrieved, because all clients may have disconnected.
        download.task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return download


async def _pull_lines(download: Download, request: Request) -> AsyncGenerator[str, None]:
    # Only the current progress matters, so one unread change is enough.
    with download.changes.subscribe(limit=1) as changes:
        yield download.line()
        async for _ in changes:
            yield download.line()
    try:
        await download.wait()
    except LabError as exc:
        log.warning("%s: the download of %s failed: %s", request.scope.get("lmx_lab.request_id"), download.name, exc)
        yield ollama_error(detail_for(request, exc), status_of(exc)).model_dump_json() + "\n"
        return
    yield SUCCESS

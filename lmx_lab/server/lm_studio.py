"""LM Studio's lists of models, ``GET /api/v0/models`` and ``/api/v1/models``.

Agents and editors such as Zed use these lists to find the loaded models and their context lengths.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from lmx_lab.engine import ModelManager
from lmx_lab.engine.lookup import public_id
from lmx_lab.errors import ModelNotFoundError
from lmx_lab.http.guard import is_local
from lmx_lab.http.openapi import failures
from lmx_lab.server.admin import ListedModel, find_model, listed_models, loaded_context_length, model_cards
from lmx_lab.server.openapi import OLLAMA_COMMON_ERRORS
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.wire.lm_studio import (
    LmStudioCapabilities,
    LmStudioConfig,
    LmStudioFormat,
    LmStudioInstance,
    LmStudioListed,
    LmStudioListing,
    LmStudioModel,
    LmStudioModels,
    LmStudioQuantization,
)
from lmx_lab.wire.ollama import OllamaError


def lm_studio_routes(manager: ModelManager) -> APIRouter:
    """Return the router of LM Studio's lists."""
    router = APIRouter(prefix="/api", tags=["lm studio"])

    @router.get("/v0/models", responses=OLLAMA_COMMON_ERRORS)
    async def models(request: Request) -> LmStudioModels:
        """List the models on this disk in version 0 of LM Studio's format."""
        local = is_local(request.scope)
        found = (await listed_models(manager))[0]
        return LmStudioModels(data=[_model(model, manager.snapshot, local=local) for model in found])

    @router.get("/v0/models/{model:path}", responses=failures(ModelNotFoundError, body=OllamaError))
    async def get_model(model: str, request: Request) -> LmStudioModel:
        """Get one model on this disk in version 0 of LM Studio's format."""
        local = is_local(request.scope)
        return _model(await find_model(model, manager, local=local), manager.snapshot, local=local)

    @router.get("/v1/models", responses=OLLAMA_COMMON_ERRORS)
    async def listing(request: Request) -> LmStudioListing:
        """List the models on this disk in version 1 of LM Studio's format, and in the chat format."""
        local = is_local(request.scope)
        found = (await listed_models(manager))[0]
        cards = await model_cards(manager, request)
        listed = [_listed(model, manager.snapshot, local=local) for model in found]
        return LmStudioListing(data=cards.data, problem=cards.problem, models=listed)

    return router


def _model(model: ListedModel, now: EngineSnapshot, *, local: bool) -> LmStudioModel:
    entry, state = model.entry, model.state(now)
    is_chat, id_ = entry.kind == "chat", public_id(entry.id, local=local)
    return LmStudioModel(
        id=id_,
        type="llm" if is_chat else "embeddings",
        publisher=_publisher(id_),
        arch=entry.architecture,
        compatibility_type=_format(model),
        quantization=entry.quantization or "",
        state="not-loaded" if state is None else "loaded",
        max_context_length=entry.context_length or 0,
        loaded_context_length=loaded_context_length(state, now),
        capabilities=["tool_use"] if is_chat else [],
    )


def _listed(model: ListedModel, now: EngineSnapshot, *, local: bool) -> LmStudioListed:
    entry, state = model.entry, model.state(now)
    is_chat, id_ = entry.kind == "chat", public_id(entry.id, local=local)
    most = entry.context_length or 0
    config = LmStudioConfig(context_length=loaded_context_length(state, now) or most)
    return LmStudioListed(
        type="llm" if is_chat else "embedding",
        publisher=_publisher(id_),
        key=id_,
        display_name=id_.rpartition("/")[2],
        architecture=entry.architecture,
        quantization=None if entry.quantization is None else LmStudioQuantization(name=entry.quantization),
        size_bytes=entry.size_bytes,
        loaded_instances=[] if state is None else [LmStudioInstance(id=id_, config=config)],
        max_context_length=most,
        format=_format(model),
        capabilities=LmStudioCapabilities() if is_chat else None,
    )


def _publisher(id_: str) -> str:
    return id_.rpartition("/")[0] or "lmx-lab"


def _format(model: ListedModel) -> LmStudioFormat:
    return "gguf" if model.entry.format == "gguf" else "mlx"

"""Pydantic models of LM Studio's lists of models, in versions 0 and 1 of its own API."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from lmx_lab.wire.admin import ModelCards

LmStudioFormat = Literal["gguf", "mlx"]


class LmStudioModel(BaseModel):
    """An entry of GET /api/v0/models."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["llm", "embeddings"]
    """``embeddings`` includes rerankers, which LM Studio does not have."""
    publisher: str
    arch: str
    compatibility_type: LmStudioFormat
    quantization: str
    state: Literal["loaded", "not-loaded"]
    max_context_length: int
    """Maximum number of tokens that the model was trained for; 0 if it is not known."""
    loaded_context_length: int | None = Field(None, exclude_if=lambda value: value is None)
    """Maximum number of tokens of a request, as the model is loaded; absent if it is not loaded."""
    capabilities: list[Literal["tool_use"]]


class LmStudioModels(BaseModel):
    """The answer of GET /api/v0/models."""

    object: Literal["list"] = "list"
    data: list[LmStudioModel]


class LmStudioQuantization(BaseModel):
    """How the weights of a model are quantized."""

    name: str
    bits_per_weight: None = None


class LmStudioConfig(BaseModel):
    """How a model is loaded."""

    context_length: int
    """Maximum number of tokens of a request."""


class LmStudioInstance(BaseModel):
    """A model in memory."""

    id: str
    config: LmStudioConfig


class LmStudioCapabilities(BaseModel):
    """What a model can do."""

    vision: Literal[False] = False
    trained_for_tool_use: Literal[True] = True


class LmStudioListed(BaseModel):
    """An entry of GET /api/v1/models."""

    type: Literal["llm", "embedding"]
    publisher: str
    key: str
    """The id of the model."""
    display_name: str
    architecture: str
    quantization: LmStudioQuantization | None
    size_bytes: int
    params_string: None = None
    loaded_instances: list[LmStudioInstance]
    """One entry if the model is loaded; otherwise none."""
    max_context_length: int
    format: LmStudioFormat
    capabilities: LmStudioCapabilities | None = Field(None, exclude_if=lambda value: value is None)
    """Absent for encoders."""
    description: None = None


class LmStudioListing(ModelCards):
    """The answer of GET /api/v1/models, which also has the entries of GET /v1/models for clients of the chat format."""

    models: list[LmStudioListed]

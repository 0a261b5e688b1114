"""Run language models on MLX and llama.cpp: load them, and compute requests. Contains neither HTTP nor sessions."""

from lmx_lab.engine.manager import ModelManager
from lmx_lab.engine.requests import (
    AnswerFormat,
    Caller,
    ChatPrompt,
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    InfillPrompt,
    Ranking,
    RerankRequest,
    Sampling,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolUse,
    TraceRequest,
)
from lmx_lab.engine.stream import Answer

__all__ = [
    "AnswerFormat",
    "Caller",
    "ChatPrompt",
    "EmbeddingRequest",
    "Embeddings",
    "GenerationRequest",
    "InfillPrompt",
    "ModelManager",
    "Ranking",
    "RerankRequest",
    "Sampling",
    "TextPrompt",
    "TokenPrompt",
    "Answer",
    "Tool",
    "ToolUse",
    "TraceRequest",
]

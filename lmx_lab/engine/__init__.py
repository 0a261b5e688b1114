"""Tokens in, tokens out, on MLX and llama.cpp: knows no HTTP and no sessions."""

from lmx_lab.engine.manager import Engine
from lmx_lab.engine.pending import Pending
from lmx_lab.engine.requests import (
    AnswerFormat,
    ChatPrompt,
    EmbeddingRequest,
    Embeddings,
    GenerationRequest,
    Ranking,
    RerankRequest,
    Sampling,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolUse,
)
from lmx_lab.engine.stream import TokenStream

__all__ = [
    "AnswerFormat",
    "ChatPrompt",
    "EmbeddingRequest",
    "Embeddings",
    "Engine",
    "GenerationRequest",
    "Pending",
    "Ranking",
    "RerankRequest",
    "Sampling",
    "TextPrompt",
    "TokenPrompt",
    "TokenStream",
    "Tool",
    "ToolUse",
]

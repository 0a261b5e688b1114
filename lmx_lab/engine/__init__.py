"""Tokens in, tokens out, on MLX: knows no HTTP and no sessions."""

from lmx_lab.engine.engine import Engine
from lmx_lab.engine.requests import (
    ChatPrompt,
    Delta,
    EngineSnapshot,
    FinishReason,
    GenerationReport,
    GenerationRequest,
    LoadReport,
    PromptProgress,
    PromptScores,
    Sampling,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
)
from lmx_lab.engine.stream import TokenStream

__all__ = [
    "ChatPrompt",
    "Delta",
    "Engine",
    "EngineSnapshot",
    "FinishReason",
    "GenerationReport",
    "GenerationRequest",
    "LoadReport",
    "PromptProgress",
    "PromptScores",
    "Sampling",
    "TextPrompt",
    "TokenLogprob",
    "TokenPrompt",
    "TokenStream",
]

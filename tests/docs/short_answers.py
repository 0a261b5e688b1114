"""Limit the length of chat answers in the processes that serve the pages' examples, to save time in tests."""

from __future__ import annotations

from dataclasses import replace

from lmx_lab.engine import GenerationRequest
from lmx_lab.server import chat, messages
from lmx_lab.server.responses import routes as responses
from lmx_lab.server.translate import generation_request
from lmx_lab.wire.chat import ChatRequest

MAX_TOKENS = 48


def limit_answers() -> None:
    """Limit all later chat answers of this process to ``MAX_TOKENS`` tokens. Called once in a process."""
    for module in (chat, messages, responses):
        assert module.generation_request is generation_request, f"{module.__name__} reads chat requests another way"
        vars(module)["generation_request"] = short_generation_request


def short_generation_request(request: ChatRequest) -> GenerationRequest:
    translated = generation_request(request)
    return replace(translated, max_tokens=min(translated.max_tokens, MAX_TOKENS))

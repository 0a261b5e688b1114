"""Answers that end soon, in the processes that serve the pages' examples: a reader has the time, a test has not."""

from __future__ import annotations

from dataclasses import replace

from lmx_lab.engine import GenerationRequest
from lmx_lab.server import inference
from lmx_lab.server.translate import generation_request
from lmx_lab.wire.chat import ChatRequest

MOST_TOKENS = 48


def be_brief() -> None:
    """From here on no chat answer of this process has more tokens."""
    vars(inference)["generation_request"] = brief


def brief(request: ChatRequest) -> GenerationRequest:
    asked = generation_request(request)
    return replace(asked, max_tokens=min(asked.max_tokens, MOST_TOKENS))

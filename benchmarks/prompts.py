"""Create prompts from seeds: the same for both sides of a comparison, different in each round."""

from __future__ import annotations

import random
from typing import Any

from lmx_lab.bench.case import WORDS

Message = dict[str, str]


def words(seed: int, count: int) -> str:
    """Return random words with about ``count`` tokens."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def story(seed: int) -> list[Message]:
    """Return a short prompt that has a long answer."""
    return [_user(f"Write a very long story, in many chapters, about these: {words(seed, 5)}.")]


def brief(seed: int) -> list[Message]:
    """Return the shortest possible prompt, to measure decode without prefill.

    Its system message replaces the longer one of the template.
    """
    return [{"role": "system", "content": "Go."}, _user(words(seed, 4))]


def history(seed: int, tokens: int) -> list[Message]:
    """Return a prompt of about ``tokens`` tokens."""
    return [_user(f"Here is a list of words: {words(seed, tokens - 45)}. Tell a story about them.")]


def following(turn: list[Message], answer: str, question: str) -> list[Message]:
    """Return the prompt of the next turn."""
    return [*turn, {"role": "assistant", "content": answer}, _user(question)]


def chat_body(messages: list[Message], *, max_tokens: int, model: str = "default", **more: Any) -> dict[str, Any]:
    """Return the body of a streaming request with greedy decoding and usage."""
    return {
        "model": model,
        "messages": messages,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def _user(text: str) -> Message:
    return {"role": "user", "content": text}

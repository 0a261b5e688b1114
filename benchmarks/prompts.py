"""Makes prompts from seeds: the same for both sides of a comparison, different in each round."""

from __future__ import annotations

import random
from typing import Any

from lmx_lab.bench.prompts import WORDS

Message = dict[str, str]


def words(seed: int, count: int) -> str:
    """Random words with about ``count`` tokens."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def story(seed: int) -> list[Message]:
    """A short prompt with a long answer."""
    return [_user(f"Write a very long story, in many chapters, about these: {words(seed, 5)}.")]


def brief(seed: int) -> list[Message]:
    """The shortest possible prompt, without the template's system message, for measuring decode but not prefill."""
    return [{"role": "system", "content": "Go."}, _user(words(seed, 4))]


def history(seed: int, tokens: int) -> list[Message]:
    """A prompt of about ``tokens`` tokens."""
    return [_user(f"Here is a list of words: {words(seed, tokens - 45)}. Tell a story about them.")]


def following(turn: list[Message], answer: str, question: str) -> list[Message]:
    return [*turn, {"role": "assistant", "content": answer}, _user(question)]


def chat_body(messages: list[Message], *, max_tokens: int, model: str = "default", **more: Any) -> dict[str, Any]:
    """The body of a streaming request with greedy decoding and usage."""
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

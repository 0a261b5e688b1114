"""What the tokenizers library keeps of a model after the model is gone."""

from __future__ import annotations

from typing import TypeVar

from tokenizers.models import BPE

Tokenizer = TypeVar("Tokenizer")


def without_word_cache(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer of transformers, which now splits each word anew.

    tokenizers 0.23 remembers up to 10,000 words of each BPE model in every thread that has encoded with it, its own
    threads included, and forgets them when the thread ends, not when the model goes: up to 3 MB for each load and
    thread.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if isinstance(model, BPE):
        model._resize_cache(0)
    return tokenizer

"""Disable the word cache of the tokenizers library, which is not released with the model."""

from __future__ import annotations

from typing import TypeVar

from tokenizers.models import BPE

Tokenizer = TypeVar("Tokenizer")


def without_word_cache(tokenizer: Tokenizer) -> Tokenizer:
    """Disable the word cache of a tokenizer of transformers, and return the same tokenizer.

    tokenizers 0.23 caches up to 10,000 words of each BPE model in every thread that has encoded with it, including
    threads of its own. The cache is released when the thread ends, and not with the model: up to 3 MB for each load
    and thread.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if isinstance(model, BPE):
        model._resize_cache(0)
    return tokenizer

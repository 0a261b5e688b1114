"""Log-probabilities as numbers, out of MLX arrays. Engine thread only."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.values.generation import TokenLogprob

Row = NDArray[np.float32]


def as_rows(scores: mx.array) -> Row:
    """(rows, vocabulary) in float32, whatever the model computes in; one row may come without its axis."""
    return np.atleast_2d(np.array(scores.astype(mx.float32), copy=False))


def prompt_token(vocabulary: Vocabulary, logits: Row, token: int, top: int) -> TokenLogprob:
    """A token of a prompt, by the logits of the place before it."""
    # Of one row at a time: numpy's exponential is ten times as fast as MLX's on a CPU.
    most = logits.max()
    total = float(most + np.log(np.exp(logits - most).sum()))
    return _entry(vocabulary, logits, token, top, total)


def answer_token(vocabulary: Vocabulary, logprobs: Row, token: int, top: int, *, ends: bool) -> TokenLogprob:
    """A token of an answer, which does not show special ones."""
    entry = _entry(vocabulary, logprobs, token, top, 0.0)
    if ends or vocabulary.is_special(token):
        return replace(entry, bytes=b"", ends=ends)
    return entry


def _entry(vocabulary: Vocabulary, scores: Row, token: int, top: int, total: float) -> TokenLogprob:
    """The token with its ``top`` likeliest alternatives, itself among them if it is one, likeliest first."""
    return TokenLogprob(
        token=token,
        text=vocabulary.text_of(token),
        bytes=vocabulary.bytes_of(token),
        logprob=float(scores[token]) - total,
        top=tuple(_entry(vocabulary, scores, other, 0, total) for other in _likeliest(scores, top)),
    )


def _likeliest(scores: Row, count: int) -> list[int]:
    """For the few that can be asked for, many times faster than a partition of the vocabulary."""
    rest, found = scores.copy() if count > 1 else scores, []
    for _ in range(min(count, len(scores))):
        at = int(rest.argmax())
        found.append(at)
        if count > 1:
            rest[at] = -np.inf
            if not np.isfinite(rest.max()):
                break
    return found

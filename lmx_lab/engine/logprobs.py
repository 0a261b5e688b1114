"""Log-probabilities as numbers, out of MLX arrays. Engine thread only."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from lmx_lab.engine.requests import TokenLogprob
from lmx_lab.engine.vocabulary import Vocabulary

Rows = NDArray[np.float32]


def as_rows(logprobs: mx.array) -> Rows:
    """(rows, vocabulary) in float32, whatever the model computes in; one row may come without its axis."""
    return np.atleast_2d(np.array(logprobs.astype(mx.float32), copy=False))


def token_logprob(vocabulary: Vocabulary, row: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """The token with its ``top`` likeliest alternatives, itself among them if it is one, likeliest first."""
    likeliest: list[int] = []
    if top:
        some = np.argpartition(-row, top - 1)[:top]
        likeliest = [int(at) for at in some[np.argsort(-row[some], kind="stable")]]
    return TokenLogprob(
        token=token,
        text=vocabulary.text_of(token),
        bytes=vocabulary.bytes_of(token),
        logprob=float(row[token]),
        top=tuple(_plain(vocabulary, row, at) for at in likeliest),
    )


def _plain(vocabulary: Vocabulary, row: NDArray[np.float32], token: int) -> TokenLogprob:
    text, data = vocabulary.text_of(token), vocabulary.bytes_of(token)
    return TokenLogprob(token=token, text=text, bytes=data, logprob=float(row[token]))

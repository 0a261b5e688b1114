"""Compute, in NumPy, the distribution from which the next token is sampled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmx_lab.engine.requests import Sampling

GREEDY_BELOW = 1e-4
"""At lower temperatures, the most likely token is always chosen. At this one, a token that is 0.1 % more likely is
sampled 20,000 times as often."""
Scores = NDArray[np.floating[Any]]


def log_softmax(scores: Scores) -> Scores:
    """Return scores as log-probabilities."""
    most = scores.max()
    total: Scores = scores - (most + math.log(np.exp(scores - most).sum()))
    return total


def drawn_scores(logprobs: Scores, sampling: Sampling) -> Scores:
    """Return the scores from which a token is sampled, relative to the highest one.

    They are minus infinity for the tokens that ``top_p``, ``min_p`` and ``top_k`` remove.

    Args:
        logprobs: The log-probabilities of all tokens, after penalties and bias.
    """
    kept = logprobs
    if sampling.temperature < GREEDY_BELOW:
        kept = np.full_like(logprobs, -np.inf)
        kept[logprobs.argmax()] = 0.0
        return kept
    if sampling.top_p < 1:
        ordered = np.sort(kept)[::-1]
        likelier = np.cumsum(np.exp(ordered)) - np.exp(ordered)
        least = ordered[max(1, int((likelier < sampling.top_p).sum())) - 1]
        kept = np.where(kept < least, -np.inf, kept)
    if sampling.min_p > 0:
        kept = np.where(kept < kept.max() + math.log(sampling.min_p), -np.inf, kept)
    if 0 < sampling.top_k < len(kept):
        least = np.partition(kept, -sampling.top_k)[-sampling.top_k]
        kept = np.where(kept < least, -np.inf, kept)
    drawn: Scores = (kept - kept.max()) / sampling.temperature
    return drawn

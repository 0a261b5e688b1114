"""Test the rank and the entropy of a token against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from lmx_lab.engine.mlx.sampling import answer_token, prompt_token
from lmx_lab.engine.text.vocabulary import Vocabulary


class Letters:
    """A tokenizer whose token ids are the first characters of the alphabet."""

    def __len__(self) -> int:
        return 20

    def decode(self, tokens: list[int], **options: bool) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def test_rank_and_entropy_equal_those_of_numpy():
    logits = np.random.default_rng(0).normal(size=20).astype(np.float32) * 3
    logits[7] = -np.inf
    exact = logits.astype(np.float64)
    probabilities = np.exp(exact) / np.exp(exact).sum()
    positive = probabilities[probabilities > 0]
    entropy = -(positive * np.log(positive)).sum()
    order = list(np.argsort(-exact))
    vocabulary = Vocabulary(Letters())
    logprobs = (exact - np.log(np.exp(exact).sum())).astype(np.float32)
    for token in (3, 7, order[0]):
        for entry in (
            prompt_token(vocabulary, logits, token, 2),
            answer_token(vocabulary, logprobs, token, 2, named=(7, 5), ends=False),
        ):
            assert entry.rank == 1 + order.index(token)
            assert entry.entropy == pytest.approx(entropy, abs=1e-5)
            assert [other.token for other in entry.top] == order[:2]
    assert [other.logprob for other in entry.named] == [-np.inf, pytest.approx(logprobs[5])]

"""The echo model: choose the next token of an answer, with scores like those of a model that has memorized a text, and
embed texts.

The text is the last message, or an answer of a script. The next token of the text has by far the highest score, so it
is chosen at any usual temperature, unless a bias, a penalty or an enforced format prevents it. If the format forbids
the text, tokens that end a JSON value are preferred, so that answers are short and complete.

A vector is made by feature hashing: each word, and each sequence of three letters in a word, adds to one component,
which is selected by a hash (Weinberger et al., arXiv 0902.2206). Texts that share words, or parts of words, have
similar vectors.

The tokens are pieces of words of up to three letters, and single bytes for everything else. The vocabulary is computed,
so token ids never change and no tokenizer file is needed. Any text can be encoded, and decoding its tokens gives the
same text.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import re
import string
import sys
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lmx_lab.engine.distribution import GREEDY_BELOW, Scores, drawn_scores, log_softmax
from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.requests import Sampling
from lmx_lab.values.outputs import TokenLogprob, Vectors, token_text

SPECIAL = ("<|begin|>", "<|message|>", "<|end|>")
BEGIN, MESSAGE, END = range(3)
"""Token ids: the beginning of a prompt; the beginning of a message, which its role follows; the end of a message and of
every answer."""
FIRST_BYTE = 16
"""Id of byte 0. The ids between the special tokens and this one are unused."""
FIRST_PIECE = FIRST_BYTE + 256
LONGEST_PIECE = 4
"""Largest number of bytes, and so of characters, in a token."""
PIECE = re.compile(rb" ?[a-z]{1,3}|[\x00-\xff]")
TEXT_SCORE = 50.0
"""Score of the next token of the text. At temperature 2 another token is chosen once in 100 million."""
AFTER_SCORE = 1.5
"""The same while ``ignore_eos`` repeats the text after its end. It is low enough for samples to differ."""
NO_SCORE = -1e9
"""Score of the end of an answer that is too short. It is finite, because a format may allow nothing else."""
END_SCORE = 45.0
"""Score of the end of the answer, once the text cannot be continued."""
CONSTRAINED_SCORES = {'"': 40.0, "}": 38.0, "]": 36.0, ":": 30.0, ",": 9.0, "[": 5.0, "{": 4.0}
"""Scores of the characters of JSON, used if a format forbids the text."""
CONSTRAINED_LETTERS = 10.0
"""Added to the scores of letters if a format is enforced, so that letters are likelier than digits."""
DIMENSIONS = 384
WORD = re.compile(r"\w+")


class EchoVocabulary:
    """Token ids from 0 to ``size - 1``, and their bytes."""

    def __init__(self) -> None:
        unused = [b""] * (FIRST_BYTE - len(SPECIAL))
        self.bytes: list[bytes] = [*(name.encode() for name in SPECIAL), *unused]
        self.bytes += [bytes([byte]) for byte in range(256)]
        # Everything that the first alternative of ``PIECE`` matches, except single letters.
        for space, length in itertools.product(("", " "), (1, 2, 3)):
            for letters in itertools.product(string.ascii_lowercase, repeat=length):
                if space or length > 1:
                    self.bytes.append((space + "".join(letters)).encode())
        self._texts = [b""] * FIRST_BYTE + self.bytes[FIRST_BYTE:]
        """The bytes of each token in the text of an answer, which contains no special tokens."""
        self._ids = {data: id_ for id_, data in enumerate(self.bytes) if id_ >= FIRST_BYTE}

    @property
    def size(self) -> int:
        return len(self.bytes)

    @property
    def memory_bytes(self) -> int:
        """Memory of the tables of tokens."""
        return sum(map(sys.getsizeof, (*self.bytes, self.bytes, self._texts, self._ids)))

    @functools.cached_property
    def token_table(self) -> TokenTable:
        """The vocabulary for llguidance."""
        return TokenTable(self.bytes, list(range(FIRST_BYTE)), [END])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; names of special tokens in it are ordinary text."""
        return list(map(self._ids.__getitem__, PIECE.findall(text.encode())))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens without special ones. Incomplete characters become U+FFFD."""
        return b"".join(map(self._texts.__getitem__, tokens)).decode(errors="replace")

    def show(self, tokens: Sequence[int]) -> str:
        """Do the same as ``decode``, but with the names of special tokens."""
        return b"".join([self.bytes[token] for token in tokens]).decode(errors="replace")

    def text_of(self, token: int) -> str:
        """Return one token as text, or as ``bytes:\\xe2`` if it is a part of a character."""
        return token_text(self.bytes[token])


@functools.cache
def echo_vocabulary() -> EchoVocabulary:
    """Return the only vocabulary of the process. It takes 20 ms to create and is never changed."""
    return EchoVocabulary()


class EchoModel:
    """The vocabulary, and the scores that do not depend on a text."""

    def __init__(self) -> None:
        self.vocabulary = echo_vocabulary()
        unconstrained = np.random.default_rng(0).random(self.vocabulary.size)
        unconstrained[[FIRST_BYTE + byte for byte in range(256) if not bytes([byte]).isalnum()]] = -8.0
        unconstrained[:FIRST_BYTE] = -20.0
        self.free = unconstrained
        """Scores of an answer without an enforced format."""
        # With these, a JSON value ends soon: empty strings, numbers of one digit, few members.
        self.constrained = scores = unconstrained.copy()
        """Scores of an answer with an enforced format."""
        scores[FIRST_PIECE:] += CONSTRAINED_LETTERS
        for letter in string.ascii_letters.encode():
            if letter in b"eE":  # may continue a number
                scores[FIRST_BYTE + letter] = -8.0
            else:
                scores[FIRST_BYTE + letter] += CONSTRAINED_LETTERS
        for character, score in CONSTRAINED_SCORES.items():
            scores[FIRST_BYTE + ord(character)] = score

    @functools.cached_property
    def memory_bytes(self) -> int:
        return self.vocabulary.memory_bytes + self.free.nbytes + self.constrained.nbytes

    def prompt_scores(self, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
        """Return each token of a prompt with its log-probability, which does not depend on the tokens before it."""
        logprobs = log_softmax(self.free)
        likeliest = [self.entry(logprobs, other) for other in _likeliest(logprobs, top)]
        first = TokenLogprob(
            token=tokens[0],
            text=self.vocabulary.text_of(tokens[0]),
            bytes=self.vocabulary.bytes[tokens[0]],
            logprob=None,
        )
        entropy = _entropy(logprobs)
        rest = [self.entry(logprobs, token, tuple(likeliest), entropy) for token in tokens[1:]]
        return (first, *rest)

    def entry(
        self, logprobs: Scores, token: int, top: tuple[TokenLogprob, ...] = (), entropy: float | None = None
    ) -> TokenLogprob:
        """Return a token with its log-probability, its rank and its alternatives."""
        return TokenLogprob(
            token=token,
            text=self.vocabulary.text_of(token),
            bytes=self.vocabulary.bytes[token],
            logprob=float(logprobs[token]),
            top=top,
            rank=1 + int(np.count_nonzero(logprobs > logprobs[token])),
            entropy=entropy,
        )


class AnswerSampler:
    """Chooses the tokens of one answer.

    Args:
        text: Token ids of the text that the answer repeats.
        choice: Index of the answer among those to one request. With the same seed, each of them is sampled differently.
    """

    def __init__(
        self,
        model: EchoModel,
        text: Sequence[int],
        sampling: Sampling,
        *,
        choice: int,
        ignore_eos: bool,
        min_tokens: int = 0,
    ) -> None:
        self._model = model
        self._text = text
        self._sampling = sampling
        self._min_tokens = math.inf if ignore_eos else min_tokens
        """The text is repeated until the answer has this number of tokens."""
        self._at = 0
        """Number of tokens chosen so far."""
        self._on_text = True
        """Whether all chosen tokens are those of the text."""
        self._counts = Counter[int]()
        """Number of occurrences of each token that the penalties count."""
        self._counted = deque[int]()
        """These tokens, oldest first."""
        # Any integer is a valid seed; None always gives the same one, so answers are reproducible.
        digest = hashlib.blake2b(f"{sampling.seed}:{choice}".encode(), digest_size=16).digest()
        self._random = np.random.default_rng(int.from_bytes(digest, "little"))
        self._has_penalties = sampling.has_penalties
        # Up to this temperature, the next token of the text is chosen without sampling.
        self._certain = not sampling.logit_bias and not self._has_penalties and sampling.temperature <= 2.0
        self._greedy = sampling.temperature < GREEDY_BELOW

    def next(self, mask: NDArray[np.bool_] | None = None, *, forced: int | None = None) -> int:
        """Return the next token: one that the mask allows, or the one that is forced."""
        token, score = self._preferred()
        if forced is not None:
            token = forced
        elif not self._certain or (mask is not None and not mask[token]) or (not self._greedy and score < END_SCORE):
            token = self._draw(self.scores(constrained=mask is not None), mask)
        self.record(token)
        return token

    def record(self, token: int) -> None:
        """Record the next token of the answer."""
        self._on_text = self._on_text and token == (self._text[self._at] if self._at < len(self._text) else END)
        self._at += 1
        if not self._has_penalties:
            return
        self._counts[token] += 1
        self._counted.append(token)
        if 0 <= self._sampling.repeat_last_n < len(self._counted):
            oldest = self._counted.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def logprob(
        self, scores: Scores, token: int, top: int, named: Sequence[int] = (), *, after_sampling: bool = False
    ) -> TokenLogprob:
        """Return the log-probability of a token under these scores, with ``top`` alternatives and named tokens.

        Args:
            after_sampling: See ``GenerationRequest``.
        """
        logprobs = log_softmax(scores)
        if after_sampling:
            logprobs = log_softmax(drawn_scores(logprobs, self._sampling))
        others = tuple(self._model.entry(logprobs, other) for other in _likeliest(logprobs, top))
        entry = self._model.entry(logprobs, token, others, _entropy(logprobs))
        return replace(entry, named=tuple(self._model.entry(logprobs, other) for other in named)) if named else entry

    def scores(self, *, constrained: bool) -> Scores:
        """Return the score of every token, after penalties and bias."""
        scores = (self._model.constrained if constrained else self._model.free).copy()
        if self._at >= len(self._text) or not self._on_text:
            scores[END] = END_SCORE
        token, score = self._preferred()
        scores[token] = max(scores[token], score)
        sampling = self._sampling
        if self._counts:
            seen = np.fromiter(self._counts, dtype=np.int64)
            counts = np.fromiter(self._counts.values(), dtype=np.float64)
            before, penalty = scores[seen], sampling.repetition_penalty
            scores[seen] = np.where(before > 0, before / penalty, before * penalty)
            scores[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        for biased, bias in sampling.logit_bias:
            scores[biased] += bias
        if self._at < self._min_tokens:
            scores[END] = NO_SCORE
        return scores

    def _preferred(self) -> tuple[int, float]:
        """Return the token that continues the answer, and its score."""
        if self._at < self._min_tokens:
            score = TEXT_SCORE if self._at < len(self._text) else AFTER_SCORE
            return self._text[self._at % len(self._text)] if self._text else FIRST_PIECE, score
        if self._on_text and self._at < len(self._text):
            return self._text[self._at], TEXT_SCORE
        return END, TEXT_SCORE if self._on_text else END_SCORE

    def _draw(self, scores: Scores, mask: NDArray[np.bool_] | None) -> int:
        if mask is not None:
            scores = np.where(mask, scores, -np.inf)
        if self._greedy:
            return int(scores.argmax())
        kept = drawn_scores(log_softmax(scores), self._sampling)
        return int((kept + self._random.gumbel(size=kept.shape)).argmax())


def _entropy(logprobs: Scores) -> float:
    possible = logprobs[np.isfinite(logprobs)]
    return -float((np.exp(possible) * possible).sum())


def _likeliest(scores: Scores, count: int) -> list[int]:
    if not count:
        return []
    count = min(count, int(np.isfinite(scores).sum()))
    indices = np.argpartition(scores, -count)[-count:]
    return [int(token) for token in indices[np.argsort(-scores[indices], kind="stable")]]


def vector(text: str) -> Vectors:
    """Return the text as a vector of length 1 with ``DIMENSIONS`` components."""
    row = np.zeros(DIMENSIONS, dtype=np.float32)
    features = []
    for word in WORD.findall(text.casefold()) or [text]:
        padded = f"<{word}>"
        # A sequence of three letters has half the weight of a whole word.
        features += [(word, 1.0), *((padded[at : at + 3], 0.5) for at in range(len(padded) - 2))]
    for feature, weight in features:
        code = zlib.crc32(feature.encode(errors="replace"))
        row[code % DIMENSIONS] += weight if code & 0x8000_0000 else -weight
    length = float(np.linalg.norm(row))
    if length == 0:
        row[0], length = 1.0, 1.0
    unit: Vectors = row / np.float32(length)
    return unit

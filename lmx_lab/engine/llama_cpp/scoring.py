"""Score the tokens of a prompt with llama.cpp, whose server reports log-probabilities of generated tokens only.

The tokens are generated again, after the ones before them. A grammar of token ids forces ordinary tokens, many in one
request, at the speed of decoding. The reported log-probabilities are those of the raw logits, without the grammar, the
bias and the temperature (measured: equal to those of MLX within rounding).

llama.cpp reports nothing for a token that ends within a character, and no grammar allows a token that ends an answer.
At such positions another token is forced, and the wanted one is looked up among the most likely alternatives, of which
more are requested until it is there.

llama.cpp reports neither ranks nor entropies, so they are computed from the alternatives. The share of the tokens that
are not reported is known only between two limits: it is lowest if they are as likely as the last reported token, and
highest if they are all equally likely. More alternatives are requested until the limits are close.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.llama_cpp.tokenizer import LlamaTokenizer
from lmx_lab.errors import EngineError, UnusableModelError
from lmx_lab.values.outputs import PromptScores, TokenLogprob, token_text

RUN_TOKENS = 64
"""Maximum number of tokens of one request, so that a cancelled request soon leaves its slot."""
FULL_RUN_TOKENS = 16
"""The same if many alternatives are reported, each of which takes 80 bytes."""
OUTWEIGHS = 10_000.0
"""A bias that outweighs any logit."""
MORE = (64, 2048)
"""Numbers of alternatives that are requested before the whole vocabulary, which takes most of a second."""
ENTROPY_ERROR = 0.005
"""Maximum distance between the two limits of an entropy, in nats."""


async def score_prompt(
    tokenizer: LlamaTokenizer,
    tokens: Sequence[int],
    *,
    slot: int,
    top: int,
    start: int,
    distributions: bool,
    progress: Callable[[int], None],
) -> PromptScores:
    """Return the log-probability of each token of a prompt, with ``top`` alternatives.

    Args:
        slot: Id of the slot that computes them.
        start: Position of the first token that is scored. The tokens before it, and the first one, have no score.
        distributions: Whether each token has its entropy, and its rank even if it is high.
        progress: Called with the number of tokens that were scored so far.

    Raises:
        RefusedError, EngineError: see ``LlamaConnection``.
    """
    table = await tokenizer.load_token_table()
    scorer = _Scorer(tokenizer, table, tokens, top, slot=slot, distributions=distributions)
    scores = [_entry(table, token, None) for token in tokens[: max(1, start)]]
    for at, count in _runs(table, tokens, len(scores), FULL_RUN_TOKENS if distributions else RUN_TOKENS):
        scores += await scorer.force(at, count) if count else [await scorer.look_up(at)]
        progress(len(scores))
    return PromptScores(tokens=tuple(scores))


def _runs(table: TokenTable, tokens: Sequence[int], at: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the positions of runs of ordinary tokens with their lengths, and of other tokens with the length 0.

    Args:
        at: The first position.
        length: Maximum length of a run.
    """
    special = set(table.special_token_ids)
    within = [_ends_within_a_character(table, tokens, end) for end in range(len(tokens))]

    def is_ordinary(position: int) -> bool:
        return not (tokens[position] in special or within[position] or within[position - 1])

    while at < len(tokens):
        end = at
        while end < len(tokens) and end - at < length and is_ordinary(end):
            end += 1
        yield at, end - at
        at = max(end, at + 1)


def _ends_within_a_character(table: TokenTable, tokens: Sequence[int], at: int) -> bool:
    """Whether the text up to and with this token ends with an incomplete character."""
    # A character has at most four bytes, so more than four tokens before this one do not matter.
    data = b"".join(table.tokens[token] for token in tokens[max(0, at - 4) : at + 1])
    for length in range(1, min(4, len(data)) + 1):
        byte = data[-length]
        if byte & 0xC0 != 0x80:
            needed = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return length < needed
    return False


class _Scorer:
    """Sends the requests for one prompt."""

    def __init__(
        self,
        tokenizer: LlamaTokenizer,
        table: TokenTable,
        tokens: Sequence[int],
        top: int,
        *,
        slot: int,
        distributions: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._tokens = tokens
        self._top = top
        self._slot = slot
        self._distributions = distributions

    async def force(self, at: int, count: int) -> list[TokenLogprob]:
        """Score a run of ordinary tokens."""
        run = list(self._tokens[at : at + count])
        grammar = "root ::= " + " ".join(f"<[{token}]>" for token in run)
        alternatives = max(self._top, MORE[1] if self._distributions else MORE[0])
        entries = await self._generate(at, count, min(alternatives, self._tokenizer.vocabulary_size), grammar=grammar)
        if [entry["id"] for entry in entries] != run:
            raise EngineError("llama.cpp did not generate the tokens that it was forced to; the prompt is not scored")
        scores = [self._read(entry, entry) for entry in entries]
        return [
            await self.look_up(at + number) if self._is_incomplete(score) else score
            for number, score in enumerate(scores)
        ]

    def _is_incomplete(self, score: TokenLogprob) -> bool:
        return self._distributions and (score.rank is None or score.entropy is None)

    async def look_up(self, at: int) -> TokenLogprob:
        """Score one token of any kind.

        Raises:
            UnusableModelError: the vocabulary has no token that is a letter.
        """
        token, size = self._tokens[at], self._tokenizer.vocabulary_size
        # After a token that is a whole character, llama.cpp reports alternatives.
        letters = (at for at, data in enumerate(self._table.tokens) if len(data) == 1 and data.isalpha())
        if (letter := next(letters, None)) is None:
            raise UnusableModelError(
                f"the vocabulary of {self._tokenizer.entry.id} has no letters; it cannot score text"
            )
        bias = [[letter, OUTWEIGHS]]
        for count in (*MORE, size):
            (entry,) = await self._generate(at, 1, min(count, size), logit_bias=bias)
            found = next((other for other in entry["top_logprobs"] if other["id"] == token), None)
            if found is not None and not self._is_incomplete(score := self._read(found, entry)):
                return score
        raise EngineError(f"llama.cpp reported no log-probability of the token {token}; the prompt is not scored")

    async def _generate(self, at: int, count: int, alternatives: int, **how: Any) -> list[Mapping[str, Any]]:
        body = {
            "prompt": list(self._tokens[:at]),
            "id_slot": self._slot,
            "n_predict": count,
            "n_probs": alternatives,
            "temperature": 0,
            "samplers": ["temperature"],
            "stream": False,
            **how,
        }
        answer = await self._tokenizer.connection.post("/completion", body)
        entries: list[Mapping[str, Any]] = answer.get("completion_probabilities") or []
        if len(entries) != count:
            raise EngineError(
                f"llama.cpp reported log-probabilities of {len(entries)} of {count} tokens; the prompt is not scored"
            )
        return entries

    def _read(self, entry: Mapping[str, Any], position: Mapping[str, Any]) -> TokenLogprob:
        others = [
            _entry(self._table, int(other["id"]), float(other["logprob"]))
            for other in position["top_logprobs"][: self._top]
        ]
        logprob = float(entry["logprob"])
        logprobs = [float(other["logprob"]) for other in position["top_logprobs"]]
        return replace(
            _entry(self._table, int(entry["id"]), logprob, tuple(others)),
            rank=1 + sum(other > logprob for other in logprobs) if logprob >= logprobs[-1] else None,
            entropy=entropy(logprobs, self._tokenizer.vocabulary_size),
        )


def _entry(table: TokenTable, token: int, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    data = table.tokens[token]
    return TokenLogprob(token=token, text=token_text(data), bytes=data, logprob=logprob, top=top)


def entropy(logprobs: Sequence[float], vocabulary_size: int) -> float | None:
    """Return the entropy of a distribution, in nats, from the log-probabilities of its most likely tokens, in
    descending order; None if they do not determine it within ``ENTROPY_ERROR``.
    """
    known = -math.fsum(math.exp(logprob) * logprob for logprob in logprobs if logprob > -math.inf)
    rest, others = 1.0 - math.fsum(map(math.exp, logprobs)), vocabulary_size - len(logprobs)
    if rest <= 0 or not others:
        return known
    least, most = (rest * -logprobs[-1], rest * math.log(others / rest)) if logprobs[-1] > -math.inf else (0.0, 0.0)
    return known + (least + most) / 2 if most - least <= ENTROPY_ERROR else None

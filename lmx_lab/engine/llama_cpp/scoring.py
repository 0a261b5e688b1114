"""Score the tokens of a prompt with llama.cpp, whose server reports log-probabilities of generated tokens only.

The tokens are generated again, after the ones before them. A grammar of token ids forces ordinary tokens, many in one
request, at the speed of decoding. The reported log-probabilities are those of the raw logits, without the grammar, the
bias and the temperature (measured: equal to those of MLX within rounding).

llama.cpp reports nothing for a token that ends within a character, and no grammar allows a token that ends an answer.
At such positions another token is forced, and the wanted one is looked up among the most likely alternatives, of which
more are requested until it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.llama_cpp.model import HostedModel
from lmx_lab.errors import EngineError, UnusableModelError
from lmx_lab.values.generation import PromptScores, TokenLogprob, token_text

RUN_TOKENS = 64
"""Maximum number of tokens of one request, so that a cancelled request soon leaves its slot."""
OUTWEIGHS = 10_000.0
"""A bias that outweighs any logit."""
MORE = (64, 2048)
"""Numbers of alternatives that are requested before the whole vocabulary, which takes most of a second."""


async def score_prompt(
    hosted: HostedModel, tokens: Sequence[int], *, top: int, progress: Callable[[int], None]
) -> PromptScores:
    """Return the log-probability of each token of a prompt, with ``top`` alternatives. The first token has none.

    Args:
        progress: Called with the number of tokens that were scored so far.

    Raises:
        RefusedError, EngineError: see ``LlamaConnection``.
    """
    table = await hosted.load_token_table()
    scorer = _Scorer(hosted, table, tokens, top)
    scores = [_entry(table, tokens[0], None)]
    for at, count in _runs(table, tokens):
        scores += await scorer.force(at, count) if count else [await scorer.look_up(at)]
        progress(len(scores))
    return PromptScores(tokens=tuple(scores))


def _runs(table: TokenTable, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the positions of runs of ordinary tokens with their lengths, and of other tokens with the length 0."""
    special, at = set(table.special_token_ids), 1
    within = [_ends_within_a_character(table, tokens, end) for end in range(len(tokens))]

    def is_ordinary(position: int) -> bool:
        return not (tokens[position] in special or within[position] or within[position - 1])

    while at < len(tokens):
        end = at
        while end < len(tokens) and end - at < RUN_TOKENS and is_ordinary(end):
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

    def __init__(self, hosted: HostedModel, table: TokenTable, tokens: Sequence[int], top: int) -> None:
        self._hosted = hosted
        self._table = table
        self._tokens = tokens
        self._top = top

    async def force(self, at: int, count: int) -> list[TokenLogprob]:
        """Score a run of ordinary tokens."""
        run = list(self._tokens[at : at + count])
        grammar = "root ::= " + " ".join(f"<[{token}]>" for token in run)
        entries = await self._generate(at, count, max(1, self._top), grammar=grammar)
        if [entry["id"] for entry in entries] != run:
            raise EngineError("llama.cpp did not generate the tokens that it was forced to; the prompt is not scored")
        return [self._read(entry, entry) for entry in entries]

    async def look_up(self, at: int) -> TokenLogprob:
        """Score one token of any kind."""
        token, size = self._tokens[at], self._hosted.vocabulary_size
        for count in (*MORE, size):
            bias = [[self._complete_token(), OUTWEIGHS]]
            (entry,) = await self._generate(at, 1, min(count, size), logit_bias=bias)
            found = next((other for other in entry["top_logprobs"] if other["id"] == token), None)
            if found is not None:
                return self._read(found, entry)
        raise EngineError(f"llama.cpp reported no log-probability of the token {token}; the prompt is not scored")

    def _complete_token(self) -> int:
        """Return a token that is a whole character, after which llama.cpp reports alternatives.

        Raises:
            UnusableModelError: the vocabulary has no such token.
        """
        letters = (at for at, data in enumerate(self._table.tokens) if len(data) == 1 and data.isalpha())
        if (token := next(letters, None)) is None:
            raise UnusableModelError(f"the vocabulary of {self._hosted.entry.id} has no letters; it cannot score text")
        return token

    async def _generate(self, at: int, count: int, alternatives: int, **how: Any) -> list[Mapping[str, Any]]:
        body = {
            "prompt": list(self._tokens[:at]),
            "n_predict": count,
            "n_probs": alternatives,
            "temperature": 0,
            "samplers": ["temperature"],
            "stream": False,
            **how,
        }
        answer = await self._hosted.connection.post("/completion", body)
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
        return _entry(self._table, int(entry["id"]), float(entry["logprob"]), tuple(others))


def _entry(table: TokenTable, token: int, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    data = table.tokens[token]
    return TokenLogprob(token=token, text=token_text(data), bytes=data, logprob=logprob, top=top)

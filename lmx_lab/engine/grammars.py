"""Grammars compiled for one model's vocabulary by llguidance, and kept."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Set
from typing import Any

from llguidance import LLMatcher

from lmx_lab.engine.grammar import alone
from lmx_lab.engine.grammar_trial import Words, compiled, tokenizer_of
from lmx_lab.engine.requests import ToolUse
from lmx_lab.engine.trials import Trials
from lmx_lab.engine.vocabulary import Vocabulary
from lmx_lab.errors import InvalidRequestError

KEPT = 32
LONGEST_REASON = 1000
DEAD_ENDS = {
    "NoExtensionBias": "no text can be a whole answer of this form",
    "ParserTooComplex": "it has become too complex",
    "LexerTooComplex": "it has become too complex",
}
"""llguidance's words for ways in which a grammar stops."""


def words_of(tokenizer: Any, *, width: int, markers: Set[int]) -> Words:
    """
    Args:
        width: Logits for so many token ids.
        markers: Tokens that no text of an answer may contain, beside the special ones.

    Raises:
        InvalidRequestError: no token ends an answer.
    """
    vocabulary = Vocabulary(tokenizer)
    ends = sorted(int(token) for token in tokenizer.eos_token_ids if token < width)
    if not ends:
        raise InvalidRequestError("this model has no token that ends an answer, so no form can be enforced")
    return Words(
        [vocabulary.bytes_of(token) for token in range(width)],
        [id_ for id_ in range(width) if vocabulary.is_special(id_) or id_ in markers or id_ in ends],
        ends,
    )


class Grammars:
    """Belongs to the thread that compiles; the matchers that it hands out belong to whoever gets them."""

    def __init__(self, words: Words, trials: Trials) -> None:
        self._words = words
        self._trials = trials
        self._tokenizer = tokenizer_of(words)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matchers(self, grammar: str, count: int, tools: ToolUse | None = None) -> list[LLMatcher]:
        """So many at the beginning of the grammar.

        Args:
            tools: Those that the grammar calls, to name the one whose parameters are wrong.

        Raises:
            InvalidRequestError: it cannot be compiled; the message has llguidance's reason.
        """
        matcher = self._compiled.pop(grammar, None)
        if matcher is None:
            self._try(grammar, tools)
            matcher = compiled(self._tokenizer, grammar)
        self._compiled[grammar] = matcher
        if len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        return [matcher.deep_copy() for _ in range(count)]

    def _try(self, grammar: str, tools: ToolUse | None) -> None:
        """Names the part that is wrong, if it is wrong by itself."""
        parts = json.loads(grammar)["grammars"][1:]
        reason, part = self._trials.reason(self._words, [grammar, *map(alone, parts)])
        if reason and part is None:
            raise InvalidRequestError(f"the answer's form cannot be enforced: {short_reason(reason)}")
        if part is not None:
            what, param = _named(parts[part]["name"], tools)
            raise InvalidRequestError(f"{what} cannot be enforced: {short_reason(reason)}", param=param)


def _named(part: str, tools: ToolUse | None) -> tuple[str, str]:
    if (found := re.fullmatch(r"call_(\d+)_arguments", part)) is None or tools is None:
        return "this format", "response_format"
    at = int(found[1])
    return f"what the parameters of the tool {tools.tools[at].name!r} ask for", f"tools.{at}.function.parameters"


def short_reason(reason: str) -> str:
    """What llguidance says without what it says of its own state."""
    reason = reason.partition("<state>")[0].strip()
    reason = DEAD_ENDS.get(reason, reason)
    return reason if len(reason) <= LONGEST_REASON else reason[:LONGEST_REASON] + " ..."

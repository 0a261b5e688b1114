"""Grammars compiled for one model's vocabulary by llguidance, and kept."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Set
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from lmx_lab.engine.requests import ToolUse
from lmx_lab.engine.vocabulary import Vocabulary
from lmx_lab.errors import InvalidRequestError

KEPT = 32
LONGEST_REASON = 1000


class Grammars:
    """Belongs to the thread that compiles; the matchers that it hands out belong to whoever gets them.

    Args:
        tokenizer: A copy that nobody else uses.
        width: Logits for so many token ids.
        markers: Tokens that no text of an answer may contain, beside the special ones.
    """

    def __init__(self, tokenizer: Any, *, width: int, markers: Set[int]) -> None:
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(tokenizer, width=width, markers=markers)),
            n_vocab=width,
            eos_token=sorted(int(token) for token in tokenizer.eos_token_ids if token < width),
        )
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
            matcher, reason = self._compile(grammar)
            if reason:
                raise self._refusal(grammar, reason, tools)
        self._compiled[grammar] = matcher
        if len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        return [matcher.deep_copy() for _ in range(count)]

    def _compile(self, grammar: str) -> tuple[LLMatcher, str]:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            # Lexers are built on the way: what is too complex shows here, and not between the tokens of others.
            matcher.compute_bitmask()
        return matcher, matcher.get_error()

    def _refusal(self, grammar: str, reason: str, tools: ToolUse | None) -> InvalidRequestError:
        """Names the part that is wrong, if it is wrong by itself."""
        for part in json.loads(grammar)["grammars"][1:]:
            _, own = self._compile(json.dumps({"grammars": [part]}))
            if own:
                what, param = _named(part["name"], tools)
                return InvalidRequestError(f"{what} cannot be enforced: {short_reason(own)}", param=param)
        return InvalidRequestError(
            f"the answer's form cannot be enforced: {short_reason(reason)}", param="response_format"
        )


def _named(part: str, tools: ToolUse | None) -> tuple[str, str]:
    if (found := re.fullmatch(r"call_(\d+)_arguments", part)) is None or tools is None:
        return "this format", "response_format"
    at = int(found[1])
    return f"what the parameters of the tool {tools.tools[at].name!r} ask for", f"tools.{at}.function.parameters"


def short_reason(reason: str) -> str:
    """What llguidance says without what it says of its own state."""
    reason = reason.partition("<state>")[0].strip()
    return reason if len(reason) <= LONGEST_REASON else reason[:LONGEST_REASON] + " ..."


class _Tokens:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Any, *, width: int, markers: Set[int]) -> None:
        vocabulary = Vocabulary(tokenizer)
        self.tokens = [vocabulary.bytes_of(token) for token in range(width)]
        self.special_token_ids = [token for token in range(width) if vocabulary.is_special(token) or token in markers]
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = None
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        if self._backend is not None:
            # The tokenizer itself writes settings into it before each text, which two threads must not.
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

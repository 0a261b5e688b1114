"""Grammars compiled for one model's vocabulary by llguidance, and kept."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Set
from typing import Any, TypeVar

from llguidance import LLMatcher

from lmx_lab.engine.grammar.build import alone, enforceable_json
from lmx_lab.engine.grammar.sandbox import Words, compiled, tokenizer_of
from lmx_lab.engine.grammar.trials import TOO_LARGE, Trials
from lmx_lab.engine.requests import ToolUse
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.errors import InvalidRequestError

KEPT = 32
LONGEST_REASON = 1000
ANY_OBJECT = enforceable_json({"type": "object"})
T = TypeVar("T")
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
        self._tried: OrderedDict[str, str] = OrderedDict()
        self._refused: OrderedDict[str, InvalidRequestError] = OrderedDict()

    def matchers(self, grammar: str, count: int, tools: ToolUse | None = None) -> list[LLMatcher]:
        """So many at the beginning of the grammar.

        Args:
            tools: Those that the grammar calls, to name the one whose parameters are wrong.

        Raises:
            InvalidRequestError: it cannot be compiled; the message has llguidance's reason.
            QueueFullError: it takes long, and others wait.
        """
        matcher = self._compiled.pop(grammar, None)
        if matcher is None:
            matcher = compiled(self._tokenizer, self.tried(grammar, tools))
        _keep(self._compiled, grammar, matcher)
        return [matcher.deep_copy() for _ in range(count)]

    def tried(self, grammar: str, tools: ToolUse | None = None) -> str:
        """The grammar as it can be compiled; raises as ``matchers``.

        Of tools that may be called but need not be, parameters that cannot be enforced are left to the model: whoever
        offers many tools has not written them all.
        """
        if (refused := self._refused.get(grammar)) is not None:
            raise InvalidRequestError(refused.message, param=refused.param)
        enforced = self._tried.pop(grammar, None) or self._try(grammar, tools)
        _keep(self._tried, grammar, enforced)
        return enforced

    def _try(self, grammar: str, tools: ToolUse | None) -> str:
        whole = json.loads(grammar)
        parts = whole["grammars"][1:]
        while True:
            tried = json.dumps(whole, ensure_ascii=False)
            reason, part = self._trials.reason(self._words, [tried, *map(alone, parts)])
            if not reason:
                return tried
            called = part is not None and _tool_of(parts[part]["name"]) is not None
            if part is None or not called or tools is None or tools.forced or parts[part]["json_schema"] == ANY_OBJECT:
                refusal = _refusal(reason, None if part is None else parts[part]["name"], tools)
                if reason != TOO_LARGE:
                    # That process may have been ended by something else.
                    _keep(self._refused, grammar, refusal)
                raise InvalidRequestError(refusal.message, param=refusal.param)
            parts[part]["json_schema"] = ANY_OBJECT


def _keep(kept: OrderedDict[str, T], grammar: str, value: T) -> None:
    kept[grammar] = value
    kept.move_to_end(grammar)
    if len(kept) > KEPT:
        kept.popitem(last=False)


def _refusal(reason: str, part: str | None, tools: ToolUse | None) -> InvalidRequestError:
    """Names the part that is wrong, if it is wrong by itself."""
    what, param = "the answer's form", None
    if part is not None:
        what, param = "this format", "response_format"
        if (at := _tool_of(part)) is not None and tools is not None:
            what = f"what the parameters of the tool {tools.tools[at].name!r} ask for"
            param = f"tools.{at}.function.parameters"
    return InvalidRequestError(f"{what} cannot be enforced: {short_reason(reason)}", param=param)


def _tool_of(part: str) -> int | None:
    found = re.fullmatch(r"call_(\d+)_arguments", part)
    return int(found[1]) if found is not None else None


def short_reason(reason: str) -> str:
    """What llguidance says without what it says of its own state."""
    reason = reason.partition("<state>")[0].strip()
    reason = DEAD_ENDS.get(reason, reason)
    if len(reason) <= LONGEST_REASON:
        return reason
    # The beginning says where, the end says what; what is between them is the caller's own grammar.
    return f"{reason[: LONGEST_REASON // 2]} ... {reason[-LONGEST_REASON // 2 :]}"

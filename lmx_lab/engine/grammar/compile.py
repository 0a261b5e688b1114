"""Compile grammars for one model's vocabulary with llguidance, and cache them."""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Set
from typing import Any, TypeVar

from llguidance import LLMatcher

from lmx_lab.engine.grammar.build import as_grammar, enforceable_json
from lmx_lab.engine.grammar.sandbox import LIMIT_S, TOO_LARGE, GrammarSandbox
from lmx_lab.engine.grammar.worker import TokenTable, build_tokenizer, compile_grammar
from lmx_lab.engine.requests import ToolUse
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.errors import InvalidRequestError

CACHE_SIZE = 32
MAX_REASON_CHARACTERS = 1000
ANY_OBJECT = enforceable_json({"type": "object"})
T = TypeVar("T")
STOP_REASONS = {
    "NoExtensionBias": "no text can be a whole answer of this form",
    "ParserTooComplex": "it has become too complex",
    "LexerTooComplex": "it has become too complex",
}
"""llguidance's names for the ways in which a grammar stops, and our words for them."""


def read_token_table(tokenizer: Any, *, width: int, markers: Set[int]) -> TokenTable:
    """Read the bytes and the special tokens of a vocabulary.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``.
        width: Number of logits, which may exceed the tokenizer's size.
        markers: Tokens that the text of an answer may not contain, in addition to the special ones.

    Raises:
        InvalidRequestError: the model has no token that ends an answer.
    """
    vocabulary = Vocabulary(tokenizer)
    ends = sorted(int(token) for token in tokenizer.eos_token_ids if token < width)
    if not ends:
        raise InvalidRequestError("this model has no token that ends an answer, so no answer format can be enforced")
    return TokenTable(
        [vocabulary.bytes_of(token) for token in range(width)],
        [id_ for id_ in range(width) if vocabulary.is_special(id_) or id_ in markers or id_ in ends],
        ends,
    )


class GrammarCompiler:
    """Compiles grammars and caches the results, including errors. Use it on one thread at a time, except for
    ``known_matchers``.

    The matchers that it returns are independent copies, which any one thread can use.
    """

    def __init__(self, table: TokenTable, sandbox: GrammarSandbox) -> None:
        self._table = table
        self._sandbox = sandbox
        self._tokenizer = build_tokenizer(table)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._checked: OrderedDict[str, str] = OrderedDict()
        self._refused: OrderedDict[str, InvalidRequestError] = OrderedDict()

    def known_matchers(self, grammar: str, count: int) -> list[LLMatcher] | None:
        """Return matchers of a grammar that was compiled before; None if it is not known. May be called from any
        thread.

        Raises:
            InvalidRequestError: the grammar was refused before.
        """
        if (refused := self._refused.get(grammar)) is not None:
            raise InvalidRequestError(refused.message, param=refused.param)
        matcher = self._compiled.get(grammar)
        return None if matcher is None else [matcher.deep_copy() for _ in range(count)]

    def matchers(self, grammar: str, count: int, tools: ToolUse | None = None) -> list[LLMatcher]:
        """Return ``count`` matchers at the beginning of the grammar.

        Args:
            tools: The tools that the grammar contains, so that an error can name the one with invalid parameters.

        Raises:
            InvalidRequestError: the grammar cannot be compiled; the message contains llguidance's reason.
            QueueFullError: it takes long to compile, and others wait.
        """
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = compile_grammar(self._tokenizer, self.check(grammar, tools))
        _put(self._compiled, grammar, matcher)
        return [matcher.deep_copy() for _ in range(count)]

    def check(self, grammar: str, tools: ToolUse | None = None) -> str:
        """Return the grammar in the form in which it can be compiled.

        Parameters that cannot be enforced are replaced by any object if the tool may be called but need not be: a
        client that offers many tools has often not written all of them itself.

        Raises:
            InvalidRequestError, QueueFullError: as ``matchers``.
        """
        if (refused := self._refused.get(grammar)) is not None:
            raise InvalidRequestError(refused.message, param=refused.param)
        enforced = self._checked.pop(grammar, None) or self._check_in_sandbox(grammar, tools)
        _put(self._checked, grammar, enforced)
        return enforced

    def _check_in_sandbox(self, grammar: str, tools: ToolUse | None) -> str:
        whole = json.loads(grammar)
        parts = whole["grammars"][1:]
        until = time.monotonic() + LIMIT_S
        while True:
            text = json.dumps(whole, ensure_ascii=False)
            left_s = max(0.0, until - time.monotonic())
            reason, at = self._sandbox.find_problem(self._table, [text, *map(as_grammar, parts)], left_s)
            if not reason:
                return text
            # The part that is invalid by itself, if one is.
            what, param = ("the format of the answer", None) if at is None else ("this format", "response_format")
            call = re.fullmatch(r"call_(\d+)_arguments", parts[at]["name"]) if at is not None else None
            if at is not None and call is not None and tools is not None:
                if not tools.forced and parts[at]["json_schema"] != ANY_OBJECT:
                    parts[at]["json_schema"] = ANY_OBJECT
                    continue
                what = f"the parameters of the tool {tools.tools[int(call[1])].name!r}"
                param = f"tools.{call[1]}.function.parameters"
            message = f"{what} cannot be enforced: {shorten_reason(reason)}"
            # Not cached if the process ended: the grammar may not have been the cause.
            if reason != TOO_LARGE:
                _put(self._refused, grammar, InvalidRequestError(message, param=param))
            raise InvalidRequestError(message, param=param)


def _put(cache: OrderedDict[str, T], grammar: str, value: T) -> None:
    cache[grammar] = value
    cache.move_to_end(grammar)
    if len(cache) > CACHE_SIZE:
        cache.popitem(last=False)


def shorten_reason(reason: str) -> str:
    """Shorten an error message of llguidance, and remove the part about its internal state."""
    reason = reason.partition("<state>")[0].strip()
    reason = STOP_REASONS.get(reason, reason)
    if len(reason) <= MAX_REASON_CHARACTERS:
        return reason
    # The beginning names the place and the end the error; the caller's own grammar is between them.
    return f"{reason[: MAX_REASON_CHARACTERS // 2]} ... {reason[-MAX_REASON_CHARACTERS // 2 :]}"

"""Check grammars in a sandbox, compile them for one model's vocabulary with llguidance, and cache them.

Callers write grammars, of which some crash the compiler and others take forever to compile.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import pickle
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from llguidance import LLMatcher

from lmx_lab.engine.grammar.build import ANY_OBJECT, as_grammar, with_json_rules, without_forcing
from lmx_lab.engine.grammar.schemas import DEFINITIONS, shown_path, subschemas, unenforced
from lmx_lab.engine.grammar.worker import TokenTable, build_tokenizer, compile_grammar
from lmx_lab.engine.requests import ToolUse
from lmx_lab.engine.sandbox import (
    SandboxBusyError,
    SandboxDiedError,
    SandboxPool,
    SandboxStartError,
    SandboxTimeoutError,
    Setup,
    shared_pool,
)
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.errors import InvalidRequestError, QueueFullError
from lmx_lab.weights.files import in_thread

log = logging.getLogger(__name__)
T = TypeVar("T")
WORKER = Path(__file__).with_name("worker.py")
LIMIT_S = 2.0
"""Time limit for checking a grammar and all its parts."""
TOO_LARGE = "it is too large, or nested too deeply, to be compiled; simplify it"
CACHE_SIZE = 32
SAMPLE = '{"a b": 1}'
"""A text from which it is seen whether a tokenizer adds something to texts."""
LOCATED = 256
"""Maximum number of parts of a schema that are searched for the cause of an error."""
PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
LINES = re.compile(r"\n +\d+ \| .*", re.DOTALL)
"""Matches the lines of a grammar at the end of a reason of llguidance. The caller has written only some of them."""
IS_CONVERTED = re.compile(r"start: (?:/|R0_)")
"""Matches the beginning of a grammar that was converted from a regular expression or from GBNF."""
REASONS = (
    ("NoExtensionBias", "no text can be a whole answer of this form"),
    ("ParserTooComplex|LexerTooComplex", "it is too complex"),
    (".*regex parse error.*\nerror: (.*)", r"regular expression: \1; correct it"),
    (
        ".*lookarounds not supported.*",
        "^ and $ are only supported at the ends of a regular expression, and word boundaries are not; remove them",
    ),
    (".*Unable to determine if regex.*", "minLength is too large to be enforced with a pattern or a format; lower it"),
    (".*[Rr]egex is empty.*", "no text has this length and form; change minLength, maxLength, pattern or format"),
    (".*schema must be an object or boolean", "a schema must be an object, true or false; correct it"),
    (".*are not disjoint", "some names match several keys of patternProperties; change these"),
    (".*Resource '(.*)' is not present.*", r"$ref: \1 is another document, which is not read; add it to $defs"),
    (".*Pointer '(.*)' does not exist", r"$ref: the schema has no part #\1; correct it"),
    (".*JSON schema: Expected .* for '(.*)', got (.*)", r"\1 has the invalid value \2; correct it"),
    (".*JSON schema: Invalid type: (.*)", r"type has the unknown value \1; correct it"),
    (".*JSON schema: invalid multiple of", "multipleOf must be above 0; correct it"),
    (".*JSON schema: Unsatisfiable schema: anyOf is empty", "enum or anyOf is empty; add a value"),
    (".*JSON schema: (?:Unsatisfiable schema: )?(.*)", r"\1; correct it"),
)
"""Patterns of llguidance's reasons, and the texts that replace them in messages."""


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
    backend = getattr(tokenizer, "backend_tokenizer", None)
    table = TokenTable(
        [vocabulary.bytes_of(token) for token in range(width)],
        [id_ for id_ in range(width) if vocabulary.is_special(id_) or id_ in markers or id_ in ends],
        ends,
        encode=None if backend is None else lambda text: list(backend.encode(text, add_special_tokens=False).ids),
    )
    # Others, such as those of SentencePiece, add a space before a text.
    can_force = table.encode is not None and table.is_spelled(SAMPLE, table.encode(SAMPLE))
    return replace(table, can_force=can_force)


class GrammarCompiler:
    """Compiles grammars and caches the results, including errors. May be used on any loop.

    The matchers that it returns are independent copies, which any one thread can use.

    Args:
        read_table: Returns the vocabulary; called on other threads when the first grammar needs it.
        compile_s: Limit of the CPU time to compile a grammar. Engines that block during compilation set a lower limit.
        pool: The sandboxes in which grammars are checked; by default those that all models share.
    """

    def __init__(
        self, read_table: Callable[[], TokenTable], *, compile_s: float = LIMIT_S, pool: SandboxPool | None = None
    ) -> None:
        self._compile_s = compile_s
        self._pool = pool or shared_pool()
        self._table = table = functools.cache(read_table)
        self._build = functools.cache(lambda: build_tokenizer(table()))
        self._setup = Setup(lambda: pickle.dumps((table().tokens, table().special_token_ids, table().eos_tokens)))
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._checked: OrderedDict[str, str] = OrderedDict()
        self._refused: OrderedDict[str, InvalidRequestError] = OrderedDict()
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """A lock for each grammar that is being checked, so that it is checked once. Belongs to the pool's loop."""

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

    async def matchers(self, grammar: str, count: int, tools: ToolUse | None = None) -> list[LLMatcher]:
        """Return ``count`` matchers at the beginning of the grammar.

        Args:
            tools: The tools that the grammar contains, so that an error can name the one with invalid parameters.

        Raises:
            InvalidRequestError: the grammar cannot be compiled; the message contains llguidance's reason.
            QueueFullError: other grammars are checked for too long.
        """
        if (known := self.known_matchers(grammar, count)) is not None:
            return known

        async def compile() -> LLMatcher:
            async with self._turn(grammar):
                if (matcher := self._compiled.get(grammar)) is None:
                    enforced = await self._check(grammar, tools)
                    matcher = await in_thread(
                        lambda: compile_grammar(self._build(), with_json_rules(enforced)), name="lmx-lab-grammar"
                    )
                _put(self._compiled, grammar, matcher)
                return matcher

        matcher = await self._pool.portal.call(compile())
        return [matcher.deep_copy() for _ in range(count)]

    async def check(self, grammar: str, tools: ToolUse | None = None) -> str:
        """Return the grammar in the form in which it can be compiled.

        Parameters that cannot be enforced are replaced by any object if the tool may be called but need not be: a
        client that offers many tools has often not written all of them itself.

        Raises:
            InvalidRequestError, QueueFullError: as ``matchers``.
        """

        async def check() -> str:
            async with self._turn(grammar):
                return await self._check(grammar, tools)

        return await self._pool.portal.call(check())

    # On the pool's loop

    def _turn(self, grammar: str) -> asyncio.Lock:
        return self._turns.setdefault(grammar, asyncio.Lock())

    async def _check(self, grammar: str, tools: ToolUse | None) -> str:
        if (refused := self._refused.get(grammar)) is not None:
            raise InvalidRequestError(refused.message, param=refused.param)
        if (known := self._checked.pop(grammar, None)) is not None:
            _put(self._checked, grammar, known)
            return known
        whole = json.loads(grammar)
        parts = whole["grammars"][1:]
        left_s = LIMIT_S
        while True:
            text = json.dumps(whole, ensure_ascii=False)
            unforced = without_forcing(text)
            reason, at, can_force, used_s = await self._find_problem([unforced, *map(as_grammar, parts)], left_s)
            left_s = max(0.0, left_s - used_s)
            if not reason:
                enforced = text if can_force and self._table().can_force else unforced
                _put(self._checked, grammar, enforced)
                return enforced
            # ``at`` is the index of the part that is invalid on its own, if there is one.
            what, param = ("the format of the answer", None) if at is None else ("this format", "response_format")
            call = re.fullmatch(r"call_(\d+)_arguments", parts[at]["name"]) if at is not None else None
            if at is not None and call is not None and tools is not None:
                if not tools.forced and parts[at]["json_schema"] != ANY_OBJECT:
                    parts[at]["json_schema"] = dict(ANY_OBJECT)
                    continue
                what = f"the parameters of the tool {tools.tools[int(call[1])].name!r}"
                param = f"tools.{call[1]}.function.parameters"
            schema, remedy = None if at is None else parts[at].get("json_schema"), ""
            if schema is not None:
                place, reason = await self._locate(schema, unforced, reason, left_s)
                reason = f"{place}{shorten_reason(reason, has_place=False)}"
                if (names := unenforced(schema)) and not reason.endswith("correct it"):
                    remedy = f'; leave out {", ".join(names)}, or send "strict": false'
            else:
                is_own = at is not None and not IS_CONVERTED.match(parts[at]["lark_grammar"])
                reason = shorten_reason(reason, has_place=is_own)
            message = f"{what} cannot be enforced: {reason}{remedy}"
            # Not cached if the process ended: the grammar may not have been the cause.
            if reason != TOO_LARGE:
                _put(self._refused, grammar, InvalidRequestError(message, param=param))
            raise InvalidRequestError(message, param=param)

    async def _locate(self, schema: Any, whole: str, reason: str, limit_s: float) -> tuple[str, str]:
        """Return the place of the smallest part of a schema that cannot be enforced on its own, and the reason."""
        places = [each for each in itertools.islice(subschemas(schema), LOCATED) if each[1] is not False]
        shared = {key: schema[key] for key in DEFINITIONS if isinstance(schema, dict) and key in schema}
        alone = [{**shared, **part} if isinstance(part, dict) else part for _, part in places]
        grammars = [as_grammar({"name": "answer", "json_schema": part}) for part in alone]
        own, at, _, _ = await self._find_problem([whole, *grammars], limit_s)
        path, part = places[at] if at is not None else ((), schema)
        if "regex parse error" in own:
            path = (*path, "pattern" if "pattern" in part else "patternProperties")
        return (f"{shown_path(path)}: ", own) if path else ("", reason)

    async def _find_problem(self, grammars: list[str], limit_s: float) -> tuple[str, int | None, bool, float]:
        """Check whether the first grammar can be enforced.

        Args:
            grammars: The grammar, followed by each of its parts as a separate grammar.

        Returns:
            The reason why it cannot be enforced, empty if it can, the index of the part that causes it, whether its
            tokens may be forced, and the CPU time of the check.

        Raises:
            QueueFullError: other grammars are checked for too long.
        """
        pool = self._pool
        try:
            request = pickle.dumps([with_json_rules(grammar) for grammar in grammars])
            reply = json.loads(await pool.run(WORKER, request, limit_s=limit_s, setup=self._setup))
        except SandboxStartError as exc:
            log.warning("grammars are compiled without a check, because no process could be started: %s", exc)
            return "", None, False, 0.0
        except SandboxBusyError as exc:
            raise QueueFullError(
                f"the check of the grammar did not start within {pool.wait_s:g} s, because other grammars and schemas "
                "were checked first; try again in 1 s",
                retry_after_s=1,
            ) from exc
        except SandboxTimeoutError:
            return f"it takes longer than {LIMIT_S:g} s to compile; simplify it", None, False, limit_s
        except SandboxDiedError:
            return TOO_LARGE, None, False, limit_s
        reason, took_s = reply["reason"], reply["compile_s"]
        if not reason and took_s > self._compile_s:
            reason = f"it takes {took_s:.1f} s to compile; the limit is {self._compile_s:g} s: simplify it"
        return reason, reply["part"], reply["can_force"], reply["used_s"]


def _put(cache: OrderedDict[str, T], grammar: str, value: T) -> None:
    cache[grammar] = value
    cache.move_to_end(grammar)
    if len(cache) > CACHE_SIZE:
        cache.popitem(last=False)


def shorten_reason(reason: str, *, has_place: bool = True) -> str:
    """Shorten an error message of llguidance, and remove the parts about its internal state.

    Args:
        has_place: Whether the caller has written the grammar to whose lines the message refers.
    """
    reason = LINES.sub("", reason.partition("<state>")[0]).strip()
    place = PLACE.match(reason)
    reason = reason[place.end() :] if place is not None else reason
    for pattern, words in REASONS:
        if (found := re.fullmatch(pattern, reason, re.DOTALL)) is not None:
            reason = found.expand(words)
            break
    if place is not None and has_place:
        reason = f"line {place[1]}, character {place[2]}: {reason}"
    if len(reason) <= 1000:
        return reason
    # The beginning names the place and the end the error; the caller's own grammar is between them.
    return f"{reason[:500]} ... {reason[-500:]}"

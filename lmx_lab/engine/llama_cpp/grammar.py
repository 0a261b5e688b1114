"""Write grammars in llama.cpp's syntax, and find out which of them llama.cpp enforces.

llama.cpp contains an older version of llguidance, and silently ignores a grammar, or the part of a schema, that this
version does not support (measured: a schema with ``"format": "uri"``). Therefore each grammar is first compiled by the
installed llguidance. Then each part that came with the request is tried once on llama.cpp, which generates one token
with a bias toward a token that the part forbids. llama.cpp also stops enforcing a grammar that becomes too complex
during an answer (measured: a choice of 2,000 rules), so ``completion.AnswerReader`` checks each token.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llguidance import LLMatcher

from lmx_lab.engine.grammar import json_lark
from lmx_lab.engine.grammar.build import ANY_OBJECT, NO_FORCING, ONE_LINE
from lmx_lab.engine.grammar.compile import GrammarCompiler
from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.llama_cpp.completion import TRIAL_SLOT
from lmx_lab.engine.llama_cpp.connection import LlamaConnection, RefusedError
from lmx_lab.engine.requests import ToolUse
from lmx_lab.engine.text.vocabulary import decode_byte_level, replace_text
from lmx_lab.errors import InvalidRequestError, QueueFullError
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.gguf.header import GgufHeader
from lmx_lab.weights.gguf.tokenizer import CONTROL, eos_ids, read_vocabulary

SPACE = "\u2581"
ON_ONE_LINE = json_lark.Spacing(
    comma=", ",
    colon=": ",
    preamble="",
    options=ONE_LINE,
    any_escape=False,
)
"""Replaces the usual rule for white space: llama.cpp's older llguidance repeats a pattern of white space any number of
times."""
WITHOUT_SPACES = replace(
    ON_ONE_LINE, comma=",", colon=":", options={**ON_ONE_LINE.options, "item_separator": ",", "key_separator": ":"}
)
"""For vocabularies in which llama.cpp's grammars ignore the space at the beginning of a token. After a comma and a
colon, models usually write such a token."""
REFERENCE = re.compile(r"(?<=[ (])@(answer|call_\d+_arguments)\b")
"""A reference to another grammar, as ``engine.grammar`` writes it."""
OUTWEIGHS = 1e4
"""A bias larger than any model's logits, so that only a grammar can prevent the token."""
TOOL = re.compile(r"call_(\d+)_arguments")
Part = Mapping[str, Any]


class GrammarChecker:
    """Checks the grammars of one model. Belongs to the manager's loop.

    Args:
        trial_s: Time limit of a trial. One token takes less time and has its own slot, but long prompts may be computed
            first.
    """

    def __init__(self, token_table: TokenTable, connection: LlamaConnection, *, trial_s: float = 30.0) -> None:
        self._token_table = token_table
        self._connection = connection
        self._trial_s = trial_s
        # While a grammar is compiled, llama.cpp computes no tokens.
        self._grammars = GrammarCompiler(lambda: token_table, compile_s=1.0)
        self._spacing = WITHOUT_SPACES if token_table.hides_spaces else ON_ONE_LINE
        self._checked: OrderedDict[str, tuple[str, str]] = OrderedDict()

    async def check(self, grammar: str, tools: ToolUse | None, count: int) -> tuple[list[LLMatcher], str]:
        """Return ``count`` matchers of the grammar, and the grammar in llama.cpp's syntax.

        Raises:
            InvalidRequestError: the grammar cannot be compiled, or llama.cpp does not enforce it.
            QueueFullError: other grammars are checked for too long.
        """
        key = json.dumps([grammar, tools is None or tools.forced])
        if (known := self._checked.pop(key, None)) is not None:
            self._checked[key] = known
            return await self._grammars.matchers(known[0], count, tools), known[1]
        whole = json.loads(await self._grammars.check(grammar, tools))
        parts = whole["grammars"][1:]
        if not await self._is_enforced(parts, tools):
            for part in parts:
                if await self._is_enforced([part], tools):
                    continue
                tool = TOOL.fullmatch(part["name"])
                if tool is None or tools is None or tools.forced:
                    what, param = "this format", "response_format"
                    if tool is not None and tools is not None:
                        index = int(tool[1])
                        what = f"the format of the parameters of the tool {tools.tools[index].name!r}"
                        param = f"tools.{index}.function.parameters"
                    raise InvalidRequestError(
                        f"{what} cannot be enforced by llama.cpp, whose grammar compiler does not support all of it; "
                        'simplify it, or load the model with engine="mlx"',
                        param=param,
                    )
                # The model need not call this tool, so the request is not refused, and the arguments are not enforced.
                part["json_schema"] = dict(ANY_OBJECT)
                grammar = json.dumps(whole, ensure_ascii=False)
        lark = to_lark(json.dumps(whole, ensure_ascii=False), self._spacing)
        check_whole(lark)
        matchers = await self._grammars.matchers(grammar, count, tools)
        self._checked[key] = grammar, lark
        if len(self._checked) > 32:
            self._checked.popitem(last=False)
        return matchers, lark

    async def _is_enforced(self, parts: Sequence[Part], tools: ToolUse | None) -> bool:
        """Return whether llama.cpp enforces an answer that matches one of these parts; True if they forbid no token.

        Raises:
            QueueFullError: the trial took too long. A grammar that was not tried is not used.
        """
        main = {
            "name": "main",
            "lark_grammar": f"{NO_FORCING}\nstart: " + " | ".join(f"@{part['name']}" for part in parts),
        }
        any_one = json.dumps({"grammars": [main, *parts]}, ensure_ascii=False)
        (matcher,) = await self._grammars.matchers(any_one, 1, tools)
        forbidden = await in_thread(partial(self._forbidden_token, matcher))
        if forbidden is None:
            return True
        body = {
            "prompt": [forbidden],
            "n_predict": 1,
            "temperature": 0,
            "logit_bias": [[forbidden, OUTWEIGHS]],
            "grammar": to_lark(any_one, self._spacing),
            "return_tokens": True,
            "cache_prompt": False,
            "id_slot": TRIAL_SLOT,
        }
        try:
            async with asyncio.timeout(self._trial_s):
                answer = await self._connection.post("/completion", body)
        except TimeoutError:
            raise QueueFullError(
                f"llama.cpp could not try this format within {self._trial_s:g} s; try again in 5 s", retry_after_s=5
            ) from None
        except RefusedError:
            return False
        return forbidden not in answer["tokens"]

    def _forbidden_token(self, matcher: LLMatcher) -> int | None:
        """Return an ordinary token with which no answer in this grammar can begin; None if there is no such token."""
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        special = sum(1 << token for token in self._token_table.special_token_ids)
        forbidden = ((1 << len(self._token_table.tokens)) - 1) & ~(allowed | special)
        return (forbidden & -forbidden).bit_length() - 1 if forbidden else None


def read_token_table(header: GgufHeader) -> TokenTable:
    """Return the vocabulary of a file, for grammars.

    Args:
        header: The header of the file, including its arrays.

    Raises:
        InvalidRequestError: no token ends an answer.
        UnusableModelError: the file has no usable vocabulary.
    """
    vocabulary = read_vocabulary(header)
    ends = sorted(eos_ids(vocabulary))
    if not ends:
        raise InvalidRequestError("this model has no token that ends an answer, so no format can be enforced")
    is_byte_level = header.text("tokenizer.ggml.model") == "gpt2"
    decode = decode_byte_level if is_byte_level else partial(replace_text, [(SPACE, " ")], True)
    control = {at for at, kind in enumerate(vocabulary.types) if kind == CONTROL} | set(ends)
    tokens = [name.encode() if at in control else decode(name) for at, name in enumerate(vocabulary.tokens)]
    # llama.cpp would add a space before each forced text of other vocabularies.
    return TokenTable(
        tokens,
        sorted(control),
        ends,
        can_force=is_byte_level,
        hides_spaces=not is_byte_level and vocabulary.add_space_prefix,
    )


def to_lark(grammar: str, spacing: json_lark.Spacing = ON_ONE_LINE) -> str:
    """Convert a list of grammars that refer to each other to the single text that llama.cpp accepts."""
    main, *parts = json.loads(grammar)["grammars"]
    rules = [REFERENCE.sub(r"\1", main["lark_grammar"])]
    for part in parts:
        lark = part.get("lark_grammar")
        if lark is None:
            lark = json_lark.to_lark(part["json_schema"], spacing)
        if lark is None:
            rules.append(f"{part['name']}: %json {json.dumps(json_lark.with_options(part['json_schema'], spacing))}")
        else:
            rules.append(f"{part['name']}: %lark {{\n{lark}\n}}")
    return "\n".join(rules)


def check_whole(lark: str) -> None:
    """Check that the parts of a grammar, which were compiled separately, are valid together.

    Raises:
        InvalidRequestError: they are not.
    """
    if reason := LLMatcher.validate_grammar(lark):
        raise InvalidRequestError(f"this format cannot be enforced: {reason[:500]}", param="response_format")

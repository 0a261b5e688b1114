"""Which forms of answers llama.cpp enforces, found out before it is asked for an answer.

It has a compiler of grammars of its own, older than ours, and ignores without a word what that does not know (measured:
a schema with ``"format": "uri"``). So each part of a grammar that somebody wrote is tried there once: one token, with a
bias toward one that the part forbids.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from lmx_lab.engine.grammar.build import NO_FORCING
from lmx_lab.engine.grammar.compile import ANY_OBJECT, GrammarCompiler
from lmx_lab.engine.grammar.sandbox import GrammarSandbox
from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.llama_cpp.connection import LlamaConnection, RefusedError
from lmx_lab.engine.llama_cpp.words import as_lark, check
from lmx_lab.engine.requests import ToolUse
from lmx_lab.errors import InvalidRequestError, QueueFullError

KEPT = 32
OUTWEIGHS = 1e4
"""More than any model's logits, so that only a grammar can keep a token away."""
TRIAL_S = 30.0
"""One token takes less, and has a slot of its own; but a step of others' long prompts may come first."""
TOOL = re.compile(r"call_(\d+)_arguments")
Part = Mapping[str, Any]


class Forms:
    """Of one model. Belongs to the engine's loop; grammars are compiled on ``compiling``, one at a time."""

    def __init__(
        self, words: TokenTable, trials: GrammarSandbox, compiling: Executor, connection: LlamaConnection
    ) -> None:
        self._words = words
        self._trials = trials
        self._compiling = compiling
        self._connection = connection
        self._grammars: GrammarCompiler | None = None
        self._kept: OrderedDict[str, str] = OrderedDict()

    async def enforced(self, grammar: str, tools: ToolUse | None) -> str:
        """The grammar in llama.cpp's spelling.

        Raises:
            InvalidRequestError: it cannot be compiled, here or there.
            QueueFullError: it takes long, and others wait.
        """
        key = json.dumps([grammar, tools is None or tools.forced])
        lark = self._kept.pop(key, None) or await self._tried(grammar, tools)
        self._kept[key] = lark
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return lark

    async def _tried(self, grammar: str, tools: ToolUse | None) -> str:
        loop = asyncio.get_running_loop()
        whole = json.loads(await loop.run_in_executor(self._compiling, self._compiled, grammar, tools))
        parts = whole["grammars"][1:]
        if not await self._is_kept(parts, tools):
            for part in parts:
                if await self._is_kept([part], tools):
                    continue
                tool = TOOL.fullmatch(part["name"])
                if tool is None or tools is None or tools.forced:
                    raise _refusal(int(tool[1]) if tool is not None else None, tools)
                # As for what cannot be enforced at all: who need not call it is not bothered.
                part["json_schema"] = ANY_OBJECT
        lark = as_lark(json.dumps(whole, ensure_ascii=False))
        check(lark)
        return lark

    async def _is_kept(self, parts: Sequence[Part], tools: ToolUse | None) -> bool:
        """Whether llama.cpp enforces an answer that is any one of these parts; true where that forbids nothing.

        Raises:
            QueueFullError: it has not said so in time. What was not tried is not trusted.
        """
        main = {"name": "main", "lark_grammar": f"{NO_FORCING}\nstart: " + " | ".join(f"@{it['name']}" for it in parts)}
        any_one = json.dumps({"grammars": [main, *parts]}, ensure_ascii=False)
        loop = asyncio.get_running_loop()
        forbidden = await loop.run_in_executor(self._compiling, self._forbidden, any_one, tools)
        if forbidden is None:
            return True
        question = {
            "prompt": [forbidden],
            "n_predict": 1,
            "temperature": 0,
            "logit_bias": [[forbidden, OUTWEIGHS]],
            "grammar": as_lark(any_one),
            "return_tokens": True,
            "cache_prompt": False,
        }
        try:
            async with asyncio.timeout(TRIAL_S):
                answer = await self._connection.ask("/completion", question)
        except TimeoutError:
            raise QueueFullError(
                f"llama.cpp had no time to try this form within {TRIAL_S:g} s; try again in 5 s", retry_after_s=5
            ) from None
        except RefusedError:
            return False
        return forbidden not in answer["tokens"]

    def _compiled(self, grammar: str, tools: ToolUse | None) -> str:
        if self._grammars is None:
            self._grammars = GrammarCompiler(self._words, self._trials)
        return self._grammars.check(grammar, tools)

    def _forbidden(self, grammar: str, tools: ToolUse | None) -> int | None:
        """An ordinary token with which no such answer begins; None if any may."""
        assert self._grammars is not None
        (matcher,) = self._grammars.matchers(grammar, 1, tools)
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        special = sum(1 << token for token in self._words.special_token_ids)
        forbidden = ((1 << len(self._words.tokens)) - 1) & ~(allowed | special)
        return (forbidden & -forbidden).bit_length() - 1 if forbidden else None


def _refusal(tool: int | None, tools: ToolUse | None) -> InvalidRequestError:
    what, param = "this format", "response_format"
    if tool is not None and tools is not None:
        what = f"what the parameters of the tool {tools.tools[tool].name!r} ask for"
        param = f"tools.{tool}.function.parameters"
    return InvalidRequestError(
        f"{what} cannot be enforced by llama.cpp, whose compiler of grammars does not know all of it; simplify it, or "
        "load the model in MLX format",
        param=param,
    )

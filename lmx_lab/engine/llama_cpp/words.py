"""What llama.cpp is given to enforce an answer's form: our grammars in its spelling, tried before by our llguidance.

llama.cpp ignores a grammar that it cannot compile, without a word (measured). So nothing goes there untried.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from llguidance import LLMatcher

from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.text.vocabulary import decode_byte_level, replace_text
from lmx_lab.errors import InvalidRequestError
from lmx_lab.weights.gguf.header import GgufHeader
from lmx_lab.weights.gguf.tokenizer import CONTROL, eos_ids, read_vocabulary

SPACE = "\u2581"
ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""In the place of our rule: llama.cpp's older llguidance takes a pattern of white space any number of times."""
REFERENCE = re.compile(r"(?<=[ (])@(answer|call_\d+_arguments)\b")
"""As ``engine.grammar`` writes it."""


def read_token_table(header: GgufHeader) -> TokenTable:
    """The vocabulary of a file, for grammars.

    Args:
        header: Read with its arrays.

    Raises:
        InvalidRequestError: no token ends an answer.
        UnusableModelError: there is no usable vocabulary.
    """
    vocabulary = read_vocabulary(header)
    ends = sorted(eos_ids(vocabulary))
    if not ends:
        raise InvalidRequestError("this model has no token that ends an answer, so no form can be enforced")
    spells = (
        decode_byte_level
        if header.text("tokenizer.ggml.model") == "gpt2"
        else partial(replace_text, [(SPACE, " ")], True)
    )
    control = {at for at, kind in enumerate(vocabulary.types) if kind == CONTROL} | set(ends)
    tokens = [name.encode() if at in control else spells(name) for at, name in enumerate(vocabulary.tokens)]
    return TokenTable(tokens, sorted(control), ends)


def as_lark(grammar: str) -> str:
    """A list of grammars that name each other, as the one text that llama.cpp takes."""
    main, *parts = json.loads(grammar)["grammars"]
    rules = [REFERENCE.sub(r"\1", main["lark_grammar"])]
    for part in parts:
        rules.append(f"{part['name']}: {_written(part)}")
    return "\n".join(rules)


def _written(part: Mapping[str, Any]) -> str:
    if "lark_grammar" in part:
        return f"%lark {{\n{part['lark_grammar']}\n}}"
    schema = part["json_schema"]
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": ON_ONE_LINE}
    return f"%json {json.dumps(schema)}"


def check(lark: str) -> None:
    """
    Raises:
        InvalidRequestError: the parts, which were tried one by one, do not go together.
    """
    if reason := LLMatcher.validate_grammar(lark):
        raise InvalidRequestError(f"this format cannot be enforced: {reason[:500]}", param="response_format")

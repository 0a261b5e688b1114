"""Helpers of the grammar tests: a real vocabulary, grammars and a reader."""

import json

from lmx_lab.engine import AnswerFormat, Tool, ToolUse
from lmx_lab.engine.grammar.build import build_grammar
from lmx_lab.engine.grammar.mask import Constraint
from tests.support.engines import matchers_of

WIDTH = 49152
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = ToolUse(tools=(Tool(name="weather", parameters=CITY), Tool(name="time-of", parameters={"type": "object"})))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def schema(value):
    return AnswerFormat(kind="json_schema", text=json.dumps(value))


def grammar_for(answer_format, tools=None, reasoning=None):
    text = build_grammar(answer_format, tools, reasoning, markers={})
    assert text is not None
    return text


class Reading:
    """Feeds a text to a grammar token by token, as far as the masks allow."""

    def __init__(self, compiler, tokenizer, text, grammar):
        (matcher,) = matchers_of(compiler, grammar)
        self.constraint = Constraint(matcher, None)
        self.read = ""
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for at, token in enumerate(tokens):
            mask = self.constraint.mask(WIDTH)
            if mask is None or not mask[token]:
                break
            self.constraint.advance(token)
            self.read = tokenizer.decode(tokens[: at + 1])
        mask = self.constraint.mask(WIDTH)
        self.may_end = self.constraint.complete or (mask is not None and bool(mask[2]))
        self.allowed = 0 if mask is None else int(mask.sum())

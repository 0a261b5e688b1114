"""Our grammars in llama.cpp's spelling, and the vocabulary of a file as its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from lmx_lab.engine import AnswerFormat, Tool, ToolUse
from lmx_lab.engine.grammar.build import ReasoningSection, build_grammar
from lmx_lab.engine.llama_cpp.words import as_lark, check, read_token_table
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.gguf.header import read_header
from tests.gguf_files import with_values
from tests.gguf_server import raw_server

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = ToolUse(tools=(Tool(name="add", parameters=SCHEMA), Tool(name="wait", parameters={"type": "object"})))
THOUGHTS = ReasoningSection(start=("<think>",), end=("</think>",), open=True)


def lark_of(form: AnswerFormat | None, tools: ToolUse | None = None, thoughts: ReasoningSection | None = None) -> str:
    made = build_grammar(form, tools, thoughts, markers={})
    assert made is not None
    return as_lark(made)


@pytest.mark.parametrize(
    ("form", "tools", "thoughts"),
    [
        (AnswerFormat(kind="json_schema", text=json.dumps(SCHEMA)), None, None),
        (AnswerFormat(kind="json_schema", text="{}"), None, THOUGHTS),
        (AnswerFormat(kind="regex", text="a/b\\n@answer"), None, None),
        (AnswerFormat(kind="lark", text='start: a\na: "@answer" /[0-9]+/'), None, THOUGHTS),
        (None, TOOLS, None),
        (None, TOOLS, THOUGHTS),
        (AnswerFormat(kind="regex", text="x+"), TOOLS, None),
    ],
)
def test_every_grammar_of_ours_can_be_spelt(form: Any, tools: Any, thoughts: Any) -> None:
    lark = lark_of(form, tools, thoughts)
    assert lark.startswith("%llguidance")
    assert LLMatcher.validate_grammar(lark) == ""
    check(lark)


def test_names_of_parts_are_no_text_of_the_caller() -> None:
    lark = lark_of(AnswerFormat(kind="lark", text='start: "see @answer and (@answer"'))
    assert '"see @answer and (@answer"' in lark
    assert lark.splitlines()[1] == "start: answer"


def test_json_is_on_one_line_there() -> None:
    lark = lark_of(AnswerFormat(kind="json_schema", text=json.dumps(SCHEMA)))
    schema = json.loads(lark.partition("%json ")[2])
    assert schema["x-guidance"] == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    assert schema["properties"] == SCHEMA["properties"]


def test_parts_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="this format cannot be enforced") as refused:
        check("start: nothing_of_that_name")
    assert refused.value.param == "response_format"


# Vocabularies


def test_words_are_the_bytes_that_tokens_stand_for(tiny: ModelEntry, tiny_gguf: Path) -> None:
    words = read_token_table(read_header(tiny_gguf, arrays=True))
    tokenizer = Tokenizer.from_file(str(tiny.path / "tokenizer.json"))
    for text in ("Hello, wörld! 東京 😀\n\t x", '{"a": [1, 2]}'):
        assert b"".join(words.tokens[token] for token in tokenizer.encode(text).ids) == text.encode()
    assert set(words.eos_tokens) <= set(words.special_token_ids)
    assert 2 in words.eos_tokens
    assert len(words.tokens) == 49152


def test_a_vocabulary_without_an_end_cannot_have_forms(tiny_gguf: Path, tmp_path: Path) -> None:
    tokens = ["a", "b", "c"]
    path = with_values(
        tiny_gguf,
        tmp_path / "endless.gguf",
        {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1, 1, 1],
            "tokenizer.ggml.eos_token_id": None,
        },
    )
    with pytest.raises(InvalidRequestError, match="no token that ends an answer"):
        read_token_table(read_header(path, arrays=True))


# What makes us try forms there


def answer(client: httpx2.Client, lark: str) -> str:
    body = {"prompt": [300], "n_predict": 12, "temperature": 0, "grammar": lark}
    return str(client.post("/completion", json=body).json()["content"])


def test_llama_cpp_ignores_a_grammar_that_it_cannot_compile(tiny_gguf: Path) -> None:
    uri = '%llguidance {}\nstart: %json {"type": "string", "format": "uri"}'
    assert LLMatcher.validate_grammar(uri) == ""
    with raw_server(tiny_gguf) as client:
        assert answer(client, "%llguidance {}\nstart: /[ab]{4}/").strip("ab") == ""
        # When this fails, it has learnt it: ``engine.llama_cpp.grammar`` may then be simplified.
        assert not answer(client, uri).startswith('"')

"""Grammars are written in the syntax of llama.cpp, and llama.cpp is tried once with each of them."""

import asyncio
import json

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from lmx_lab.engine import AnswerFormat, Tool, ToolUse
from lmx_lab.engine.grammar.build import ReasoningSection, build_grammar
from lmx_lab.engine.llama_cpp.connection import LlamaConnection
from lmx_lab.engine.llama_cpp.grammar import GrammarChecker, check_whole, read_token_table, to_lark
from lmx_lab.engine.text.vocabulary import decode_byte_level
from lmx_lab.errors import InvalidRequestError, QueueFullError
from lmx_lab.weights.gguf.header import read_header
from lmx_lab.weights.gguf.tokenizer import BYTE, CONTROL, read_vocabulary
from tests.support.asking import invalid
from tests.support.engines import LLAMA_SETTINGS, entry_of, llama_model, manager_with, numbers, run
from tests.support.gguf import with_values

pytestmark = pytest.mark.anyio


class Server(LlamaConnection):
    """Answers a trial with the forbidden token, with another one, or not at all."""

    def __init__(self):
        self.enforces = True
        self.bodies = []

    async def post(self, path, body):
        self.bodies.append(body)
        if self.enforces is None:
            await asyncio.Event().wait()
        ((forbidden, _),) = body["logit_bias"]
        return {"tokens": [forbidden + 1 if self.enforces else forbidden]}


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def checker(tiny_gguf, server):
    return GrammarChecker(read_token_table(read_header(tiny_gguf, arrays=True)), server)


def grammar_of(kind, text):
    grammar = build_grammar(AnswerFormat(kind=kind, text=text), None, None, markers={})
    assert grammar is not None
    return grammar


async def test_a_grammar_is_tried_once(checker, server):
    digits = grammar_of("regex", "[0-9]+")
    (_, lark), (_, again) = await checker.check(digits, None, 1), await checker.check(digits, None, 1)
    assert lark == again
    (body,) = server.bodies
    assert body["n_predict"] == 1
    assert "/[0-9]+/" in body["grammar"]


async def test_a_grammar_that_llama_cpp_ignores_is_refused_each_time(checker, server):
    server.enforces = False
    for _ in range(2):
        with invalid("response_format", r"cannot be enforced by llama\.cpp"):
            await checker.check(grammar_of("json_schema", json.dumps({"type": "integer"})), None, 1)
    assert len(server.bodies) == 4


async def test_a_grammar_that_could_not_be_tried_is_refused(tiny_gguf, server):
    checker = GrammarChecker(read_token_table(read_header(tiny_gguf, arrays=True)), server, trial_s=0.01)
    server.enforces = None
    digits = grammar_of("regex", "[0-9]+")
    with pytest.raises(QueueFullError, match="try again in 5 s"):
        await checker.check(digits, None, 1)
    server.enforces = False
    with pytest.raises(InvalidRequestError):
        await checker.check(digits, None, 1)


# Syntax

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = ToolUse(tools=(Tool(name="add", parameters=SCHEMA), Tool(name="wait", parameters={"type": "object"})))
THOUGHTS = ReasoningSection(start=("<think>",), end=("</think>",), open=True)


def lark_of(form, tools=None, thoughts=None):
    grammar = build_grammar(form, tools, thoughts, markers={})
    assert grammar is not None
    return to_lark(grammar)


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
def test_every_generated_grammar_can_be_written_in_llama_cpps_syntax(form, tools, thoughts):
    lark = lark_of(form, tools, thoughts)
    assert lark.startswith("%llguidance")
    assert LLMatcher.validate_grammar(lark) == ""
    check_whole(lark)


def test_references_in_the_callers_text_are_not_replaced():
    lark = lark_of(AnswerFormat(kind="lark", text='start: "see @answer and (@answer"'))
    assert '"see @answer and (@answer"' in lark
    assert lark.splitlines()[1] == "start: answer"


def test_json_is_written_on_one_line():
    lines = lark_of(AnswerFormat(kind="json_schema", text=json.dumps(SCHEMA))).splitlines()
    assert 'comma: ", "' in lines
    assert 'colon: ": "' in lines
    assert not any("%ignore" in line for line in lines)
    # A part that is left to llama.cpp.
    lark = lark_of(AnswerFormat(kind="json_schema", text='{"type": "number", "multipleOf": 0.5}'))
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    assert json.loads(lark.partition("%json ")[2].splitlines()[0])["x-guidance"] == options


def test_parts_that_do_not_fit_together_are_refused():
    with invalid("response_format", "this format cannot be enforced"):
        check_whole("start: nothing_of_that_name")


# Vocabularies


def test_the_token_table_has_the_bytes_of_tokens(tiny, tiny_gguf):
    words = read_token_table(read_header(tiny_gguf, arrays=True))
    tokenizer = Tokenizer.from_file(str(tiny.path / "tokenizer.json"))
    for text in ("Hello, wörld! 東京 😀\n\t x", '{"a": [1, 2]}'):
        assert b"".join(words.tokens[token] for token in tokenizer.encode(text).ids) == text.encode()
    assert set(words.eos_tokens) <= set(words.special_token_ids)
    assert 2 in words.eos_tokens
    assert len(words.tokens) == 49152


@pytest.mark.parametrize(("vocabulary", "expected"), [("gpt2", True), ("llama", False)])
def test_tokens_are_forced_only_in_byte_level_vocabularies(tiny_gguf, tmp_path, vocabulary, expected):
    # In front of other texts, llama.cpp would write a space.
    path = with_values(tiny_gguf, tmp_path / "other.gguf", {"tokenizer.ggml.model": vocabulary})
    assert read_token_table(read_header(path, arrays=True)).can_force is expected


def test_grammars_need_a_token_that_ends_answers(tiny_gguf, tmp_path):
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


# The reason for the trials


async def test_llama_cpp_ignores_a_grammar_that_it_cannot_compile(manager):
    async def answer(lark):
        body = {"prompt": [300], "n_predict": 12, "temperature": 0, "grammar": lark}
        return (await llama_model(manager).tokenizer.connection.post("/completion", body))["content"]

    uri = '%llguidance {}\nstart: %json {"type": "string", "format": "uri"}'
    assert LLMatcher.validate_grammar(uri) == ""
    assert (await answer("%llguidance {}\nstart: /[ab]{4}/")).strip("ab") == ""
    # If this fails, llama.cpp supports it, and ``engine.llama_cpp.grammar`` can be simplified.
    assert not (await answer(uri)).startswith('"')


# Answers that llama.cpp does not enforce


async def test_an_answer_ends_with_an_error_where_llama_cpp_stops_enforcing_its_grammar(manager):
    words = " | ".join(f'"word {at}"' for at in range(2500))
    with invalid("response_format", r"has not enforced the format .* after 1 token; simplify"):
        await run(manager, prompt=numbers(10), answer_format=AnswerFormat(kind="lark", text=f"start: {words}"))


@pytest.fixture
def spaced_gguf(tiny_gguf, tmp_path):
    """``tiny`` with a vocabulary like that of Llama 2, in which each text begins with a space."""
    known = read_vocabulary(read_header(tiny_gguf, arrays=True))
    tokens = dict[str, int]()
    for at, (token, kind) in enumerate(zip(known.tokens, known.types, strict=True)):
        data = decode_byte_level(token)
        if kind == CONTROL:
            tokens[token] = kind
        elif len(data) == 1:
            tokens[f"<0x{data[0]:02X}>"] = BYTE
        else:
            text = data.decode(errors="replace").replace(" ", "\u2581")
            tokens[text if text not in tokens else f"unused {at}"] = kind
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(tokens.values()),
        "tokenizer.ggml.scores": [-float(at) for at in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": True,
    }
    return with_values(tiny_gguf, tmp_path / "spaced.gguf", values)


async def test_spaces_that_llama_cpp_does_not_see_are_allowed_only_where_the_format_allows_them(spaced_gguf):
    digits = {"type": "array", "items": {"enum": list(range(10))}, "minItems": 2, "maxItems": 2}
    form = AnswerFormat(kind="json_schema", text=json.dumps(digits))
    async with manager_with(entry_of(spaced_gguf), LLAMA_SETTINGS) as manager:
        for start in range(4):
            text, _ = await run(manager, prompt=numbers(10, start=start), answer_format=form)
            assert set(json.loads(text)) <= set(range(10))
        with invalid("response_format", "has not enforced"):
            await run(manager, prompt=numbers(10), answer_format=AnswerFormat(kind="regex", text="[a-z]{30}"))

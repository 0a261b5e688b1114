"""Grammars allow the requested answers and no others. Objects are closed if the schema stays satisfiable. Grammars in
GBNF accept the same texts after their conversion.
"""

import json
import pickle
import random

import pytest
from llguidance import LLMatcher

from lmx_lab.engine import AnswerFormat, Tool, ToolUse
from lmx_lab.engine.echo.model import echo_vocabulary
from lmx_lab.engine.grammar import worker
from lmx_lab.engine.grammar.build import ReasoningSection, as_grammar, build_grammar, with_json_rules, without_forcing
from lmx_lab.engine.grammar.schemas import close_objects
from tests.engine.grammar.grammars import CALL, PERSON, TOOLS, Reading, grammar_for, schema
from tests.support.asking import invalid

OPTIONAL = ReasoningSection(start=("<think>",), end=("</think>",), open=False)
OPEN = ReasoningSection(start=("<think>",), end=("</think>",), open=True)


@pytest.mark.parametrize(
    "text",
    ['{"name": "Bob", "age": 4}', '{"name":"Bob","age":4}', '{\n  "name": "B\\"ob",\n  "age": 4\n}'],
)
def test_json_may_be_formatted_in_any_way(compiler, tokenizer, text):
    reading = Reading(compiler, tokenizer, text, grammar_for(schema(PERSON)))
    assert (reading.read, reading.constraint.complete) == (text, True)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"name": 4', '{"name":'),
        ('{"age"', '{"'),
        ("Sure: {", ""),
        ('{"name": "Bob", "age": 4, "x": 1}', '{"name": "Bob", "age": 4'),
    ],
)
def test_text_outside_the_schema_is_not_allowed(compiler, tokenizer, text, read):
    assert Reading(compiler, tokenizer, text, grammar_for(schema(PERSON))).read.rstrip() == read


@pytest.mark.parametrize("text", ["{" + " " * 100, "{" + "\n" * 10, '{"name": "Bob",' + "\n \n \n \n", " " * 30 + "{"])
def test_whitespace_is_limited(compiler, tokenizer, text):
    assert len(Reading(compiler, tokenizer, text, grammar_for(schema(PERSON))).read) < len(text)


def test_whitespace_options_in_a_schema_are_ignored(compiler, tokenizer):
    loose = {**PERSON, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": r"\s+"}}
    assert Reading(compiler, tokenizer, "{" + "\n" * 40, grammar_for(schema(loose))).read == "{"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"[a-z]+/\d{2}", "abc/12"), (r"a\/b[/]c", "a/b/c"), ("one\ntwo", "one\ntwo"), (r"\\/", "\\/"), ("é+", "éé")],
)
def test_a_regex_may_contain_slashes_and_line_breaks(compiler, tokenizer, pattern, text):
    reading = Reading(compiler, tokenizer, text, grammar_for(AnswerFormat(kind="regex", text=pattern)))
    assert (reading.read, reading.may_end) == (text, True)


def test_a_lark_grammar_is_followed(compiler, tokenizer):
    lark = AnswerFormat(kind="lark", text='start: "yes" | NO\nNO: /no+/')
    assert Reading(compiler, tokenizer, "nooo", grammar_for(lark)).may_end
    assert Reading(compiler, tokenizer, "maybe", grammar_for(lark)).read == ""


@pytest.mark.parametrize("reasoning", [OPTIONAL, OPEN])
@pytest.mark.parametrize("answer", ['{"name": "Bob", "age": 4}', CALL])
def test_reasoning_comes_before_the_format(compiler, tokenizer, reasoning, answer):
    thought = ("" if reasoning.open else "<think>") + 'Is it {"x"} or <tool_call>?\n</think>\n\n'
    text = grammar_for(schema(PERSON), TOOLS, reasoning)
    reading = Reading(compiler, tokenizer, thought + answer, text)
    assert (reading.read, reading.may_end) == (thought + answer, True)
    assert Reading(compiler, tokenizer, thought + "so", text).read == thought
    assert not Reading(compiler, tokenizer, thought, text).may_end
    # The reasoning is optional unless the prompt has opened it.
    assert Reading(compiler, tokenizer, answer, text).may_end is not reasoning.open


def test_an_optional_call_is_enforced_after_its_start_marker(compiler, tokenizer):
    text = grammar_for(None, TOOLS)
    for free in ("Hello <tool_", f"See: {CALL}", f"{CALL}\n{CALL} and so on"):
        reading = Reading(compiler, tokenizer, free, text)
        assert (reading.read, reading.may_end) == (free, True)
    for broken in ("<tool_call>nonsense", CALL.replace("weather", "whether"), CALL.replace("Paris", 'x": 3')):
        assert Reading(compiler, tokenizer, broken, text).read != broken


def test_calls_are_written_on_one_line(compiler, tokenizer):
    # As a template writes them in the next turn, whose prompt then begins with the generated tokens.
    tools = ToolUse(tools=(Tool(name="note", parameters=PERSON),), forced=True)
    beginning = '<tool_call>\n{"name": "note", "arguments": {'
    for arguments in ('"name": "a", "age": 4', '"name":"a","age":4', '\n  "name": "a",\n  "age": 4\n'):
        call = f"{beginning}{arguments}}}}}\n</tool_call>"
        assert Reading(compiler, tokenizer, call, grammar_for(None, tools)).may_end is arguments.startswith('"name": ')


def test_an_answer_ends_with_its_call_if_calls_are_not_parallel(compiler, tokenizer):
    single = ToolUse(tools=TOOLS.tools, parallel=False)
    assert Reading(compiler, tokenizer, f"See: {CALL} more", grammar_for(None, single)).read == f"See: {CALL}"
    assert Reading(
        compiler, tokenizer, CALL, grammar_for(None, ToolUse(tools=TOOLS.tools, parallel=False, forced=True))
    ).may_end


def test_a_forced_answer_consists_of_a_limited_number_of_calls(compiler, tokenizer):
    forced = grammar_for(None, ToolUse(tools=TOOLS.tools, forced=True))
    many = "\n".join([CALL] * 20)
    assert Reading(compiler, tokenizer, many, forced).read == "\n".join([CALL] * 16)


# JSON schemas

STRING = {"type": "string"}


def test_objects_are_closed_wherever_they_are():
    inner = {"type": "object", "properties": {"a": STRING}}
    shut = {**inner, "additionalProperties": False}
    places = [
        lambda part: part,
        lambda part: {"type": "object", "properties": {"b": part}, "additionalProperties": True},
        lambda part: {"type": "array", "items": part},
        lambda part: {"type": "array", "prefixItems": [STRING, part]},
        lambda part: {"anyOf": [part, {"type": "null"}]},
        lambda part: {"$defs": {"x": part}, "$ref": "#/$defs/x"},
        lambda part: {"type": "object", "additionalProperties": part},
    ]
    for place in places:
        assert close_objects(place(inner)) == place(shut)


@pytest.mark.parametrize(
    "given",
    [
        True,
        {},
        {"type": "object"},
        {"properties": {"a": STRING}, "additionalProperties": STRING},
        {"properties": {"a": STRING}, "patternProperties": {"^x": STRING}},
        {"properties": {"a": STRING}, "minProperties": 2},
        {"properties": {"a": STRING}, "required": ["b"]},
        {"allOf": [{"properties": {"a": STRING}}, {"properties": {"b": STRING}}]},
        {"$defs": {"x": {"properties": {"a": STRING}}}, "$ref": "#/$defs/x", "properties": {"b": STRING}},
        {"properties": {"a": STRING}, "anyOf": [{"required": ["a"]}, {"properties": {"b": STRING}}]},
        {"const": {"properties": {"a": STRING}}},
        {"enum": [{"properties": {"a": STRING}}]},
        {"properties": {"a": STRING}, "required": 3},
        {"properties": {"a": STRING}, "required": [["a"]]},
        {"properties": {"a": STRING}, "required": [{}]},
    ],
)
def test_a_schema_that_defines_more_is_unchanged(given):
    assert close_objects(given) == given


def test_an_object_without_properties_is_closed():
    assert close_objects({"type": "object", "properties": {}})["additionalProperties"] is False


def test_the_given_schema_is_not_modified():
    given = {"properties": {"a": {"properties": {"b": STRING}}}}
    close_objects(given)
    assert given == {"properties": {"a": {"properties": {"b": STRING}}}}


def test_a_property_may_be_named_like_a_keyword():
    given = {"properties": {"allOf": STRING, "properties": STRING}}
    assert close_objects(given) == {**given, "additionalProperties": False}


# GBNF

LISTS = r"""
# A list of numbers and texts, over several lines.
root  ::= "[" space (
    value ("," space value)*   # the rest
  )? "]"
value ::= number | text | root
number ::= "-"? [0-9]{1,3} ("." [0-9]+)? space
text ::= "\"" ( [^"\\\x7F\x00-\x1F] |
  "\\" ["\\nt] )* "\"" space
space ::= | " " | "\n" [ \t]{0,4}
"""


def accepts(grammar, text):
    built = build_grammar(AnswerFormat(kind="gbnf", text=grammar), None, None, markers={})
    matcher = LLMatcher(worker.build_tokenizer(echo_vocabulary().token_table), built, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(echo_vocabulary().encode(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (LISTS, ["[]", '[1, -2.5, "a\\n", [ "é", []]]', "[\n  7]"], ["[", "[1,]", '["a\n"]', "[1234]", "1"]),
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "yesno", "maybe"]),
        ('root ::= word "s"\nword ::= [a-z]+', ["seas", "ss"], ["sea", "s"]),
        ('root ::= ("begin" | [a-z])+', ["bex", "begins"], ["", "B"]),
        ("root ::= [\\u00e4-\\U000000fc]{2} .? [^a]", ["äöüb", "äö\n"], ["äaa", "äöüa"]),
        ('root ::= Some-Rule+\nSome-Rule ::= "a" | "(" root ")"', ["a", "(a(aa))"], ["()", "(a"]),
        ('root ::= ("a" |) ("b" | ("c" |\n "d"))', ["ab", "c", "ad"], ["a", "aa"]),
        ("root ::= [-a] [+-] [\\]x]", ["-+]", "a-x"], ["b+x"]),
    ],
)
def test_a_grammar_accepts_its_texts_and_no_others(grammar, texts, others):
    assert [text for text in texts if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "no rule named 'root'"),
        ('leaf ::= "a"', "no rule named 'root'"),
        ('root ::= "a"\n\n  | leaf', "line 3: '|'"),
        ("root ::= leaf | stem", "line 1: the rule 'leaf' is not defined"),
        ('root ::= "a\nleaf', "line 1"),
        ("root ::= [z-a]", "the range z-a has no characters"),
        ('root ::= "\\q"', r"\\q is not an escape"),
        ('root ::= "\\ud800"', "d800 is not the code of a character"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', "was not opened"),
        ("root ::= *", "nothing before it"),
        ("root ::= <[5]>", "is not valid GBNF"),
        ("(" * 10_000, "does not begin a rule"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_place(grammar, message):
    with invalid("grammar", message):
        build_grammar(AnswerFormat(kind="gbnf", text=grammar), None, None, markers={})


# The worker of the sandbox names the part that cannot be enforced. It is called in this process.

PLAIN = grammar_for(schema(PERSON))
EMPTY = grammar_for(AnswerFormat(kind="regex", text="a[^\\s\\S]"))


def ask(message):
    table = echo_vocabulary().token_table
    assert worker.handle(pickle.dumps((table.tokens, table.special_token_ids, table.eos_tokens))) == b""
    return json.loads(worker.handle(pickle.dumps(message)))


def test_a_grammar_that_can_be_enforced_has_no_problem():
    answer = ask([PLAIN])
    assert (answer["reason"], answer["part"]) == ("", None)
    assert answer["used_s"] >= answer["compile_s"] >= 0


def test_the_part_that_causes_a_problem_is_named():
    answer = ask([EMPTY, PLAIN, EMPTY])
    assert answer["reason"]
    assert answer["part"] == 1


def test_a_grammar_whose_tokens_take_too_long_is_refused():
    matcher = worker.compile_grammar(worker.build_tokenizer(echo_vocabulary().token_table), PLAIN)
    assert worker.walk(matcher.deep_copy(), random.Random(0)) == ""
    assert "ms to check; simplify it" in worker.walk(matcher, random.Random(0), slowest_s=-1.0)


# Tokens of determined text


def holding(**properties):
    return schema({"type": "object", "properties": properties, "required": [*properties]})


def can_force(answer_format, tools=None):
    grammar = grammar_for(answer_format, tools)
    parts = map(as_grammar, json.loads(grammar)["grammars"][1:])
    return ask([with_json_rules(each) for each in (without_forcing(grammar), *parts)])["can_force"]


TEXT, SHORT, LONG = {"type": "string"}, {"const": "abc " * 300}, {"const": "abc " * 600}


@pytest.mark.parametrize(
    ("answer_format", "expected"),
    [
        (schema(PERSON), True),
        (schema({"type": "object"}), True),
        (schema({"enum": [f"value number {at}" for at in range(300)]}), True),
        (schema({**PERSON, "description": "Described. " * 300}), True),
        (holding(text=TEXT, more=SHORT), True),
        (AnswerFormat(kind="lark", text='start: "Name: " /[a-z]+/ "\\nAge: " /[0-9]{1,3}/'), True),
        # Long where the answer begins, later, or in a property that it may leave out.
        (schema(LONG), False),
        (holding(text=TEXT, more=LONG), False),
        (schema({"type": "object", "properties": {"text": TEXT, "more": LONG}}), False),
        # Long because short constants follow each other.
        (holding(text=TEXT, more=SHORT, most=SHORT), False),
        (holding(text=TEXT, more={"type": "array", "items": {"const": "abc"}, "minItems": 400}), False),
        (AnswerFormat(kind="regex", text="x[a-z]*:(ab){20000}"), False),
        (AnswerFormat(kind="regex", text="x[a-z]*:((ab){100}){100}"), False),
        # Texts of special tokens.
        (holding(text=TEXT, more={"enum": ["<|message|>", "x"]}), False),
        (AnswerFormat(kind="regex", text=r"a+[<]\|message\|>"), False),
        (AnswerFormat(kind="lark", text=r'start: "\x3c|message|>"'), False),
    ],
)
def test_tokens_are_forced_where_little_text_is_determined(answer_format, expected):
    assert can_force(answer_format) is expected


def test_long_constants_in_the_parameters_of_any_tool_are_found():
    parameters = {"type": "object", "properties": {"a": SHORT, "b": SHORT}, "required": ["a", "b"]}
    assert can_force(None, TOOLS)
    assert not can_force(None, ToolUse(tools=(*TOOLS.tools, Tool(name="long", parameters=parameters))))

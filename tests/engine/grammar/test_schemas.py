"""JSON schemas are translated to grammars that allow all escapes, have exact bounds and limit numbers, for both
versions of llguidance. The schemas of generators are enforced.
"""

import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from lmx_lab.engine import AnswerFormat
from lmx_lab.engine.echo.model import echo_vocabulary
from lmx_lab.engine.grammar.build import build_grammar, with_json_rules
from lmx_lab.engine.grammar.json_lark import number_pattern
from lmx_lab.engine.grammar.schemas import FORMATS, REPLACEMENTS, enforceable, unenforced
from lmx_lab.engine.grammar.worker import LIMITS, build_tokenizer
from lmx_lab.engine.llama_cpp.grammar import to_lark
from lmx_lab.errors import InvalidRequestError
from tests.support.generated_schemas import UNBOUNDED, generated_schemas

TOKENIZER = build_tokenizer(echo_vocabulary().token_table)
WRITERS = {"flexible": with_json_rules, "on one line": to_lark}
"""The grammar for the installed llguidance, and for llama.cpp, which is compiled by the installed one here."""


def matcher_of(schema, writer="flexible", *, strict=True):
    built = build_grammar(
        AnswerFormat(kind="json_schema", text=json.dumps(schema), strict=strict), None, None, markers={}
    )
    matcher = LLMatcher(TOKENIZER, WRITERS[writer](built), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(schema, text, writer="flexible"):
    matcher = matcher_of(schema, writer)
    return all(matcher.consume_token(token) for token in echo_vocabulary().encode(text)) and matcher.is_accepting()


def closed(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


# Escapes

ESCAPES = [r'"caf\u00e9"', r'"a\/b"', r'"\ud83d\ude00"', r'"\"\\\/\b\f\n\r\t\u0000\u001F\u007f"', '"é😀"']
LONE = [r'"\ud83d"', r'"\ud83dx"', r'"\ude00"', r'"\u00g0"', r'"\x"', '"\n"']
STRINGS = {
    "string": {"type": "string"},
    "length": {"type": "string", "minLength": 1, "maxLength": 20},
    "any": {},
    "item": {"type": "array", "items": {"type": ["string", "null"]}},
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", STRINGS)
def test_all_escapes_of_json_are_allowed(name, writer):
    texts = {text: f"[{text}]" if name == "item" else text for text in ESCAPES + LONE}
    assert [text for text in ESCAPES if not accepts(STRINGS[name], texts[text], writer)] == []
    assert [text for text in LONE if accepts(STRINGS[name], texts[text], writer)] == []


@pytest.mark.parametrize("writer", WRITERS)
def test_an_escape_counts_as_one_character(writer):
    two = {"type": "string", "minLength": 2, "maxLength": 2}
    assert accepts(two, r'"\ud83d\ude00\/"', writer)
    assert not accepts(two, r'"\ud83d\ude00"', writer)
    assert not accepts(two, r'"\u0041bc"', writer)


PATTERNS = [
    (r"^[a[b]$", "[", "c"),
    (r"^[^[\]]+$", "ab", "a]"),
    (r"^[a-c&&b]$", "&", "d"),
    (r"\Aab\Z", "ab", "abc"),
    (r"^a{,2}$", "aa", "aaa"),
    (r"^{[a-z]{2}}$", "{ab}", "ab"),
    (r"^\<\p{Lu}+\>$", "<A>", "A"),
    (r"^[[:alpha:]]+$", "ab", "a1"),
]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("pattern", "text", "other"), PATTERNS)
def test_patterns_mean_the_same_as_in_javascript_and_python(pattern, text, other, writer):
    schema = {"type": "string", "pattern": pattern}
    assert (accepts(schema, f'"{text}"', writer), accepts(schema, f'"{other}"', writer)) == (True, False)
    members = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    assert accepts(members, json.dumps({text: None}), writer)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("text", ["\x00", "\x7f", "a\x9f", "\u2028", "\ufeff", "\U0010ffff", '"\\/'])
def test_listed_values_may_contain_any_character(text, writer):
    written = json.dumps(text, ensure_ascii=False)
    assert accepts({"const": text}, written, writer)
    assert accepts({"enum": [text, "x"]}, written, writer)
    assert accepts(closed(**{text: {"type": "null"}}), f"{{{written}: null}}", writer)


@pytest.mark.parametrize("pattern", ["^a", "b$", "^[a-c]+$", "."])
def test_the_schema_of_a_pattern_applies_to_listed_properties(pattern):
    integer, bounds = {"type": "integer"}, {"minimum": 5, "maximum": 7}
    given = closed(ab=integer, é=integer) | {"patternProperties": {pattern: bounds, "^zz": True}}
    listed = {"ab": {"allOf": [integer, bounds]}, "é": {"allOf": [integer, bounds]} if pattern == "." else integer}
    assert enforceable(given, strict=True)["properties"] == listed


def test_a_pattern_that_takes_long_to_compare_is_not_compared_with_names():
    given = closed(**{"a" * 60: {"type": "null"}}) | {"patternProperties": {"^(a+)+!$": True, "^a*a*a*a*!$": True}}
    assert enforceable(given, strict=True)["properties"] == given["properties"]


@pytest.mark.parametrize("pattern", [r"^\bfoo\b", r"^(?>a)b$", r"^(a)\1$", r"^(?=a)a$", r"^\e\y$"])
def test_a_pattern_that_cannot_be_enforced_is_left_out(pattern):
    assert unenforced({"type": "string", "pattern": pattern}) == ["pattern"]
    assert unenforced({"type": "string", "pattern": r"^\\bfoo$"}) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_bounds_that_no_number_reaches_have_no_effect(writer):
    double = {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}
    assert accepts(double, "-1.5", writer)
    positive = {**double, "minimum": 5e-324}
    assert (accepts(positive, "1.5", writer), accepts(positive, "0", writer)) == (True, False)


@pytest.mark.parametrize("writer", WRITERS)
def test_all_parts_of_an_all_of_apply(writer):
    schema = {"allOf": [{"type": ["integer", "null"]}, {"type": ["integer", "string"]}]}
    assert [text for text in ("1", "null", '"x"') if accepts(schema, text, writer)] == ["1"]
    for parts in ([{"type": "integer"}, {"type": "string"}], [{"type": "object"}, {"type": "array"}]):
        with pytest.raises(AssertionError, match="incompatible types"):
            matcher_of({"allOf": parts}, writer)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        (r"^\d+$", ["0", "42"], ["\u0663"]),
        (r"^\w$", ["a", "_"], ["\u00e9", "-"]),
        (r"^a\sb$", ["a b"], ["a\u00a0b"]),
        (r"^[\w.-]+$", ["a.b-c"], ["\u00e9"]),
        (r"^[\w-.]+$", ["a.b-c"], ["\u00e9"]),
        (r"^\D\W\S$", ["a-b"], ["3-b", "aab", "a-\u3000"]),
        (r"^[^\d]$", ["a"], ["3"]),
        (r"^a.c$", ["a\u00e9c"], ["a\u2028c"]),
        (r"^(?s:a.c)$", ["a\u2028c"], ["abbc"]),
    ],
)
def test_classes_match_what_javascript_and_python_both_match(pattern, texts, others, writer):
    schema = {"type": "string", "pattern": pattern}
    assert [text for text in texts if not accepts(schema, f'"{text}"', writer)] == []
    assert [text for text in others if accepts(schema, f'"{text}"', writer)] == []
    built = build_grammar(AnswerFormat(kind="regex", text=pattern), None, None, markers={})
    for text in (*texts, *others):
        matcher = LLMatcher(TOKENIZER, built, log_level=0)
        matches = (
            all(matcher.consume_token(token) for token in echo_vocabulary().encode(text)) and matcher.is_accepting()
        )
        assert matches == (text in texts), text


def test_negated_classes_of_a_regex_leave_out_the_characters_of_all_scripts():
    for pattern, text in ((r"\D", "\u0663"), (r"\W", "\u00e9"), (r"\S", "\u3000"), (r"[^\d]", "\u0663")):
        matcher = LLMatcher(
            TOKENIZER, build_grammar(AnswerFormat(kind="regex", text=pattern), None, None, markers={}), log_level=0
        )
        assert not all(matcher.try_consume_tokens([token]) for token in echo_vocabulary().encode(text))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    ("schema", "text", "other"),
    [
        ({"type": "string", "pattern": "^[a-z]+$", "minLength": 200}, "a" * 200, "a" * 199),
        ({"type": "string", "pattern": "^[0-9]+$", "minLength": 100}, "1" * 100, "1" * 101),
        ({"type": "string", "pattern": r"^\w*$", "minLength": 2, "maxLength": 3}, "a_1", "a_1b"),
        ({"type": "string", "format": "uuid", "minLength": 36}, "01234567-89ab-cdef-0123-456789abcdef", "0"),
        ({"type": "string", "format": "email", "minLength": 6}, "a@b.co", "a@b."),
    ],
)
def test_lengths_are_enforced_beside_a_pattern_or_a_format(schema, text, other, writer):
    assert unenforced(schema) == []
    assert (accepts(schema, f'"{text}"', writer), accepts(schema, f'"{other}"', writer)) == (True, False)


NODE = {"type": "object", "properties": {"v": {"type": "integer"}}, "required": ["v"]}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    ("keys", "reference"),
    [
        ({"$dynamicAnchor": "node"}, {"$dynamicRef": "#node"}),
        ({"$anchor": "node"}, {"$ref": "#node"}),
        ({"$recursiveAnchor": True}, {"$recursiveRef": "#"}),
        ({}, {"$ref": "#"}),
    ],
)
def test_references_without_a_path_are_followed(keys, reference, writer):
    schema = {**NODE, **keys, "properties": {**NODE["properties"], "next": reference}}
    assert unenforced(schema) == []
    assert accepts(schema, '{"v": 1, "next": {"v": 2}}', writer)
    assert not accepts(schema, '{"v": 1, "next": {"v": "a"}}', writer)


A = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (closed(n={"$ref": "#"}), "properties.n"),
        ({"$ref": "#"}, "the schema"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "items"),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "prefixItems.0"),
        (closed(n={"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}), "properties.n.anyOf.0"),
        (closed(n={"anyOf": [{"$ref": "#"}, False]}), "properties.n.anyOf.0"),
        (closed(n={"allOf": [{"type": "object"}, {"$ref": "#"}]}), "properties.n.allOf.1"),
        ({**A, "$defs": {"a": closed(b={"$ref": "#/$defs/b"}), "b": closed(a=A)}}, "$defs.a.properties.b"),
        ({"properties": {"x": A}, "$defs": {"a": closed(a=A)}}, "$defs.a.properties.a"),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["x"]}, "additionalProperties"),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}, "additionalProperties"),
        (
            {
                "type": "object",
                "patternProperties": {"^a": {"$ref": "#"}},
                "additionalProperties": False,
                "minProperties": 1,
            },
            "patternProperties.^a",
        ),
    ],
)
def test_a_schema_whose_values_never_end_is_refused(schema, place):
    with pytest.raises(InvalidRequestError, match=rf"^{re.escape(place)} requires a value like itself"):
        enforceable(schema, strict=False)


@pytest.mark.parametrize(
    "schema",
    [
        {**closed(n={"$ref": "#"}), "required": []},
        closed(n={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
        closed(n={"type": "array", "items": {"$ref": "#"}}),
        {"type": "object", "additionalProperties": {"$ref": "#"}},
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "null"}},
            "additionalProperties": {"$ref": "#"},
            "required": ["ab"],
        },
        {**closed(n={"$ref": "#"}), "type": ["object", "null"]},
        {"type": "integer", "$defs": {"a": A}},
        {"$ref": "#/$defs/k0", "$defs": {f"k{at}": {"$ref": f"#/$defs/k{at + 1}"} for at in range(300)} | {"k300": {}}},
        closed(n={"$ref": "#/elsewhere"}) | {"elsewhere": {"type": "null"}},
    ],
)
def test_a_recursive_schema_with_an_end_is_enforced(schema):
    assert enforceable(schema, strict=True) == schema


PATTERNED = [{"type": "string", "pattern": r"^.{1,9}$"}, {"type": "string", "pattern": r"^[^a]*$", "maxLength": 9}]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("schema", PATTERNED)
def test_an_escape_that_cannot_be_completed_cannot_begin_in_a_pattern(schema, writer):
    assert accepts(schema, r'"\"\\"', writer)
    for nested in (schema, {"anyOf": [schema, {"type": "null"}]}):
        matcher = matcher_of(nested, writer)
        for token in echo_vocabulary().encode('"\\'):
            assert matcher.consume_token(token)
        assert [matcher.validate_tokens(echo_vocabulary().encode(letter)) for letter in 'unt/"'] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("writer", WRITERS)
def test_open_objects_have_every_name_once(writer):
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True}
    assert accepts(schema, '{"a": null, "b": 3, "c d": "e"}', writer)
    assert not accepts(schema, '{"a": null, "a": 3}', writer)
    assert not accepts(schema, '{"a": null, "\\u0061": 3}', writer)


# Numbers

BOUNDS = st.none() | st.integers(-300, 300) | st.integers(-(2**70), 2**70)


@given(low=BOUNDS, high=BOUNDS, exclusive=st.booleans(), offset=st.integers(-2, 2), whole=st.booleans())
def test_bounds_of_integers_and_numbers_are_exact(low, high, exclusive, offset, whole):
    keys = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ("minimum", "maximum")
    schema = {key: bound for key, bound in zip(keys, (low, high), strict=True) if bound is not None}
    pattern = number_pattern(schema, whole=whole)
    if pattern is None:
        assert low is not None
        assert high is not None
        assert low >= high - exclusive
        return
    for near in (low or 0, high or 0):
        for text in (str(near + offset), *([f"{near + offset}.5"] if not whole else [])):
            value = Fraction(text)
            fits = Draft202012Validator(schema).is_valid(int(value) if value.denominator == 1 else value)
            limited = abs(value) < 10**19 - 1 or (low is not None and high is not None)
            if text != "-0" and (limited or not fits):
                assert (re.fullmatch(pattern, text) is not None) == fits, (schema, text)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_without_bounds_have_a_limited_number_of_digits(kind, writer):
    assert accepts({"type": kind}, "-" + "9" * 19, writer)
    assert not accepts({"type": kind}, "9" * 20, writer)
    assert accepts({"type": "number"}, "0." + "1" * 12 + "e-12", writer)
    assert not accepts({"type": "number"}, "0." + "1" * 13, writer)
    assert not accepts({"type": "number", "minimum": 0, "maximum": 1}, "0." + "1" * 13, writer)


def test_texts_of_formats_are_limited_in_length():
    for pattern in (*FORMATS.values(), *REPLACEMENTS.values()):
        assert not set("*+") & set(re.sub(r"\[[^]]*\]", "", pattern))


SAMPLES = ["P1D", "P2Y3M4DT5H6M7S", "PT36H", "P9W", "a@b.co", "first.last+tag@mail.example.com", "-1", "12.50", "+0.5"]


def test_a_replaced_pattern_matches_all_texts_of_its_replacement():
    for pattern, replacement in REPLACEMENTS.items():
        texts = [text for text in SAMPLES if re.fullmatch(replacement, text)]
        assert len(texts) >= 2
        assert all(re.search(pattern, text) for text in texts)


# Structure

TEXTS = ["{}", "[]", "[1]", '[1, "a"]', '{"a": 1}', '{"a": 1, "b": 2}', '{"b": 2}', "null", "5", '"x"', "true", "[[]]"]
STRUCTURES = [
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
    {"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 1, "maxItems": 1},
    {"type": "array", "items": {"type": "array"}, "maxItems": 1},
    {"type": "array", "items": False},
    {"type": "array", "maxItems": 0},
    {**closed(a={"type": "integer"}, b={"type": "integer"}), "required": ["b"]},
    {**closed(a={"type": "integer"}, b={"type": "integer"}), "required": []},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"oneOf": [{"type": "integer"}, {"type": "string"}, closed(a={"const": 1})]},
    {"oneOf": [closed(a={"const": 1}), closed(a={"enum": [2, 3]})]},
    {"anyOf": [{"$ref": "#/$defs/n"}, False], "$defs": {"n": {"allOf": [{"type": ["null", "boolean"]}]}}},
    {"enum": [{"a": 1}, [1, "a"], 5, None]},
    {"enum": ["x", 5], "type": "string"},
    {"$ref": "#/definitions/%6E", "definitions": {"n": {"type": "null"}}},
]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("schema", STRUCTURES)
def test_a_grammar_accepts_the_values_that_are_valid(schema, writer):
    valid = [text for text in TEXTS if Draft202012Validator(schema).is_valid(json.loads(text))]
    assert [text for text in TEXTS if accepts(schema, text, writer)] == valid


# Generators


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", [*generated_schemas(), *UNBOUNDED])
def test_schemas_of_generators_are_enforced(name, writer):
    matcher_of((generated_schemas() | UNBOUNDED)[name], writer, strict=name != "Pydantic set")


def test_only_sets_of_generated_schemas_are_not_enforced_as_a_whole():
    found = {name: names for name, schema in (generated_schemas() | UNBOUNDED).items() if (names := unenforced(schema))}
    assert found == {"Pydantic set": ["uniqueItems"]}


@pytest.mark.parametrize(
    ("given", "expected", "names"),
    [
        ({"type": "array", "uniqueItems": True}, {"type": "array"}, ["uniqueItems"]),
        ({"contains": {"const": 1}, "minContains": 2}, {"minItems": 1}, ["contains", "minContains"]),
        ({"not": {"const": 1}, "if": {}, "then": {}}, {}, ["not", "if", "then"]),
        ({"type": "string", "pattern": "^(?=a)a$"}, {"type": "string"}, ["pattern"]),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            {"anyOf": [{"type": "integer"}, {"type": "number"}]},
            ["oneOf"],
        ),
        ({"type": "array", "items": {"uniqueItems": True}}, {"type": "array", "items": {}}, ["uniqueItems"]),
        (
            {"type": "string", "pattern": "^a[^b]*$", "minLength": 40},
            {"type": "string", "pattern": "^a[^b]*$", "minLength": 16},
            ["minLength"],
        ),
        ({"properties": {"a": None}}, {"properties": {"a": True}, "additionalProperties": False}, ["properties"]),
        ({"anyOf": [None, {"type": "null"}]}, {"anyOf": [True, {"type": "null"}]}, ["anyOf"]),
        (
            {"patternProperties": {"^a": {"type": "null"}, "b$": True}},
            {"patternProperties": {"(?:^a)|(?:b$)": {"anyOf": [{"type": "null"}, True]}}},
            ["patternProperties"],
        ),
        ({"type": "object", "minProperties": 2}, {"type": "object", "minProperties": 2}, ["minProperties"]),
        ({"$dynamicRef": "#no", "type": "null"}, {"type": "null"}, ["$dynamicRef"]),
    ],
)
def test_keywords_that_cannot_be_enforced_are_left_out_and_named(given, expected, names):
    assert (enforceable(given, strict=False), unenforced(given)) == (expected, names)
    if names[0] in ("pattern", "oneOf", "minLength", "properties", "anyOf", "patternProperties"):
        # llguidance refuses these.
        assert enforceable(given, strict=True).items() >= given.items()
    else:
        with pytest.raises(
            InvalidRequestError, match=re.escape(f"{names[-1]} cannot be enforced; leave out {names[0]}")
        ):
            enforceable(given, strict=True)


def test_many_options_are_distinguished_by_a_property_that_all_require():
    options = [closed(kind={"const": f"k{at}"}, a={"type": "integer"}) for at in range(200)]
    assert unenforced({"oneOf": options}) == []
    assert accepts({"oneOf": options}, '{"kind": "k199", "a": 1}')
    assert unenforced({"oneOf": [*options, {"type": "null"}]}) == ["oneOf"]

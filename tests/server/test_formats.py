"""Tests of ``response_format``: valid formats are converted for the engine, and invalid ones are refused."""

import json

import pytest
from pydantic import ValidationError

from lmx_lab.engine import AnswerFormat
from lmx_lab.http.errors import validation_error
from lmx_lab.server.translate import generation_request
from tests.support.asking import chat


def answer_format(**changes):
    return generation_request(chat(**changes)).answer_format


def schema(value, **changes):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value, **changes}}


def deep(levels):
    value = {}
    for _ in range(levels):
        value = {"not": value}
    return value


@pytest.mark.parametrize("given", [None, {"type": "text"}])
def test_text_sets_no_format(given):
    assert answer_format(response_format=given) is None


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"type": "json_object"}, "json_schema", '{"type":"object"}'),
        ({"type": "json_object", "schema": None}, "json_schema", '{"type":"object"}'),
        ({"type": "json_object", "schema": {}}, "json_schema", '{"type":"object"}'),
        ({"type": "json_object", "schema": {"maxProperties": 2}}, "json_schema", '{"maxProperties":2}'),
        (schema({"b": 1, "a": "é"}), "json_schema", '{"b":1,"a":"é"}'),
        (schema(True, strict=True, description="d"), "json_schema", "true"),
        (schema(False, strict=None, description=None), "json_schema", "false"),
        ({"type": "regex", "regex": "a+"}, "regex", "a+"),
        ({"type": "grammar", "grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"type": "grammar", "grammar": 'start: "a"', "syntax": "lark"}, "lark", 'start: "a"'),
    ],
)
def test_each_format_is_translated_for_the_engine(given, kind, text):
    assert answer_format(response_format=given) == AnswerFormat(kind=kind, text=text)


@pytest.mark.parametrize(
    ("given", "param", "expected"),
    [
        ("json", "response_format", ["must be an object", "json_schema", "'json'"]),
        ({}, "response_format.type", ["required"]),
        ({"type": "xml"}, "response_format.type", ["'xml'", "text, json_object, json_schema, regex, grammar"]),
        ({"type": ["text"]}, "response_format.type", ["json_schema"]),
        ({"type": "text", "schema": {}}, "response_format.schema", ["leave it out"]),
        ({"type": "json_object", "schema": []}, "response_format.schema", ["an object", "a list"]),
        ({"type": "json_schema"}, "response_format.json_schema", ["required"]),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema", ["required"]),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name", ["required"]),
        (schema(None), "response_format.json_schema.schema", ["true or false", "null"]),
        (schema("{}"), "response_format.json_schema.schema", ["true or false", "a string"]),
        (schema(1.5), "response_format.json_schema.schema", ["a number"]),
        (schema({}, name=""), "response_format.json_schema.name", ["at least 1"]),
        (schema({}, name="a" * 257), "response_format.json_schema.name", ["256"]),
        (schema({}, strict="yes"), "response_format.json_schema.strict", ["boolean"]),
        (schema({"x": "y" * 262_137}), "response_format.json_schema.schema", ["262,145", "262,144"]),
        (schema({"x": {1}}), "response_format.json_schema.schema", ["cannot be written as JSON", "set"]),
        (schema({"x": float("inf")}), "response_format.json_schema.schema", ["cannot be written as JSON"]),
        (schema({"x": "\ud800"}), "response_format.json_schema.schema", ["cannot be written as JSON", "surrogates"]),
        ({"type": "regex"}, "response_format.regex", ["required"]),
        ({"type": "regex", "regex": ""}, "response_format.regex", ["at least 1"]),
        ({"type": "regex", "regex": "a" * 65_537}, "response_format.regex", ["65,537", "65,536"]),
        ({"type": "grammar", "grammar": "a" * 65_537}, "response_format.grammar", ["65,537", "65,536"]),
        ({"type": "grammar", "grammar": "a", "syntax": "gbnf"}, "response_format.syntax", ["'lark'", "'gbnf'"]),
    ],
)
def test_the_error_of_an_invalid_format_names_the_field(given, param, expected):
    with pytest.raises(ValidationError) as wrong:
        chat(response_format=given)
    error = validation_error(wrong.value)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")
    assert [part for part in expected if part not in error.message] == []
    assert len(error.message) < 500


def test_a_schema_that_is_nested_too_deeply_is_refused():
    with pytest.raises(ValidationError) as wrong:
        chat(response_format=schema(deep(100_000)))
    assert "recursion" in validation_error(wrong.value).message


def test_the_largest_allowed_values_are_accepted():
    largest = {"x": "y" * 262_136}
    found = answer_format(response_format=schema(largest))
    assert len(found.text) == 262_144
    assert json.loads(found.text) == largest
    assert answer_format(response_format={"type": "regex", "regex": "a" * 65_536}) is not None


def test_a_format_with_ignore_eos_is_refused():
    with pytest.raises(ValidationError) as wrong:
        chat(response_format={"type": "json_object"}, ignore_eos=True)
    error = validation_error(wrong.value)
    assert error.param == "response_format"
    assert "ignore_eos" in error.message
    assert answer_format(response_format={"type": "text"}, ignore_eos=True) is None

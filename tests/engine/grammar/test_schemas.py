"""Objects are closed where that cannot make a schema impossible."""

from __future__ import annotations

from typing import Any

import pytest

from lmx_lab.engine.grammar.schemas import enforceable

STRING = {"type": "string"}


def test_objects_are_closed_wherever_they_are() -> None:
    inner = {"type": "object", "properties": {"a": STRING}}
    shut = {**inner, "additionalProperties": False}
    places: list[Any] = [
        lambda part: part,
        lambda part: {"type": "object", "properties": {"b": part}, "additionalProperties": True},
        lambda part: {"type": "array", "items": part},
        lambda part: {"type": "array", "prefixItems": [STRING, part]},
        lambda part: {"anyOf": [part, {"type": "null"}]},
        lambda part: {"$defs": {"x": part}, "$ref": "#/$defs/x"},
        lambda part: {"type": "object", "additionalProperties": part},
    ]
    for place in places:
        assert enforceable(place(inner)) == place(shut)


@pytest.mark.parametrize(
    "schema",
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
def test_what_says_more_by_itself_is_left_as_it_is(schema: Any) -> None:
    assert enforceable(schema) == schema


def test_an_object_of_no_properties_has_none() -> None:
    assert enforceable({"type": "object", "properties": {}})["additionalProperties"] is False


def test_the_given_schema_is_not_changed() -> None:
    schema = {"properties": {"a": {"properties": {"b": STRING}}}}
    enforceable(schema)
    assert schema == {"properties": {"a": {"properties": {"b": STRING}}}}


def test_a_property_may_be_named_like_a_keyword() -> None:
    schema = {"properties": {"allOf": STRING, "properties": STRING}}
    assert enforceable(schema) == {**schema, "additionalProperties": False}


def test_formats_that_say_nothing_of_a_text_are_left_out() -> None:
    schema = {"allOf": [{"properties": {"a": {"type": "string", "format": "password"}, "format": STRING}}]}
    assert enforceable(schema) == {"allOf": [{"properties": {"a": STRING, "format": STRING}}]}
    assert enforceable({"format": "date"}) == {"format": "date"}

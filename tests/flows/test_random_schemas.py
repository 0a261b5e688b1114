"""Tests with random schemas and a model with random weights: answers are valid, or the schema is refused."""

import json
import string
from collections import Counter

import httpx2
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from pydantic_core import from_json

from tests.support.asking import chat_body
from tests.support.labs import serving

pytestmark = pytest.mark.long

PATH = "/v1/chat/completions"
EXAMPLES = 40


@pytest.fixture(scope="module")
def http(tiny_home):
    with serving(tiny_home, "tiny") as lab, httpx2.Client(base_url=lab.url) as client:
        yield client


def bounded(kind, low, high, most):
    """Draw a schema with two bounds, which cannot be satisfied if they are in the wrong order."""
    bounds = st.tuples(st.integers(0, most), st.integers(0, most))
    likely = bounds.map(sorted) | bounds
    return likely.map(lambda both: {"type": kind, low: both[0], high: both[1]})


# Some tokenizers do not have a token for each byte: SmolLM2's cannot encode U+40000.
WORDS = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=3)
VALUES = st.none() | st.booleans() | st.integers(-9, 9) | WORDS | st.lists(st.booleans(), max_size=2)
LEAVES = st.one_of(
    bounded("string", "minLength", "maxLength", 6),
    bounded("integer", "minimum", "maximum", 300),
    bounded("number", "exclusiveMinimum", "maximum", 20).map(lambda schema: {**schema, "multipleOf": 0.5}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
    st.sampled_from(["^[a-c]{1,3}$", "^x?y$", "[0-9]{2}"]).map(
        lambda p: {"type": "string", "pattern": p, "maxLength": 5}
    ),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
    st.lists(VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
)
NAMES = st.text(string.ascii_letters + ' "\\é', min_size=1, max_size=4)


def objects(inner):
    @st.composite
    def build(draw):
        properties = draw(st.dictionaries(NAMES, inner, max_size=3))
        required = draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
        schema = {"type": "object", "properties": properties, "required": required}
        return schema if draw(st.integers(0, 9)) == 0 else {**schema, "additionalProperties": False}

    return build()


def arrays(inner):
    lists = st.tuples(inner, bounded("array", "minItems", "maxItems", 3)).map(
        lambda both: {**both[1], "items": both[0]}
    )
    tuples = st.lists(inner, min_size=1, max_size=2).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    )
    return lists | tuples


def nested(inner):
    several = st.lists(inner, min_size=1, max_size=3)
    refused = st.sampled_from([{"uniqueItems": True}, {"not": {}}, {"contains": {}}, {"$ref": "http://remote.invalid"}])
    return st.one_of(
        objects(inner),
        arrays(inner),
        several.map(lambda schemas: {"anyOf": schemas}),
        several.map(lambda schemas: {"oneOf": schemas}),
        inner.map(lambda schema: {"$defs": {"of": schema}, "$ref": "#/$defs/of"}) | refused,
    )


SCHEMAS = objects(st.recursive(LEAVES, nested, max_leaves=6)) | st.recursive(LEAVES, nested, max_leaves=6)


ITSELF = {"$ref": "#/$defs/of"}
SELF_REFERRING = {
    "$defs": {"of": {"anyOf": [ITSELF, {"type": "boolean"}, {"type": "array", "items": ITSELF, "maxItems": 2}]}},
    **ITSELF,
}


def judge(schema):
    """Return a validator for a schema, in which a definition may refer to itself without a value in between.

    jsonschema would follow such a reference without end. Here it matches nothing when it is followed a second time for
    the same value, as in a grammar.
    """
    follow, followed = Draft202012Validator.VALIDATORS["$ref"], set()

    def follow_once(validator, reference, instance, schema):
        key = reference, id(instance)
        if key in followed:
            return [ValidationError(f"{reference} refers to itself")]
        followed.add(key)
        try:
            return list(follow(validator, reference, instance, schema))
        finally:
            followed.remove(key)

    validator = extend(Draft202012Validator, {"$ref": follow_once})
    return validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def check_answer(schema, choice):
    text, reason = choice["message"]["content"], choice["finish_reason"]
    if reason == "stop":
        judge(schema).validate(json.loads(text))
        return "stop"
    assert reason == "length"
    # In a list, because only the content of a list may be incomplete. An invalid character raises an error.
    from_json(f"[{text}", allow_partial="trailing-strings")
    return "length"


def test_the_judge_follows_references_of_a_definition_to_itself():
    assert [judge(SELF_REFERRING).is_valid(value) for value in (True, [], [[True], False])] == [True] * 3
    assert [judge(SELF_REFERRING).is_valid(value) for value in (1, [1], [[True], None])] == [False] * 3
    assert not judge({"$defs": {"of": ITSELF}, **ITSELF}).is_valid(True)


def test_answers_to_random_schemas_are_valid_json(http):
    seen = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(schema=SCHEMAS, seed=st.integers(0, 1000))
    @example(schema={"enum": ["a", 1, None]}, seed=0)
    @example(schema={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}, seed=1)
    @example(schema={"type": "string", "minLength": 5, "maxLength": 2}, seed=2)
    @example(schema=SELF_REFERRING, seed=3)
    def check(schema, seed):
        format_ = {"type": "json_schema", "json_schema": {"name": "random", "schema": schema}}
        body = chat_body(response_format=format_, temperature=1, seed=seed, max_tokens=200)
        response = http.post(PATH, json=body)
        if response.status_code == 400:
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("invalid-request", "response_format"), error["message"]
            assert "cannot be enforced: " in error["message"]
            assert error["message"].rpartition("cannot be enforced: ")[2]
            seen["refused"] += 1
            return
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        seen[check_answer(schema, choice)] += 1

    check()
    # How many random schemas can be enforced varies (in one run, 31 of 40 were refused). The examples ensure these
    # counts.
    assert seen["stop"] >= 2, seen
    assert seen["refused"] >= 1, seen
    assert http.post(PATH, json=chat_body()).status_code == 200

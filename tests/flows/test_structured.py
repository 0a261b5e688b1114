"""Tests of ``response_format`` on a running server: answers have the requested format, and others are refused."""

import json
import socket
from typing import Annotated

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field
from pydantic_core import from_json

from tests.support.asking import HELLO, echo_body, error_of
from tests.support.generated_schemas import DIGIT, SHORT, closed

PATH = "/v1/chat/completions"


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


def of(name, **definitions):
    return {**ref(name), "$defs": definitions}


def or_null(schema):
    return {"anyOf": [schema, {"type": "null"}]}


COLOUR = {"enum": ["red", "blue"]}
RECURSIVE = {
    "list": (
        of("leaf", leaf=closed(colour=COLOUR, children={"type": "array", "items": ref("leaf"), "maxItems": 1})),
        '{"colour": "red", "children": [{"colour": "blue", "children": []}]}',
    ),
    "null": (
        of("link", link=closed(value=DIGIT, next=or_null(ref("link")))),
        '{"value": 1, "next": {"value": 2, "next": null}}',
    ),
    "mutual": (
        of("folder", folder=closed(name=SHORT, file=or_null(ref("file"))), file=closed(parent=or_null(ref("folder")))),
        '{"name": "a", "file": {"parent": {"name": "b", "file": null}}}',
    ),
    "number": (
        of(
            "sum",
            sum=closed(left=DIGIT, right={"anyOf": [DIGIT, ref("product")]}),
            product=closed(factor=DIGIT, of={"anyOf": [DIGIT, ref("sum")]}),
        ),
        '{"left": 1, "right": {"factor": 2, "of": {"left": 3, "right": 4}}}',
    ),
    "root": (
        closed(colour=COLOUR, of={**or_null({"$ref": "#"}), "default": None}),
        '{"colour": "red", "of": {"colour": "blue", "of": null}}',
    ),
    "escaped names": (
        of("pair", **{"a/b~c": DIGIT, "pair": {"type": "array", "items": ref("a~1b~0c"), "maxItems": 2}}),
        "[1, 2]",
    ),
    "any type with a format": (closed(ip={"format": "ipv4"}), '{"ip": "127.0.0.1"}'),
}
"""Schemas with references or of any size, and a value of each. The contract tests of engines have the schemas whose
answers also end on a model with random weights.
"""


@pytest.mark.parametrize("name", RECURSIVE)
def test_a_schema_with_references_is_enforced(http, name):
    schema, value = RECURSIVE[name]
    body = echo_body(messages=[{"role": "user", "content": value}], max_tokens=100)
    (choice,) = http.post(PATH, json=body | {"response_format": schema_format(schema)}).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (value, "stop")


class Person(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=120)]


class Customer(BaseModel):
    person: Person
    friend: Person | None


@pytest.fixture
def client(tiny_lab):
    with OpenAI(**tiny_lab.openai, max_retries=0) as client:
        yield client


def test_the_streaming_helper_of_the_client_parses_the_same(client):
    fields = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "temperature": 1, "seed": 11}
    whole = client.chat.completions.parse(**fields, response_format=Customer)
    with client.chat.completions.stream(**fields, response_format=Customer) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Customer)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    assert len(deltas) > 1
    assert "".join(deltas) == whole.choices[0].message.content


def test_the_parse_helper_of_the_client_raises_for_an_incomplete_answer(client):
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        client.chat.completions.parse(model="tiny", messages=HELLO, max_tokens=5, response_format=Person)
    (choice,) = cut.value.completion.choices
    assert choice.finish_reason == "length"
    from_json(f"[{choice.message.content}", allow_partial="trailing-strings")


def refusal(http, **changes):
    """Return the error of a request, after which the next request is answered."""
    error = error_of(http.post(PATH, json=echo_body(**changes)), 400, "invalid-request")
    assert len(error["message"]) < 1500
    assert http.post(PATH, json=echo_body(max_tokens=1)).status_code == 200
    return error


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$ref": "file:///etc/passwd"}, "file:///etc/passwd"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        (
            closed(a={"type": "string", "pattern": "("}),
            "properties.a.pattern: regular expression: unclosed group; corr",
        ),
        (closed(a={"type": "text"}), "properties.a: type has the unknown value text; correct it"),
        (closed(a={"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "items requires a value like itself"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(http, schema, expected):
    error = refusal(http, response_format=schema_format(schema))
    assert (error["param"], expected in error["message"]) == ("response_format", True)


BAD = {"type": "text"}
FUNCTIONS = {"functions": [{"name": "f", "parameters": {"properties": {"a": BAD}}}], "function_call": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATH, {"guided_json": BAD}, "guided_json"),
        (PATH, {"json_schema": BAD}, "json_schema"),
        (PATH, {"structured_outputs": {"regex": "("}}, "structured_outputs"),
        (PATH, FUNCTIONS, "functions.0.parameters"),
        ("/v1/completions", {"guided_regex": "("}, "guided_regex"),
        ("/completion", {"json_schema": BAD}, "json_schema"),
    ],
)
def test_the_error_of_a_format_names_its_field(http, path, fields, param):
    body = echo_body(**fields) if path == PATH else {"prompt": "hello", **fields}
    assert error_of(http.post(path, json=body), 400, "invalid-request")["param"] == param


@pytest.mark.parametrize("where", ["format", "tool", "grammar"])
def test_nothing_is_fetched_for_a_remote_reference(http, where):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        remote = {"$ref": f"http://127.0.0.1:{listening.getsockname()[1]}/schema.json"}
        tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"a": remote}}}}
        fields = {
            "format": {"response_format": schema_format(closed(a=remote))},
            "tool": {"tools": [tool], "tool_choice": "required"},
            "grammar": {"response_format": {"type": "grammar", "grammar": f"start: %json {json.dumps(remote)}"}},
        }
        assert remote["$ref"] in refusal(http, **fields[where])["message"]
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


def in_arrays(levels, schema):
    for _ in range(levels):
        schema = {"type": "array", "minItems": 1, "items": schema}
    return schema


def test_a_schema_of_the_largest_depth_is_enforced(http):
    body = echo_body(max_tokens=100, response_format=schema_format(in_arrays(60, {"const": 5, "type": "integer"})))
    (choice,) = http.post(PATH, json=body).json()["choices"]
    from_json(choice["message"]["content"], allow_partial=True)
    assert choice["message"]["content"].startswith("[")


def test_a_deeper_schema_is_refused(http):
    error = refusal(http, response_format=schema_format(in_arrays(62, {"type": "null"})))
    assert "64 levels" in error["message"]

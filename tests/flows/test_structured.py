"""Tests of ``response_format`` on a running server: answers have the requested format, and others are refused."""

import asyncio
import json
import socket

import openai
import pytest
from jsonschema import Draft202012Validator
from openai import AsyncOpenAI, OpenAI
from pydantic_core import from_json

from tests.flows.schemas import MODELS, PLAIN, RECURSIVE, Customer, Person, closed
from tests.support.asking import HELLO, echo_body, error_of
from tests.support.labs import serving

PATH = "/v1/chat/completions"


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def ask_all(base_url):
    """Request answers for all schemas at the same time, and return them by the name of the schema."""
    async with AsyncOpenAI(base_url=base_url, api_key="anything", max_retries=0) as client:

        def ask(number, name, schema):
            prompt = f"Repeat this: {RECURSIVE[name]}" if name in RECURSIVE else "Give a short example."
            messages = [{"role": "user", "content": prompt}]
            fields = {"model": "default", "messages": messages, "temperature": 0.7, "max_tokens": 300}
            completions = client.chat.completions
            if isinstance(schema, type):
                return completions.parse(**fields, seed=number, response_format=schema)
            return completions.create(**fields, seed=number, response_format=schema_format(schema))

        schemas = {**MODELS, **PLAIN}
        answers = await asyncio.gather(
            *(ask(number, *named) for number, named in enumerate(schemas.items())), return_exceptions=True
        )
    return dict(zip(schemas, answers, strict=True))


@pytest.fixture(scope="module")
def echo_answers(echo_home):
    with serving(echo_home, "echo", slots=16) as lab:
        return asyncio.run(ask_all(f"{lab.url}/v1"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *PLAIN])
def test_the_answer_follows_each_schema(echo_answers, name):
    if isinstance(answer := echo_answers[name], Exception):
        raise answer
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    message = choice.message
    if name in MODELS:
        assert isinstance(message.parsed, MODELS[name])
    schema = MODELS[name].model_json_schema() if name in MODELS else PLAIN[name]
    checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    checker.validate(json.loads(message.content))


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
FUNCTIONS = {
    "functions": [{"name": "f", "parameters": {"properties": {"a": BAD}}}],
    "function_call": {"name": "f"},
}


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

"""Tests of ``response_format`` on a running server: answers have the requested format, and others are refused."""

import asyncio
import json
import socket

import openai
import pytest
from jsonschema import Draft202012Validator
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from pydantic_core import from_json

from tests.flows.schemas import DIGIT, MODELS, PLAIN, RECURSIVE, SHORT, Customer, Person, closed
from tests.support.asking import HELLO, chat_body, echo_body, open_request
from tests.support.labs import manager_of, serving, wait_until_idle
from tests.support.waiting import until

PATH = "/v1/chat/completions"
LARGE = closed(text={"type": "string", "minLength": 6000})
"""A schema whose answers are so long that no answer in these tests is complete."""


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def check(schema, text):
    """Parse a text, check that it satisfies the schema, and return its value."""
    value = json.loads(text or "")
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(value)
    return value


# --- fifty schemas


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


@pytest.fixture(scope="module")
def real_answers(starter_home):
    """Return the answers of the real SmolLM2."""
    with serving(starter_home, "smollm2-135m", slots=16) as lab:
        return asyncio.run(ask_all(f"{lab.url}/v1"))


def choice_of(answer):
    if isinstance(answer, Exception):
        raise answer
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    return choice


def check_answer(answers, name):
    message = choice_of(answers[name]).message
    if name in MODELS:
        assert isinstance(message.parsed, MODELS[name])
    check(MODELS[name].model_json_schema() if name in MODELS else PLAIN[name], message.content)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *PLAIN])
def test_the_answer_follows_each_schema(echo_answers, name):
    check_answer(echo_answers, name)


@pytest.mark.long
@pytest.mark.parametrize("name", [*MODELS, *PLAIN])
def test_the_real_model_follows_each_schema(real_answers, name):
    check_answer(real_answers, name)


def test_there_are_fifty_schemas():
    assert len(MODELS) + len(PLAIN) >= 50


# --- the tiny model: streams, batches, ends


@pytest.fixture(scope="module")
def eight(tiny_home):
    with serving(tiny_home, "tiny", slots=8) as lab:
        yield lab


@pytest.fixture
def client(eight):
    with OpenAI(base_url=f"{eight.url}/v1", api_key="anything", max_retries=0) as client:
        yield client


def ask(client, **changes):
    return client.chat.completions.create(**chat_body(max_tokens=200, **changes))


def text_of(answer, reason="stop"):
    assert answer.choices[0].finish_reason == reason
    return answer.choices[0].message.content or ""


PETS = closed(
    name=SHORT, legs=DIGIT, kind={"enum": ["cat", "dog"]}, words={"type": "array", "items": SHORT, "maxItems": 2}
)
WARM = {"temperature": 1, "seed": 11}


def test_a_stream_has_the_same_json(client):
    fields = {"response_format": schema_format(PETS), **WARM}
    whole = text_of(ask(client, **fields))
    pieces = []
    for chunk in client.chat.completions.create(**chat_body(max_tokens=200, stream=True, **fields)):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 1
    check(PETS, whole)


def test_the_streaming_helper_of_the_client_parses_the_same(client):
    fields = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 200,
        "response_format": Customer,
        **WARM,
    }
    whole = client.chat.completions.parse(**fields)
    with client.chat.completions.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Customer)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    assert "".join(deltas) == whole.choices[0].message.content


FORMS = {
    "object": {"type": "json_object", "schema": closed(a=SHORT)},
    "schema": schema_format(PETS),
    "regex": {"type": "regex", "regex": "[a-z]{3,5}( [a-z]{3,5}){2}"},
    "grammar": {"type": "grammar", "grammar": 'start: pair ("," pair){1,3}\npair: /[a-z]{1,3}/ "=" /[0-9]{1,3}/'},
}
FREE = [[{"role": "user", "content": word}] for word in ("hello", "goodbye", "perhaps")]


def test_constrained_and_free_answers_in_one_batch_do_not_affect_each_other(client, eight):
    requests = [
        *({"response_format": form} for form in FORMS.values()),
        *({"messages": messages, "max_tokens": 60} for messages in FREE),
    ]
    bodies = [{**chat_body(max_tokens=200), **changes} for changes in requests]
    alone = [client.chat.completions.create(**body).choices[0] for body in bodies]

    async def together():
        async with AsyncOpenAI(base_url=f"{eight.url}/v1", api_key="anything", max_retries=0) as concurrent:
            answers = await asyncio.gather(*(concurrent.chat.completions.create(**body) for body in bodies))
        return [answer.choices[0] for answer in answers]

    both = asyncio.run(together())
    assert [choice.message.content for choice in both] == [choice.message.content for choice in alone]
    assert [choice.finish_reason for choice in both[: len(FORMS)]] == ["stop"] * len(FORMS)
    found = dict(zip(FORMS, (choice.message.content for choice in both), strict=False))
    check(closed(a=SHORT), found["object"])
    check(PETS, found["schema"])
    check({"pattern": f"^{FORMS['regex']['regex']}$"}, json.dumps(found["regex"]))
    check({"pattern": "^[a-z]{1,3}=[0-9]{1,3}(,[a-z]{1,3}=[0-9]{1,3}){1,3}$"}, json.dumps(found["grammar"]))


def test_several_choices_each_follow_the_schema_and_differ(client):
    answer = ask(client, n=4, response_format=schema_format(PETS), **WARM)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
    for choice in answer.choices:
        check(PETS, choice.message.content)
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_an_incomplete_answer_ends_with_length_and_is_a_prefix(client):
    whole = text_of(ask(client, response_format=schema_format(PETS)))
    cut = client.chat.completions.create(**chat_body(max_tokens=9, response_format=schema_format(PETS)))
    begun = text_of(cut, "length")
    assert begun
    assert whole.startswith(begun)
    assert cut.usage.completion_tokens == 9
    with pytest.raises(ValueError, match="EOF"):
        from_json(begun)
    from_json(begun, allow_partial="trailing-strings")


def test_the_parse_helper_of_the_client_raises_for_an_incomplete_answer(client):
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        client.chat.completions.parse(model="tiny", messages=FREE[0], max_tokens=5, response_format=Person)
    assert cut.value.completion.choices[0].finish_reason == "length"


def test_max_tokens_may_be_exactly_the_length_of_the_answer(client):
    whole = ask(client, response_format=schema_format(PETS))
    exact = chat_body(max_tokens=whole.usage.completion_tokens, response_format=schema_format(PETS))
    assert text_of(client.chat.completions.create(**exact)) == text_of(whole)


def test_logprobs_are_those_of_the_generated_tokens(client):
    choice = ask(client, response_format=schema_format(PETS), logprobs=True, top_logprobs=2).choices[0]
    assert choice.logprobs is not None
    assert "".join(token.token for token in choice.logprobs.content or []) == choice.message.content


# --- cancellation


@pytest.fixture(scope="module")
def one_slot(long_home):
    with serving(long_home, "tiny-long", slots=1) as lab:
        yield lab


@pytest.mark.parametrize("way", ["sse", "whole", "socket"])
def test_cancelling_a_constrained_answer_frees_the_slot(one_slot, way):
    before = manager_of(one_slot).snapshot.totals.output_tokens
    body = {**chat_body(model="default", response_format=schema_format(LARGE)), "max_tokens": 7500}
    with open_request(one_slot, way, body):
        until(lambda: manager_of(one_slot).snapshot.totals.output_tokens > before + 5)
    wait_until_idle(one_slot)
    assert manager_of(one_slot).snapshot.totals.output_tokens - before < 6000
    with OpenAI(base_url=f"{one_slot.url}/v1", api_key="anything", max_retries=0) as client:
        # The grammar is taken from the cache, and begins at its start.
        cut = ask(client, **{"model": "default", "response_format": schema_format(LARGE)})
        assert text_of(cut, "length").lstrip().startswith("{")
        check(PETS, text_of(ask(client, **{"model": "default", "response_format": schema_format(PETS)})))


# --- refused schemas


@pytest.fixture
def next_request_works(http):
    yield
    assert http.post(PATH, json=echo_body(max_tokens=1)).status_code == 200


def refusal(http, **changes):
    response = http.post(PATH, json=echo_body(**changes))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == "invalid-request"
    assert len(error["message"]) < 1500
    return error


def in_arrays(levels, schema):
    for _ in range(levels):
        schema = {"type": "array", "minItems": 1, "items": schema}
    return schema


def references(count):
    """Return a schema in which each definition refers to the next one: the value is deep, but the schema is flat."""
    steps = {f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(count)}
    return {"$defs": {**steps, f"d{count}": DIGIT}, "$ref": "#/$defs/d0"}


@pytest.mark.usefixtures("next_request_works")
@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$ref": "file:///etc/passwd"}, "file:///etc/passwd"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"not": {}}, "not"),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"type": "string", "pattern": "("}, "("),
        ({"type": "colour"}, "colour"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum"),
        (False, "false"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(http, schema, expected):
    error = refusal(http, response_format=schema_format(schema))
    assert error["param"] == "response_format"
    assert expected in error["message"]


@pytest.mark.usefixtures("next_request_works")
@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_an_invalid_pattern_is_refused_with_the_reason(http, kind):
    error = refusal(http, response_format={"type": kind, kind: "start: ("})
    assert error["param"] == "response_format"
    assert "cannot be enforced" in error["message"]


@pytest.mark.usefixtures("next_request_works")
@pytest.mark.parametrize("where", ["format", "tool", "grammar"])
def test_nothing_is_fetched_for_a_remote_reference(http, where):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        remote = {"$ref": f"http://127.0.0.1:{listening.getsockname()[1]}/schema.json"}
        tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"a": remote}}}}
        match where:
            case "format":
                error = refusal(http, response_format=schema_format(closed(a=remote)))
            case "tool":
                error = refusal(http, tools=[tool], tool_choice="required")
            case _:
                lark = f"start: %json {json.dumps(remote)}"
                error = refusal(http, response_format={"type": "grammar", "grammar": lark})
        assert remote["$ref"] in error["message"]
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.usefixtures("next_request_works")
def test_a_schema_of_the_largest_depth_is_enforced(http):
    body = echo_body(max_tokens=100, response_format=schema_format(in_arrays(60, {"const": 5, "type": "integer"})))
    (choice,) = http.post(PATH, json=body).json()["choices"]
    from_json(choice["message"]["content"], allow_partial=True)
    assert choice["message"]["content"].startswith("[")


@pytest.mark.usefixtures("next_request_works")
@pytest.mark.parametrize("levels", [62, 500])
def test_a_deeper_schema_is_refused(http, levels):
    message = refusal(http, response_format=schema_format(in_arrays(levels, {"type": "null"})))["message"]
    assert "64 levels" in message or "recursion limit" in message


@pytest.mark.usefixtures("next_request_works")
def test_a_schema_of_1_mb_is_refused_with_both_numbers(http):
    message = refusal(http, response_format=schema_format({"description": "x" * 1_000_000}))["message"]
    assert "1,000,018" in message
    assert "262,144" in message


@pytest.mark.usefixtures("next_request_works")
def test_500_nested_references_are_accepted(http):
    response = http.post(PATH, json=echo_body(response_format=schema_format(references(500))))
    assert response.status_code in {200, 400}, response.text


class Alone(BaseModel):
    """A class with a keyword that cannot be enforced."""

    values: set[int]


@pytest.mark.slow
def test_a_class_that_cannot_be_enforced_raises_the_clients_error(lab):
    with (
        OpenAI(**lab.openai, max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as refused,
    ):
        client.chat.completions.parse(model="echo", messages=FREE[0], response_format=Alone)
    assert refused.value.param == "response_format"
    assert "uniqueItems" in str(refused.value)

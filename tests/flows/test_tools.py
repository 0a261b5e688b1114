"""Tests of tools with openai-python: forced calls, loops, streams and refused requests."""

import json
from typing import Annotated, Literal

import openai
import pytest
from jsonschema import Draft202012Validator
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.flows.schemas import DIGIT, SHORT, closed
from tests.support.asking import HELLO, echo_body
from tests.support.labs import serving

PATH = "/v1/chat/completions"
TEMPERATURE = [{"role": "user", "content": "What is the temperature in Paris, in celsius?"}]
WEATHER = closed(city={"type": "string", "maxLength": 20}, unit={"enum": ["celsius", "fahrenheit"]})
ADD = closed(a={**DIGIT, "maximum": 99}, b={**DIGIT, "maximum": 99})
NOTE = {"type": "object", "properties": {"text": SHORT, "tags": {"type": "array", "items": SHORT, "maxItems": 2}}}


def function(name, parameters=None, **fields):
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **fields}}


SCHEMAS = {"get_weather": WEATHER, "add": ADD, "write-note": {**NOTE, "additionalProperties": False}}
TOOLS = [function(name, schema, description=f"Call it to {name}.") for name, schema in SCHEMAS.items()]
FORCED = ["required", *(function(name) for name in SCHEMAS)]


def weather(city, unit):
    """Return the result of the tool ``get_weather``."""
    return json.dumps({"city": city, "temperature": 21, "unit": unit})


@pytest.fixture(scope="module")
def real(starter_home):
    """Return a client of the real SmolLM2."""
    with (
        serving(starter_home, "smollm2-135m") as lab,
        OpenAI(base_url=f"{lab.url}/v1", api_key="anything", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def tiny(tiny_lab):
    with OpenAI(**tiny_lab.openai, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def echo(lab):
    with OpenAI(**lab.openai, max_retries=0) as client:
        yield client


def ask(client, **changes):
    fields = {"model": "default", "messages": TEMPERATURE, "temperature": 0, "max_tokens": 150}
    return client.chat.completions.create(**{**fields, **changes})


def only_call(answer):
    (call,) = answer.choices[0].message.tool_calls or []
    return call


def check_call(call):
    """Check that the arguments of a call satisfy the schema of its tool, and return them."""
    assert call.type == "function"
    assert call.id
    arguments = json.loads(call.function.arguments)
    Draft202012Validator(SCHEMAS[call.function.name]).validate(arguments)
    return arguments


# --- forced calls of the real model


@pytest.mark.long
@pytest.mark.parametrize("choice", FORCED, ids=["required", *SCHEMAS])
def test_a_forced_call_of_the_real_model_fits_its_tool(real, choice):
    answer = ask(real, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    call = only_call(answer)
    check_call(call)
    if choice != "required":
        assert call.function.name == choice["function"]["name"]


@pytest.mark.long
def test_the_real_model_calls_the_tool_with_the_value_of_the_question(real):
    answer = ask(real, tools=TOOLS[:1], tool_choice=function("get_weather"))
    call = only_call(answer)
    assert check_call(call) == {"city": "Paris", "unit": "celsius"}


@pytest.mark.parametrize("choice", ["required", function("add")], ids=["required", "named"])
def test_a_stream_has_the_name_first_and_then_the_arguments(echo, choice):
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    whole = only_call(ask(echo, **fields))
    body = {"model": "default", "messages": TEMPERATURE, "temperature": 0, "max_tokens": 150, **fields}
    chunks = [chunk.choices[0] for chunk in echo.chat.completions.create(**body, stream=True)]
    assert [chunk.delta.content for chunk in chunks if chunk.delta.content] == []
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    first, *rest = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert first.id
    assert (first.index, first.type) == (0, "function")
    assert (first.function.name, first.function.arguments) == (whole.function.name, "")
    assert len(rest) > 1
    assert all((call.index, call.id, call.type, call.function.name) == (0, None, None, None) for call in rest)
    assert "".join(call.function.arguments for call in rest) == whole.function.arguments
    check_call(whole)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Annotated[str, Field(max_length=20)]
    unit: Literal["celsius", "fahrenheit"]


def test_the_helper_of_the_client_parses_the_arguments(echo):
    tools = [openai.pydantic_function_tool(GetWeather)]
    parsed = echo.chat.completions.parse(
        model="default", messages=TEMPERATURE, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    for call in parsed.choices[0].message.tool_calls or []:
        assert isinstance(call.function.parsed_arguments, GetWeather)
    assert parsed.choices[0].message.tool_calls


# --- loops


def answered(messages, answer):
    """Return the history with the answer, as openai-python dumps it, and with the results of its calls."""
    message = answer.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": weather(**check_call(call))}
        for call in message.tool_calls or []
    ]
    return [*messages, message.model_dump(), *results]


@pytest.mark.long
@pytest.mark.parametrize("last", ["none", "auto"])
def test_a_loop_with_a_forced_call_ends_in_an_answer_from_the_result(real, last):
    tools = TOOLS[:1]
    called = ask(real, tools=tools, tool_choice="required", parallel_tool_calls=False)
    history = answered(TEMPERATURE, called)
    assert [message["role"] for message in history] == ["user", "assistant", "tool"]
    final = ask(real, messages=history, tools=tools, tool_choice=last)
    assert final.choices[0].finish_reason == "stop"
    assert "21" in (final.choices[0].message.content or "")
    assert final.choices[0].message.tool_calls is None


@pytest.mark.long
def test_a_loop_with_a_free_choice_calls_and_then_answers(real):
    """A small model seldom calls a tool by itself, so eight answers are requested until one has a call."""
    arguments = {"city": "Rome", "unit": "celsius"}
    call = json.dumps({"name": "get_weather", "arguments": arguments})
    messages = [{"role": "user", "content": f"Answer with <tool_call>\n{call}\n</tool_call>"}]
    fields = {"tools": TOOLS[:1], "parallel_tool_calls": False, "max_tokens": 45}
    called = None
    for seed in range(2, 8):
        answer = ask(real, messages=messages, **fields, temperature=0.7, n=8, seed=seed)
        for choice in answer.choices:
            assert choice.finish_reason != "tool_calls" or choice.message.tool_calls
            assert choice.finish_reason != "stop" or not choice.message.tool_calls
        called = next((choice for choice in answer.choices if choice.finish_reason == "tool_calls"), None)
        if called is not None:
            break
    assert called is not None
    history = answered(messages, answer.model_copy(update={"choices": [called]}))
    assert json.loads(history[-1]["content"])["city"]
    final = ask(real, messages=history, tools=TOOLS[:1], tool_choice="auto").choices[0]
    assert final.finish_reason in {"stop", "length"}
    assert final.message.content


# --- the tiny model


@pytest.mark.long
def test_parallel_calls_can_be_disabled(tiny):
    fields = {"tools": [function("add", closed(a=DIGIT))], "tool_choice": "required", "max_tokens": 300}
    counts = []
    for seed in range(4):
        warm = {"temperature": 1, "seed": seed, "messages": HELLO}
        (one,) = ask(tiny, **fields, **warm, parallel_tool_calls=False).choices
        assert one.finish_reason == "tool_calls"
        assert len(one.message.tool_calls or []) == 1
        (several,) = ask(tiny, **fields, **warm).choices
        calls = several.message.tool_calls or []
        assert len({call.id for call in calls}) == len(calls)
        counts.append(len(calls))
    assert max(counts) > 1


@pytest.mark.slow
def test_any_of_128_tools_can_be_called(echo):
    tools = [function(f"tool_{at}", closed(**{f"a{at}": DIGIT})) for at in range(128)]
    for choice, name in ((function("tool_127"), "tool_127"), ("required", None)):
        answer = ask(echo, messages=HELLO, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        assert answer.choices[0].finish_reason == "tool_calls"
        found = only_call(answer).function
        assert name in {None, found.name}
        Draft202012Validator(closed(**{f"a{found.name[5:]}": DIGIT})).validate(json.loads(found.arguments))


def test_an_incomplete_call_ends_with_length(echo):
    fields = {"messages": HELLO, "tools": [function("add", ADD)], "tool_choice": "required"}
    (choice,) = ask(echo, **fields, max_tokens=18).choices
    assert choice.finish_reason == "length"
    assert not choice.message.content


# --- refused requests


@pytest.fixture
def next_request_works(http):
    yield
    fields = {"tools": [function("look")], "tool_choice": "required", "max_tokens": 60}
    assert http.post(PATH, json=echo_body(**fields)).status_code == 200


def calling(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]


CALLED = calling("{}")
RESULT = {"role": "tool", "content": "seen", "tool_call_id": "c1"}


@pytest.mark.usefixtures("next_request_works")
@pytest.mark.parametrize(
    ("changes", "param", "expected"),
    [
        ({"tools": [function("look up")]}, "tools.0.function.name", "look up"),
        ({"tools": [function("a"), function("b"), function("a")]}, "tools", "'a'"),
        ({"tools": [function("look", {"type": "array"})]}, "tools.0.function.parameters", "array"),
        ({"tools": [function("look", {"description": "x" * 1_000_000})]}, "tools", "262,144"),
        ({"messages": calling("[1]")}, "messages.1.tool_calls.0.function.arguments", "a list"),
        ({"messages": calling('{"a": 1')}, "messages.1.tool_calls.0.function.arguments", "JSON"),
        ({"messages": [*CALLED, RESULT, RESULT]}, "messages.3.tool_call_id", "answered"),
        ({"messages": [*CALLED, {**RESULT, "tool_call_id": "c2"}]}, "messages.2.tool_call_id", "'c2'"),
        ({"messages": [*CALLED, {"role": "tool", "content": "seen"}]}, "messages.2.tool_call_id", "missing"),
    ],
)
def test_the_error_of_an_invalid_tool_or_history_names_the_field(http, changes, param, expected):
    response = http.post(PATH, json=echo_body(**changes))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid-request", param)
    assert expected in error["message"]
    assert param.partition(".")[0] in error["message"]


@pytest.mark.slow
@pytest.mark.usefixtures("next_request_works")
@pytest.mark.parametrize("choice", ["required", function("second")], ids=["required", "named"])
def test_parameters_that_cannot_be_enforced_are_refused_with_their_tool(http, choice):
    tools = [function("first", ADD), function("second", closed(a={"type": "array", "uniqueItems": True}))]
    error = http.post(PATH, json=echo_body(tools=tools, tool_choice=choice)).json()["error"]
    assert (error["code"], error["param"]) == ("invalid-request", "tools.1.function.parameters")
    assert "uniqueItems" in error["message"]
    assert "'second'" in error["message"]
    other = http.post(PATH, json=echo_body(tools=tools, tool_choice=function("first"), max_tokens=60))
    assert other.status_code == 200

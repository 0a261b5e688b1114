"""Tests with openai-python: texts and tool calls of the real SmolLM2, parsed arguments, and exceptions."""

import json
from typing import Annotated, Literal

import openai
import pytest
from jsonschema import Draft202012Validator
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.support.asking import HELLO
from tests.support.generated_schemas import DIGIT, closed
from tests.support.labs import serving

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def echo(lab):
    """Return a client of the echo engine, for tests that work with any engine."""
    with OpenAI(**lab.openai, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def real(starter_home):
    with serving(starter_home, None) as lab, OpenAI(**lab.openai, max_retries=0) as client:
        # Other tests may have stored the GGUF file, which answers in other words.
        lab.load(MODEL, engine="mlx")
        yield client


def test_the_real_model_knows_paris_and_a_stream_has_the_same_text(real):
    fields = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 30}
    whole = real.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    text = choice.message.content
    assert text.startswith("The capital of France is Paris")
    assert choice.finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == 37
    assert "".join(token.token for token in choice.logprobs.content) == text
    for token in choice.logprobs.content:
        assert bytes(token.bytes).decode() == token.token
        assert token.top_logprobs[0].logprob == token.logprob
        assert len(token.top_logprobs) == 2
    *chunks, last = real.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == text
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_a_request_with_functions_is_answered_in_their_form(echo):
    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    zone = {"type": "object", "properties": {"zone": {"type": "string"}}}
    fields = {"model": "echo", "messages": [{"role": "user", "content": call}]}
    fields |= {"functions": [{"name": "clock", "parameters": zone}]}
    (choice,) = echo.chat.completions.create(**fields).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("clock", '{"zone": "UTC"}')
    choices = [chunk.choices[0] for chunk in echo.chat.completions.create(**fields, stream=True)]
    pieces = [choice.delta.function_call for choice in choices if choice.delta.function_call]
    assert (pieces[0].name, "".join(piece.arguments for piece in pieces)) == ("clock", '{"zone": "UTC"}')
    assert choices[-1].finish_reason == "function_call"
    history = [choice.message, {"role": "function", "name": "clock", "content": "noon"}]
    (second,) = echo.chat.completions.create(**fields | {"messages": fields["messages"] + history}).choices
    assert (second.finish_reason, second.message.content) == ("stop", "noon")


def test_an_echo_scores_likely_texts_higher(real):
    scores = []
    for end in (" Paris", " banana"):
        prompt = "The capital of France is" + end
        answer = real.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
        logprobs = answer.choices[0].logprobs
        assert logprobs.tokens is not None
        assert "".join(logprobs.tokens) == prompt
        assert logprobs.token_logprobs[0] is None
        scores.append(logprobs.token_logprobs[-1])
    assert scores[0] > scores[1]


def test_models_are_listed(echo):
    assert "echo" in [model.id for model in echo.models.list()]
    assert echo.models.retrieve("echo").owned_by == "lmx-lab"


def test_errors_are_exceptions_of_the_client(echo):
    with pytest.raises(openai.BadRequestError) as wrong:
        echo.chat.completions.create(model="echo", messages=FRANCE, temperature=2.1)
    assert (wrong.value.code, wrong.value.param) == ("invalid-request", "temperature")
    assert wrong.value.request_id
    with pytest.raises(openai.NotFoundError) as unknown:
        echo.chat.completions.create(model="unheard-of", messages=FRANCE)
    assert unknown.value.code == "model-not-found"


def test_the_error_without_a_model_is_not_retried(echo_home):
    with (
        serving(echo_home, None) as lab,
        OpenAI(**lab.openai, max_retries=2) as client,
        pytest.raises(openai.InternalServerError) as refused,
    ):
        client.chat.completions.create(model="echo", messages=FRANCE)
    assert refused.value.code == "no-model-loaded"
    assert refused.value.response.headers["x-should-retry"] == "false"


# Tools

TEMPERATURE = [{"role": "user", "content": "What is the temperature in Paris, in celsius?"}]


def function(name, parameters=None, **fields):
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **fields}}


WEATHER = closed(city={"type": "string", "maxLength": 20}, unit={"enum": ["celsius", "fahrenheit"]})
TOOLS = [function("get_weather", WEATHER, description="Call it to get_weather.")]


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
    Draft202012Validator(WEATHER).validate(arguments)
    return arguments


@pytest.mark.long
def test_the_real_model_calls_the_tool_with_the_value_of_the_question(real):
    answer = ask(real, tools=TOOLS, tool_choice=function("get_weather"))
    call = only_call(answer)
    assert check_call(call) == {"city": "Paris", "unit": "celsius"}


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


@pytest.mark.long
@pytest.mark.parametrize("last", ["none", "auto"])
def test_a_loop_with_a_forced_call_ends_in_an_answer_from_the_result(real, last):
    called = ask(real, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert called.choices[0].finish_reason == "tool_calls"
    call = only_call(called)
    result = json.dumps({**check_call(call), "temperature": 21})
    history = [called.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    final = ask(real, messages=[*TEMPERATURE, *history], tools=TOOLS, tool_choice=last)
    assert final.choices[0].finish_reason == "stop"
    assert "21" in (final.choices[0].message.content or "")
    assert final.choices[0].message.tool_calls is None


@pytest.mark.slow
def test_any_of_128_tools_can_be_called(echo):
    tools = [function(f"tool_{at}", closed(**{f"a{at}": DIGIT})) for at in range(128)]
    for choice, name in ((function("tool_127"), "tool_127"), ("required", None)):
        answer = ask(echo, messages=HELLO, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        assert answer.choices[0].finish_reason == "tool_calls"
        found = only_call(answer).function
        assert name in {None, found.name}
        Draft202012Validator(closed(**{f"a{found.name[5:]}": DIGIT})).validate(json.loads(found.arguments))

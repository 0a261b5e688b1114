"""Tests of the fields of a request that limit, disable and describe reasoning, with a template that uses them."""

import json

import pytest
from openai import OpenAI

from tests.flows.schemas import DIGIT, SHORT, closed
from tests.support.asking import HELLO, chat_body
from tests.support.labs import serving

pytestmark = pytest.mark.slow
PATH = "/v1/chat/completions"
BUDGET = 5
THINKING = {"chat_template_kwargs": {"open_thoughts": True}, "thinking_token_budget": BUDGET}
FORM = closed(a=SHORT, b=DIGIT)
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": FORM}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": FORM}}]
CALL = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def lab(thinker_home):
    with serving(thinker_home, "thinker", slots=4) as lab:
        yield lab


def ask(http, **changes):
    """Return the choice and the usage."""
    response = http.post(PATH, json=chat_body(**{"model": "thinker", "max_tokens": 40, **changes}))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert "think>" not in json.dumps(choice["message"])
    return choice, response.json()["usage"]


def test_reasoning_ends_at_its_budget(http):
    choice, usage = ask(http, **THINKING, logprobs=True)
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"]
    # The marker at the end of the reasoning counts as a reasoning token, but not in the budget.
    assert usage["completion_tokens_details"] == {"reasoning_tokens": BUDGET + 1}
    assert usage["completion_tokens"] == len(choice["logprobs"]["content"]) == 40


@pytest.mark.parametrize(
    "off",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False, "open_thoughts": True}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none", "thinking_token_budget": 3},
    ],
)
@pytest.mark.parametrize("more", [{}, FORMAT, CALL], ids=["free", "format", "call"])
def test_reasoning_can_be_disabled(http, off, more):
    choice, usage = ask(http, **off, **more, max_tokens=80)
    assert "reasoning_content" not in choice["message"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert choice["message"]["content"] or choice["message"]["tool_calls"]


def test_the_reasoning_effort_is_passed_to_the_template(http):
    prompts = {effort: ask(http, reasoning_effort=effort)[1]["prompt_tokens"] for effort in (None, "low", "high")}
    assert prompts["low"] > prompts[None]
    texts = {effort: ask(http, reasoning_effort=effort)[0]["message"] for effort in ("low", "high")}
    assert texts["low"] != texts["high"]
    kwargs = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert ask(http, **kwargs, reasoning_effort="high")[0]["message"] == texts["low"]


def test_reasoning_in_the_history_is_passed_to_the_template(lab):
    fields = {"model": "thinker", "temperature": 0, "max_tokens": 60, "extra_body": THINKING}
    with OpenAI(base_url=f"{lab.url}/v1", api_key="anything", max_retries=0) as client:
        message = client.chat.completions.create(messages=HELLO, **fields, **CALL).choices[0].message
        (call,) = message.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "seen"}
        history = [*HELLO, message.model_dump(), result]
        second = client.chat.completions.create(messages=history, **fields)
        without = [{**entry, "reasoning_content": None} if entry["role"] == "assistant" else entry for entry in history]
        third = client.chat.completions.create(messages=without, **fields)
    assert second.choices[0].message.content
    # The template contains the reasoning of the history.
    assert second.usage.prompt_tokens > third.usage.prompt_tokens

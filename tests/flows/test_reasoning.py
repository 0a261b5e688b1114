"""Tests of reasoning: it is separate from the answer, counted and limited, also with formats and tool calls."""

import json

import httpx2
import pytest
from jsonschema import Draft202012Validator
from openai import OpenAI
from websockets.sync.client import connect

from tests.flows.schemas import DIGIT, SHORT, closed
from tests.support.asking import HELLO, chat_body, events
from tests.support.labs import serving

pytestmark = pytest.mark.slow
PATH = "/v1/chat/completions"
BUDGET = 5
THINKING = {"chat_template_kwargs": {"open_thoughts": True}, "thinking_token_budget": BUDGET}
FORM = closed(a=SHORT, b=DIGIT)
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": FORM}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": FORM}}]
CALL = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
MARKERS = ("<think>", "</think>")


@pytest.fixture(scope="module")
def thinking_lab(thinker_home):
    with serving(thinker_home, "thinker", slots=4) as lab:
        yield lab


@pytest.fixture
def http(thinking_lab):
    with httpx2.Client(base_url=thinking_lab.url, timeout=60) as client:
        yield client


def body(**changes):
    return chat_body(**{"model": "thinker", "max_tokens": 40, **changes})


def ask(http, **changes):
    """Return the choice and the usage."""
    response = http.post(PATH, json=body(**changes))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    shown = json.dumps(choice["message"])
    assert [marker for marker in MARKERS if marker in shown] == []
    return choice, response.json()["usage"]


def reasoning_tokens(usage):
    return usage["completion_tokens_details"]["reasoning_tokens"]


def test_reasoning_ends_at_its_budget(http):
    choice, usage = ask(http, **THINKING)
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"]
    # The marker at the end of the reasoning counts as a reasoning token, but not in the budget.
    assert reasoning_tokens(usage) == BUDGET + 1
    assert usage["completion_tokens"] == 40


def test_reasoning_with_a_smaller_budget_is_a_prefix(http):
    reasoning_by_budget = {}
    for budget in (0, 1, 8, 20):
        choice, usage = ask(http, **{**THINKING, "thinking_token_budget": budget})
        assert reasoning_tokens(usage) == budget + 1
        reasoning_by_budget[budget] = choice["message"].get("reasoning_content") or ""
    assert reasoning_by_budget[0] == ""
    assert reasoning_by_budget[20].startswith(reasoning_by_budget[8].rstrip("\ufffd"))
    assert reasoning_by_budget[8].startswith(reasoning_by_budget[1])
    assert len(reasoning_by_budget[20]) > len(reasoning_by_budget[8]) > len(reasoning_by_budget[1])


def test_without_a_budget_reasoning_may_be_the_whole_answer(http):
    choice, usage = ask(http, chat_template_kwargs={"open_thoughts": True}, max_tokens=12)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"]
    assert not choice["message"]["content"]
    assert reasoning_tokens(usage) == usage["completion_tokens"] == 12


@pytest.mark.parametrize("more", [{}, FORMAT, CALL], ids=["free", "format", "call"])
def test_a_stream_starts_with_the_same_reasoning(http, more):
    fields = {**THINKING, **more, "max_tokens": 120}
    whole, whole_usage = ask(http, **fields)
    response = http.post(PATH, json=body(**fields, stream=True, stream_options={"include_usage": True}))
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    kinds = [kind for delta in deltas for kind in ("reasoning_content", "content", "tool_calls") if delta.get(kind)]
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == whole["message"]["reasoning_content"]
    assert "".join(delta.get("content", "") for delta in deltas) == (whole["message"]["content"] or "")
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    (called,) = whole["message"].get("tool_calls") or [{"function": {"arguments": ""}}]
    assert "".join(call["arguments"] for call in calls) == called["function"]["arguments"]
    # Only the second of two equal requests takes its prompt from the cache.
    assert json.loads(usage)["usage"] == {
        **whole_usage,
        "prompt_tokens_details": json.loads(usage)["usage"]["prompt_tokens_details"],
    }


def test_the_websocket_has_the_same_reasoning_and_counts_it(thinking_lab, http):
    whole, usage = ask(http, **THINKING, **CALL, max_tokens=120)
    with connect(thinking_lab.url.replace("http", "ws") + "/v1/chat/stream") as socket:
        socket.send(json.dumps(body(**THINKING, **CALL, max_tokens=120)))
        messages = [json.loads(socket.recv(timeout=30))]
        while "done" not in messages[-1]:
            messages.append(json.loads(socket.recv(timeout=30)))
    *tokens, last = messages
    assert "".join(token.get("reasoning_content", "") for token in tokens) == whole["message"]["reasoning_content"]
    assert "".join(token["token"] for token in tokens) == ""
    first, *rest = [call for token in tokens for call in token.get("tool_calls", [])]
    (called,) = whole["message"]["tool_calls"]
    assert first["function"] == {"name": "look", "arguments": ""}
    assert "".join(call["function"]["arguments"] for call in rest) == called["function"]["arguments"]
    assert last["stats"]["reasoning_tokens"] == reasoning_tokens(usage)
    assert last["stats"]["finish_reason"] == "tool_calls"


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
    assert reasoning_tokens(usage) == 0
    assert choice["message"]["content"] or choice["message"]["tool_calls"]


def test_the_reasoning_effort_is_passed_to_the_template(http):
    prompts = {effort: ask(http, reasoning_effort=effort)[1]["prompt_tokens"] for effort in (None, "low", "high")}
    assert prompts["low"] > prompts[None]
    texts = {effort: ask(http, reasoning_effort=effort)[0]["message"] for effort in ("low", "high")}
    assert texts["low"] != texts["high"]
    kwargs = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert ask(http, **kwargs, reasoning_effort="high")[0]["message"] == texts["low"]


@pytest.mark.parametrize("seed", range(4))
def test_the_format_is_enforced_after_the_reasoning(http, seed):
    choice, usage = ask(http, **THINKING, **FORMAT, temperature=1, seed=seed, max_tokens=120)
    assert choice["finish_reason"] == "stop"
    Draft202012Validator(FORM).validate(json.loads(choice["message"]["content"]))
    assert choice["message"]["reasoning_content"]
    assert 0 < reasoning_tokens(usage) <= BUDGET + 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_follows_the_reasoning(http, choice):
    found, usage = ask(http, **THINKING, **{**CALL, "tool_choice": choice}, temperature=1, seed=3, max_tokens=120)
    assert found["finish_reason"] == "tool_calls"
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    Draft202012Validator(FORM).validate(json.loads(call["function"]["arguments"]))
    assert found["message"]["content"] is None
    assert found["message"]["reasoning_content"]
    assert reasoning_tokens(usage) == BUDGET + 1


def test_reasoning_in_the_history_is_passed_to_the_template(thinking_lab):
    fields = {"model": "thinker", "temperature": 0, "max_tokens": 60, "extra_body": THINKING}
    with OpenAI(base_url=f"{thinking_lab.url}/v1", api_key="anything", max_retries=0) as client:
        hello = [*HELLO]
        first = client.chat.completions.create(messages=hello, **fields, **CALL)
        message = first.choices[0].message
        (call,) = message.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "seen"}
        history = [*hello, message.model_dump(), result]
        second = client.chat.completions.create(messages=history, **fields)
        without = [{**entry, "reasoning_content": None} if entry["role"] == "assistant" else entry for entry in history]
        third = client.chat.completions.create(messages=without, **fields)
    assert second.choices[0].message.content
    # The template contains the reasoning of the history.
    assert second.usage.prompt_tokens > third.usage.prompt_tokens


def test_reasoning_and_content_have_logprobs(http):
    choice, usage = ask(http, **THINKING, logprobs=True)
    assert len(choice["logprobs"]["content"]) == usage["completion_tokens"]

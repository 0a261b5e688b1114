"""Each request is converted to the right route of llama.cpp and the right body."""

import json
from dataclasses import replace

import pytest

from lmx_lab.engine import AnswerFormat, ChatPrompt, GenerationRequest, Sampling, TextPrompt, TokenPrompt, Tool, ToolUse
from lmx_lab.engine.llama_cpp.request import SEEDS, chat_body, chat_input, completion_body, route_of, sampling
from lmx_lab.engine.llama_cpp.tokenizer import detect_chat_format
from lmx_lab.engine.text.chat_format_detection import ChatFormat
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.steering import SteeringVector
from tests.support.gguf import THINKS_FIRST_TEMPLATE

COMPLETION, CHAT = "/completion", "/v1/chat/completions"
OPTIONAL = ToolUse(tools=(Tool(name="add", parameters={"type": "object"}, description="Adds."),))
FORCED = replace(OPTIONAL, forced=True)
FORM = AnswerFormat(kind="regex", text="a+")
PLAIN, NATIVE = ChatFormat(), ChatFormat(supports_tools=True)
HARMONY = detect_chat_format("<|channel|> <|message|> <|call|>", {"supports_tools": True}, {})


def chat_request(tools=None, **changes):
    prompt = ChatPrompt(messages=({"role": "user", "content": "1+1?"},), tools=tools)
    return replace(GenerationRequest(prompt=prompt), **changes)


@pytest.mark.parametrize(
    ("request_", "chat_format", "route"),
    [
        (GenerationRequest(prompt=TextPrompt(text="a")), NATIVE, COMPLETION),
        (GenerationRequest(prompt=TokenPrompt(tokens=(1,))), HARMONY, COMPLETION),
        (chat_request(), PLAIN, COMPLETION),
        (chat_request(), NATIVE, COMPLETION),
        (chat_request(OPTIONAL), PLAIN, COMPLETION),
        (chat_request(OPTIONAL), NATIVE, CHAT),
        (chat_request(FORCED), NATIVE, COMPLETION),
        (chat_request(OPTIONAL, answer_format=FORM), NATIVE, COMPLETION),
        (chat_request(answer_format=FORM), NATIVE, COMPLETION),
        (chat_request(), HARMONY, CHAT),
        (chat_request(OPTIONAL), HARMONY, CHAT),
        (chat_request(top_logprobs=2), HARMONY, CHAT),
        (chat_request(OPTIONAL, top_logprobs=2), PLAIN, COMPLETION),
        (chat_request(FORCED, top_logprobs=2), NATIVE, COMPLETION),
    ],
)
def test_the_chat_route_is_for_headers_and_calls_in_the_models_own_format(request_, chat_format, route):
    assert route_of(request_, chat_format) == route


@pytest.mark.parametrize(
    ("request_", "chat_format", "param"),
    [
        (chat_request(thinking_budget=0), PLAIN, "thinking_budget"),
        (chat_request(steer=(SteeringVector(layer=0, vector="AAAAAA=="),)), PLAIN, "steer"),
        (chat_request(OPTIONAL, top_logprobs=0), NATIVE, "logprobs"),
        (chat_request(top_logprobs=0, logprob_tokens=(1,)), HARMONY, "logprob_tokens"),
    ],
)
def test_unsupported_requests_are_refused(request_, chat_format, param):
    with pytest.raises(InvalidRequestError) as refused:
        route_of(request_, chat_format)
    assert refused.value.param == param


# Sampling


def test_all_sampling_parameters_are_sent():
    body_ = sampling(GenerationRequest(prompt=TextPrompt(text="a")), choice=0, context_length=512)
    assert body_ == {
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repeat_last_n": 512, "seed": -1, "logit_bias": [], "ignore_eos": False,
        "samplers": ["penalties", "top_p", "min_p", "top_k", "temperature"],
    }  # fmt: skip


def seed(value, choice=0):
    request_ = GenerationRequest(prompt=TextPrompt(text="a"), sampling=Sampling(seed=value))
    return int(sampling(request_, choice=choice, context_length=512)["seed"])


@pytest.mark.parametrize("value", [0, 1, 2**32 - 2])
def test_a_valid_seed_is_sent_unchanged(value):
    assert seed(value) == value


@pytest.mark.parametrize("value", [-1, -5, 2**32 - 1, 2**32, 2**70])
def test_other_seeds_are_mapped_to_valid_ones(value):
    assert 0 <= seed(value) < SEEDS
    assert seed(value) == seed(value)
    assert seed(value) != seed(value + 1)


def test_answers_to_one_request_have_seeds_of_their_own():
    assert len({seed(7, choice) for choice in range(16)}) == 16
    assert [seed(7, choice) for choice in range(4)] == [seed(7, choice) for choice in range(4)]
    assert {seed(None, choice) for choice in range(4)} == {-1}


# Bodies


def body(request_, **changes):
    options = {"choice": 0, "max_tokens": 9, "context_length": 512, "grammar": None, "markers": []}
    options |= {"vocabulary_size": 1000, "may_end": True}
    return completion_body(request_, [1, 2], **{**options, **changes})


def test_a_completion_has_tokens_and_reports_progress():
    body_ = body(chat_request(), markers=["<think>"])
    assert (body_["prompt"], body_["n_predict"], body_["stream"], body_["return_progress"]) == ([1, 2], 9, True, True)
    assert body_["preserved_tokens"] == ["<think>"]
    assert {"n_probs", "grammar", "stop"} & set(body_) == set()


@pytest.mark.parametrize(("top", "sent"), [(0, 1), (1, 1), (20, 20)])
def test_at_least_one_alternative_is_requested_with_logprobs(top, sent):
    assert body(chat_request(top_logprobs=top))["n_probs"] == sent
    # A named token may have any rank.
    assert body(chat_request(top_logprobs=top, logprob_tokens=(7,)))["n_probs"] == 1000
    options = chat_body(chat_request(top_logprobs=top), {"messages": []}, choice=0, max_tokens=9, context_length=512)
    assert (options["logprobs"], options["top_logprobs"]) == (True, sent)


def test_a_grammar_is_sent():
    assert body(chat_request(), grammar="start: x")["grammar"] == "start: x"


def test_the_chat_route_counts_tokens_and_separates_reasoning():
    body_ = chat_body(chat_request(OPTIONAL), {"messages": [], "tools": []}, choice=0, max_tokens=9, context_length=512)
    assert (body_["max_tokens"], body_["timings_per_token"], body_["reasoning_format"]) == (9, True, "deepseek")
    assert (body_["messages"], body_["tools"]) == ([], [])
    assert body_["repeat_last_n"] == 512


# Messages

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ANSWERED = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]})


def test_arguments_of_calls_are_sent_as_json_strings():
    prompt = ChatPrompt(messages=ANSWERED, tools=OPTIONAL)
    body_ = chat_input(GenerationRequest(prompt=prompt), prompt, NATIVE, CHAT)
    assert body_["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert CALL["function"] == {"name": "add", "arguments": {"a": 1}}
    assert [tool["function"]["name"] for tool in body_["tools"]] == ["add"]
    assert body_["parallel_tool_calls"] is True


def test_tools_are_written_into_messages_for_a_template_without_tools():
    prompt = ChatPrompt(messages=ANSWERED, tools=OPTIONAL)
    body_ = chat_input(GenerationRequest(prompt=prompt), prompt, PLAIN, COMPLETION)
    assert body_.keys() == {"messages"}
    assert "Adds." in json.dumps(body_)
    assert "tool_calls" not in json.dumps(body_)


def test_template_options_of_the_request_take_precedence():
    thinks = detect_chat_format(THINKS_FIRST_TEMPLATE, {}, {})
    prompt = ChatPrompt(messages=ANSWERED[:1], template_options={"enable_thinking": False, "x": 1})
    body_ = chat_input(GenerationRequest(prompt=prompt), prompt, thinks, COMPLETION)
    assert body_["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}
    prompt = replace(prompt, template_options={})
    body_ = chat_input(GenerationRequest(prompt=prompt), prompt, thinks, COMPLETION)
    assert body_["chat_template_kwargs"] == {"enable_thinking": True}
    assert "chat_template_kwargs" not in chat_input(GenerationRequest(prompt=prompt), prompt, PLAIN, COMPLETION)

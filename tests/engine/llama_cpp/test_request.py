"""Which way a request goes, and what llama.cpp is asked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lmx_lab.engine import AnswerFormat, ChatPrompt, GenerationRequest, Sampling, TextPrompt, TokenPrompt, Tool, ToolUse
from lmx_lab.engine.llama_cpp.chat_format import ALL_MARKERS, detect_chat_format
from lmx_lab.engine.llama_cpp.request import SEEDS, chat_body, chat_input, completion_body, route_of, sampling
from lmx_lab.engine.text.chat_format_detection import ChatFormat
from lmx_lab.errors import InvalidRequestError
from tests.gguf_templates import NO_SYSTEM, THINKS_FIRST, TOOLS

COMPLETION, CHAT = "/completion", "/v1/chat/completions"
TOOL = Tool(name="add", parameters={"type": "object"}, description="Adds.")
OPTIONAL = ToolUse(tools=(TOOL,))
FORCED = replace(OPTIONAL, forced=True)
FORM = AnswerFormat(kind="regex", text="a+")
PLAIN, NATIVE = ChatFormat(), ChatFormat(supports_tools=True)
HARMONY = detect_chat_format("<|channel|> <|message|> <|call|>", {"supports_tools": True}, {})


def asked(tools: ToolUse | None = None, **changes: Any) -> GenerationRequest:
    prompt = ChatPrompt(messages=({"role": "user", "content": "1+1?"},), tools=tools)
    return replace(GenerationRequest(prompt=prompt), **changes)


@pytest.mark.parametrize(
    ("request_", "chat_format", "route"),
    [
        (GenerationRequest(prompt=TextPrompt(text="a")), NATIVE, COMPLETION),
        (GenerationRequest(prompt=TokenPrompt(tokens=(1,))), HARMONY, COMPLETION),
        (asked(), PLAIN, COMPLETION),
        (asked(), NATIVE, COMPLETION),
        (asked(OPTIONAL), PLAIN, COMPLETION),
        (asked(OPTIONAL), NATIVE, CHAT),
        (asked(FORCED), NATIVE, COMPLETION),
        (asked(OPTIONAL, answer_format=FORM), NATIVE, COMPLETION),
        (asked(answer_format=FORM), NATIVE, COMPLETION),
        (asked(), HARMONY, CHAT),
        (asked(OPTIONAL), HARMONY, CHAT),
        (asked(top_logprobs=2), HARMONY, CHAT),
        (asked(OPTIONAL, top_logprobs=2), PLAIN, COMPLETION),
        (asked(FORCED, top_logprobs=2), NATIVE, COMPLETION),
    ],
)
def test_only_calls_in_a_models_own_format_and_headers_go_through_the_chat_route(
    request_: GenerationRequest, chat_format: ChatFormat, route: str
) -> None:
    assert route_of(request_, chat_format) == route


@pytest.mark.parametrize(
    ("request_", "chat_format", "param"),
    [
        (asked(score_prompt=True), PLAIN, "logprobs"),
        (asked(thinking_budget=0), PLAIN, "thinking_budget"),
        (asked(OPTIONAL, top_logprobs=0), NATIVE, "logprobs"),
    ],
)
def test_what_llama_cpp_does_not_do_is_refused(
    request_: GenerationRequest, chat_format: ChatFormat, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        route_of(request_, chat_format)
    assert refused.value.param == param


# Sampling


def test_every_parameter_is_sent_whatever_it_is() -> None:
    found = sampling(GenerationRequest(prompt=TextPrompt(text="a")), choice=0, context_length=512)
    assert found == {
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repeat_last_n": 512, "seed": -1, "logit_bias": [], "ignore_eos": False,
        "samplers": ["penalties", "top_p", "min_p", "top_k", "temperature"],
    }  # fmt: skip


def seed(value: int | None, choice: int = 0) -> int:
    request_ = GenerationRequest(prompt=TextPrompt(text="a"), sampling=Sampling(seed=value))
    return int(sampling(request_, choice=choice, context_length=512)["seed"])


@pytest.mark.parametrize("value", [0, 1, 2**32 - 2])
def test_a_seed_that_llama_cpp_can_take_is_taken_as_it_is(value: int) -> None:
    assert seed(value) == value


@pytest.mark.parametrize("value", [-1, -5, 2**32 - 1, 2**32, 2**70])
def test_any_other_seed_becomes_one_that_means_no_other(value: int) -> None:
    assert 0 <= seed(value) < SEEDS
    assert seed(value) == seed(value)
    assert seed(value) != seed(value + 1)


def test_answers_to_one_request_have_seeds_of_their_own() -> None:
    assert len({seed(7, choice) for choice in range(16)}) == 16
    assert [seed(7, choice) for choice in range(4)] == [seed(7, choice) for choice in range(4)]
    assert {seed(None, choice) for choice in range(4)} == {-1}


# Bodies


def body(request_: GenerationRequest, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"choice": 0, "max_tokens": 9, "context_length": 512, "grammar": None, "markers": []}
    return completion_body(request_, [1, 2], **{**given, **changes})


def test_a_completion_is_of_tokens_and_can_be_given_up_in_its_prompt() -> None:
    found = body(asked(), markers=["<think>"])
    assert (found["prompt"], found["n_predict"], found["stream"], found["return_progress"]) == ([1, 2], 9, True, True)
    assert found["preserved_tokens"] == ["<think>"]
    assert {"n_probs", "grammar", "stop"} & set(found) == set()


@pytest.mark.parametrize(("top", "sent"), [(0, 1), (1, 1), (20, 20)])
def test_logprobs_are_asked_for_where_none_beside_the_token_are(top: int, sent: int) -> None:
    assert body(asked(top_logprobs=top))["n_probs"] == sent
    given = chat_body(asked(top_logprobs=top), {"messages": []}, choice=0, max_tokens=9, context_length=512)
    assert (given["logprobs"], given["top_logprobs"]) == (True, sent)


def test_a_grammar_goes_along() -> None:
    assert body(asked(), grammar="start: x")["grammar"] == "start: x"


def test_the_chat_route_counts_tokens_and_divides_thoughts() -> None:
    found = chat_body(asked(OPTIONAL), {"messages": [], "tools": []}, choice=0, max_tokens=9, context_length=512)
    assert (found["max_tokens"], found["timings_per_token"], found["reasoning_format"]) == (9, True, "deepseek")
    assert (found["messages"], found["tools"]) == ([], [])
    assert found["repeat_last_n"] == 512


# Messages

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ANSWERED = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]})


def test_arguments_of_calls_are_texts_there() -> None:
    prompt = ChatPrompt(messages=ANSWERED, tools=OPTIONAL)
    found = chat_input(GenerationRequest(prompt=prompt), prompt, NATIVE, CHAT)
    assert found["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert CALL["function"] == {"name": "add", "arguments": {"a": 1}}
    assert [tool["function"]["name"] for tool in found["tools"]] == ["add"]
    assert found["parallel_tool_calls"] is True


def test_a_template_without_tools_gets_them_written_out() -> None:
    prompt = ChatPrompt(messages=ANSWERED, tools=OPTIONAL)
    found = chat_input(GenerationRequest(prompt=prompt), prompt, PLAIN, COMPLETION)
    assert found.keys() == {"messages"}
    assert "Adds." in json.dumps(found)
    assert "tool_calls" not in json.dumps(found)


def test_variables_of_the_template_win_over_what_we_think() -> None:
    thinks = detect_chat_format(THINKS_FIRST, {}, {})
    prompt = ChatPrompt(messages=ANSWERED[:1], template_options={"enable_thinking": False, "x": 1})
    found = chat_input(GenerationRequest(prompt=prompt), prompt, thinks, COMPLETION)
    assert found["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}
    prompt = replace(prompt, template_options={})
    found = chat_input(GenerationRequest(prompt=prompt), prompt, thinks, COMPLETION)
    assert found["chat_template_kwargs"] == {"enable_thinking": True}
    assert "chat_template_kwargs" not in chat_input(GenerationRequest(prompt=prompt), prompt, PLAIN, COMPLETION)


# Dialects


def test_a_template_says_how_thoughts_are_written() -> None:
    found = detect_chat_format(THINKS_FIRST, {"supports_tools": False}, {"<think>": (3,), "</think>": (4,)})
    assert (found.reasoning_markers, found.supports_tools, found.has_headers) == (("<think>", "</think>"), False, False)
    assert (found.markers["<think>"], found.markers["</think>"]) == ((3,), (4,))
    assert found.reasoning_state("assistant\n<think>\n") == "open"
    # One marker that is no token is looked for as text.
    assert found.markers["<tool_call>"] == ("<tool_call>",)


@pytest.mark.parametrize(("template", "thoughts"), [("", None), (TOOLS, ("<think>", "</think>")), (NO_SYSTEM, None)])
def test_templates_without_thoughts_have_none(template: str, thoughts: tuple[str, str] | None) -> None:
    assert detect_chat_format(template, {}, {}).reasoning_markers == thoughts


def test_what_llama_cpp_says_of_a_template_is_believed() -> None:
    assert detect_chat_format(TOOLS, {"supports_tools": True}, {}).supports_tools
    assert not detect_chat_format(TOOLS, {}, {}).supports_tools
    assert not detect_chat_format(NO_SYSTEM, {"supports_system_role": False}, {}).supports_system
    assert detect_chat_format(NO_SYSTEM, {}, {}).supports_system


def test_headers_are_known_by_their_tokens() -> None:
    assert HARMONY.has_headers
    assert HARMONY.reasoning_markers is None
    assert not detect_chat_format("<|message|> alone", {}, {}).has_headers


def test_all_markers_are_looked_up_once() -> None:
    assert len(set(ALL_MARKERS)) == len(ALL_MARKERS)
    assert {"<think>", "</think>", "<tool_call>", "</tool_call>"} <= set(ALL_MARKERS)

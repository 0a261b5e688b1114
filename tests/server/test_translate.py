"""Tests of the conversion of every request parameter and answer format for the engine, and of reports for the wire."""

import json
import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

from lmx_lab.engine import ChatPrompt, InfillPrompt, Sampling, TextPrompt, TokenPrompt
from lmx_lab.http.errors import validation_error
from lmx_lab.server.translate import (
    chat_logprobs,
    completion_requests,
    generation_request,
    socket_stats,
    timings,
    usage,
)
from lmx_lab.values.outputs import TokenLogprob
from lmx_lab.wire.completions import CompletionRequest
from tests.support.asking import chat, report


def completion(**changes):
    return CompletionRequest.model_validate({"model": "tiny", "prompt": "hello", **changes})


def error_of(make, **changes):
    with pytest.raises(ValidationError) as wrong:
        make(**changes)
    return validation_error(wrong.value)


def refusal(make, **changes):
    """Return the name of the field that is refused."""
    return error_of(make, **changes).param


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("top_k", 40, 40),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("min_p", 0.1, 0.1),
        ("top_p", 0.5, 0.5),
        ("repetition_penalty", 1.2, 1.2),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 2, 2.0),
        ("logit_bias", {"5": -100, "7": 1.5}, ((5, -100.0), (7, 1.5))),
        ("logit_bias", {"7": 1, "07": 2}, ((7, 2.0),)),
        ("seed", -(10**300), -(10**300)),
        ("seed", 5.0, 5),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_each_parameter_is_translated_for_the_engine(make, field, value, expected):
    request = make(**{field: value})
    converted = generation_request(request) if make is chat else completion_requests(request)[0]
    assert getattr(converted.sampling, field) == expected


@pytest.mark.parametrize("make", [chat, completion])
def test_null_is_the_default(make):
    names = "stream stream_options temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
    names += " logit_bias seed n stop ignore_eos logprobs max_tokens user"
    if make is chat:
        names += " response_format tools tool_choice parallel_tool_calls functions function_call reasoning_effort"
        names += " chat_template_kwargs thinking_token_budget steer"
    request = make(**dict.fromkeys(names.split()))
    converted = generation_request(request) if make is chat else completion_requests(request)[0]
    assert converted.sampling == Sampling(temperature=0.7 if make is chat else 1.0)
    assert converted.max_tokens == (4096 if make is chat else 16)
    assert request.n is None
    assert (converted.stop, converted.ignore_eos, converted.top_logprobs) == ((), False, None)
    assert (converted.answer_format, converted.thinking_budget) == (None, None)
    if isinstance(converted.prompt, ChatPrompt):
        assert (converted.prompt.tools, converted.prompt.template_options) == (None, {})


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("top_k", -2, "top_k"),
        ("top_k", 1.5, "top_k"),
        ("min_p", 1.1, "min_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("repetition_penalty", 2.1, "repetition_penalty"),
        ("presence_penalty", -2.1, "presence_penalty"),
        ("frequency_penalty", 2.1, "frequency_penalty"),
        ("logit_bias", {"five": 1}, "logit_bias.five"),
        ("logit_bias", {"-5": 1}, "logit_bias.-5"),
        ("logit_bias", {"9" * 13: 1}, "logit_bias." + "9" * 13),
        ("logit_bias", {"\u0665": 1}, "logit_bias.\u0665"),
        ("logit_bias", {"5": 101}, "logit_bias.5"),
        ("logit_bias", {str(token): 1 for token in range(1025)}, "logit_bias"),
        ("logit_bias", [1], "logit_bias"),
        ("seed", True, "seed"),
        ("seed", "1", "seed"),
        ("seed", 1.5, "seed"),
        ("n", 0, "n"),
        ("n", 9, "n"),
        pytest.param("n", 10**5000, "n", id="n-huge"),
        ("ignore_eos", 1, "ignore_eos"),
        ("stop", ["a"] * 17, "stop"),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_the_error_of_a_value_out_of_range_names_the_field(make, field, value, param):
    assert refusal(make, **{field: value}) == param


def test_greedy_sampling_keeps_penalties_and_bias_and_ignores_filters():
    sampling = generation_request(chat(temperature=1e-9, top_k=3, min_p=0.1, top_p=0.5, presence_penalty=1)).sampling
    assert sampling == Sampling(temperature=0, presence_penalty=1.0)


def test_top_p_0_is_greedy():
    assert generation_request(chat(top_p=0)).sampling == Sampling(temperature=0)


def test_top_logprobs_need_logprobs():
    assert generation_request(chat(logprobs=True)).top_logprobs == 0
    assert generation_request(chat(logprobs=True, top_logprobs=20)).top_logprobs == 20
    assert generation_request(chat(logprobs=False, top_logprobs=0)).top_logprobs is None
    assert refusal(chat, top_logprobs=2) == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=21) == "top_logprobs"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt(text="a")]),
        (["a", "b"], [TextPrompt(text="a"), TextPrompt(text="b")]),
        ([1, 2], [TokenPrompt(tokens=(1, 2))]),
        ([[1, 2], [3]], [TokenPrompt(tokens=(1, 2)), TokenPrompt(tokens=(3,))]),
    ],
)
def test_a_prompt_is_text_or_tokens_one_or_several(prompt, expected):
    assert [request.prompt for request in completion_requests(completion(prompt=prompt))] == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        *((prompt, "prompt") for prompt in ([], None, 5, ["a"] * 1025, ["x"] * 1_000_000)),
        *((prompt, "prompt.0") for prompt in ([True], [1.5] * 1_000_000)),
        *((prompt, "prompt.1") for prompt in ([1, -1], [1, "a"], ["a", 1], [[1], []])),
        ([[1], ["a"]], "prompt.1.0"),
    ],
)
def test_the_error_of_an_invalid_prompt_names_it(prompt, param):
    assert refusal(completion, prompt=prompt) == param


def test_max_tokens_0_needs_echo():
    (scored,) = completion_requests(completion(max_tokens=0, echo=True, logprobs=1))
    assert (scored.max_tokens, scored.score_prompt, scored.top_logprobs) == (0, True, 1)
    assert refusal(completion, max_tokens=0) == "max_tokens"


def test_only_an_echo_with_logprobs_is_scored():
    assert not completion_requests(completion(logprobs=1))[0].score_prompt
    assert not completion_requests(completion(echo=True))[0].score_prompt


NEUTRAL = {
    "best_of": (1, 2),
    "length_penalty": (1.0, 1.1),
    "bad_words": ([], ["x"]),
    "skip_special_tokens": (True, False),
    "include_stop_str_in_output": (False, True),
    "use_beam_search": (False, True),
    "stop_token_ids": ([], [5]),
    "mm_processor_kwargs": ({}, {"a": 1}),
    "prompt_logprobs": (False, 1),
    "top_n_sigma": (-1, 1.5),
    "tfs_z": (1, 0.9),
    "n_probs": (0, 5),
    "lora": ([], [{"id": 0}]),
    "truncate_prompt_tokens": (-1, 10),
}


@pytest.mark.parametrize("field", NEUTRAL)
@pytest.mark.parametrize("make", [chat, completion])
def test_neutral_values_of_other_servers_are_accepted_and_others_refused(make, field):
    neutral, other = NEUTRAL[field]
    for value in (neutral, None):
        assert list(make(**{field: value}).ignored()) == []
    assert refusal(make, **{field: other}) == field


@pytest.mark.parametrize(
    ("field", "neutral", "other"),
    [
        ("echo", False, True),
        ("add_special_tokens", False, True),
        ("documents", [], [{"text": "a"}]),
        ("chat_template", "", "{{ messages }}"),
        ("include_reasoning", True, False),
    ],
)
def test_neutral_values_of_chats_are_accepted_and_others_refused(field, neutral, other):
    assert list(chat(**{field: neutral}).ignored()) == []
    assert refusal(chat, **{field: other}) == field


def test_fields_that_cannot_make_an_answer_wrong_are_ignored_and_named():
    prediction = {"type": "content", "content": "hello"}
    request = chat(
        verbosity="low",
        prediction=prediction,
        usage={"include": True},
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert list(request.ignored()) == ["verbosity", "usage", "stream_options.continuous_usage_stats"]


@pytest.mark.parametrize(("given", "expected"), [("", ()), ([], ()), (["", "x"], ("x",)), ([""], ())])
def test_empty_stop_strings_mean_none(given, expected):
    assert generation_request(chat(stop=given)).stop == expected
    assert completion_requests(completion(stop=given))[0].stop == expected


def test_best_of_must_equal_n():
    assert completion(best_of=3, n=3).n == 3
    assert refusal(completion, best_of=2) == "best_of"


def test_a_suffix_makes_a_prompt_with_a_gap_and_needs_texts():
    given = completion_requests(completion(prompt=["a", "b"], suffix="end"))
    assert [request.prompt for request in given] == [InfillPrompt(prefix=text, suffix="end") for text in "ab"]
    assert completion_requests(completion(prompt="a", suffix=""))[0].prompt == TextPrompt(text="a")
    assert refusal(completion, prompt=[1, 2], suffix="end") == "suffix"
    assert refusal(completion, echo=True, suffix="end") == "suffix"


# Answer formats


def answer_format(**changes):
    return generation_request(chat(**changes)).answer_format


def schema(value, **changes):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value, **changes}}


@pytest.mark.parametrize("given", [None, {"type": "text"}])
def test_text_sets_no_format(given):
    assert answer_format(response_format=given) is None


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"type": "json_object"}, "json_schema", '{"type":"object"}'),
        ({"type": "json_object", "schema": None}, "json_schema", '{"type":"object"}'),
        ({"type": "json_object", "schema": {}}, "json_schema", '{"type":"object"}'),
        ({"type": "json_object", "schema": {"maxProperties": 2}}, "json_schema", '{"maxProperties":2}'),
        (schema({"b": 1, "a": "é"}), "json_schema", '{"b":1,"a":"é"}'),
        (schema(True, strict=True, description="d"), "json_schema", "true"),
        (schema(False, strict=None, description=None), "json_schema", "false"),
        ({"type": "regex", "regex": "a+"}, "regex", "a+"),
        ({"type": "grammar", "grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"type": "grammar", "grammar": 'start: "a"', "syntax": "lark"}, "lark", 'start: "a"'),
        ({"type": "grammar", "grammar": 'root ::= "a"', "syntax": "gbnf"}, "gbnf", 'root ::= "a"'),
    ],
)
def test_each_format_is_translated_for_the_engine(given, kind, text):
    found = answer_format(response_format=given)
    assert (found.kind, found.text) == (kind, text)


@pytest.mark.parametrize(("strict", "expected"), [(True, True), (False, False), (None, False)])
def test_a_schema_is_strict_only_if_the_request_says_so(strict, expected):
    assert answer_format(response_format=schema({}, strict=strict)).strict is expected


@pytest.mark.parametrize(
    ("given", "param", "expected"),
    [
        ("json", "response_format", ["must be an object", "json_schema", "'json'"]),
        ({}, "response_format.type", ["required"]),
        ({"type": "xml"}, "response_format.type", ["'xml'", "text, json_object, json_schema, regex, grammar"]),
        ({"type": ["text"]}, "response_format.type", ["json_schema"]),
        ({"type": "text", "schema": {}}, "response_format.schema", ["leave it out"]),
        ({"type": "json_object", "schema": []}, "response_format.schema", ["an object", "a list"]),
        ({"type": "json_schema"}, "response_format.json_schema", ["required"]),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema", ["required"]),
        (schema(None), "response_format.json_schema.schema", ["true or false", "null"]),
        (schema("{}"), "response_format.json_schema.schema", ["true or false", "a string"]),
        (schema(1.5), "response_format.json_schema.schema", ["a number"]),
        (schema({}, name=""), "response_format.json_schema.name", ["at least 1"]),
        (schema({}, name="a" * 257), "response_format.json_schema.name", ["256"]),
        (schema({}, strict="yes"), "response_format.json_schema.strict", ["boolean"]),
        (schema({"x": "y" * 262_137}), "response_format.json_schema.schema", ["262,145", "262,144"]),
        (schema({"x": {1}}), "response_format.json_schema.schema", ["cannot be written as JSON", "set"]),
        (schema({"x": float("inf")}), "response_format.json_schema.schema", ["cannot be written as JSON"]),
        (schema({"x": "\ud800"}), "response_format.json_schema.schema", ["cannot be written as JSON", "surrogates"]),
        ({"type": "regex"}, "response_format.regex", ["required"]),
        ({"type": "regex", "regex": ""}, "response_format.regex", ["at least 1"]),
        ({"type": "regex", "regex": "a" * 65_537}, "response_format.regex", ["65,537", "65,536"]),
        ({"type": "grammar", "grammar": "a" * 65_537}, "response_format.grammar", ["65,537", "65,536"]),
        ({"type": "grammar", "grammar": "a", "syntax": "ebnf"}, "response_format.syntax", ["'lark'", "'gbnf'"]),
    ],
)
def test_the_error_of_an_invalid_format_names_the_field(given, param, expected):
    error = error_of(chat, response_format=given)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")
    assert [part for part in expected if part not in error.message] == []
    assert len(error.message) < 500


def test_a_schema_that_is_nested_too_deeply_is_refused():
    deep = {}
    for _ in range(100_000):
        deep = {"not": deep}
    assert "nested too deeply" in error_of(chat, response_format=schema(deep)).message


def test_the_largest_allowed_values_are_accepted():
    largest = {"x": "y" * 262_136}
    found = answer_format(response_format=schema(largest))
    assert len(found.text) == 262_144
    assert json.loads(found.text) == largest
    assert answer_format(response_format={"type": "regex", "regex": "a" * 65_536}) is not None


def test_a_format_with_ignore_eos_is_refused():
    error = error_of(chat, response_format={"type": "json_object"}, ignore_eos=True)
    assert error.param == "response_format"
    assert "ignore_eos" in error.message
    assert answer_format(response_format={"type": "text"}, ignore_eos=True) is None


# Reports


def test_choices_share_the_prompt_in_usage():
    choices = [report(cached=4, from_disk=3), report(cached=9, output=7)]
    spent = usage([choices])
    assert (spent.prompt_tokens, spent.completion_tokens, spent.total_tokens) == (10, 12, 22)
    assert spent.prompt_tokens_details.cached_tokens == 4
    assert spent.prompt_tokens_details.disk_cached_tokens == 3
    assert usage([choices, choices]).total_tokens == 44


def test_reasoning_tokens_of_all_choices_are_counted():
    choices = [report(reasoning=3), report(output=7, reasoning=4)]
    spent = usage([choices])
    assert (spent.completion_tokens, spent.completion_tokens_details.reasoning_tokens) == (12, 7)
    assert usage([choices, choices]).completion_tokens_details.reasoning_tokens == 14
    assert usage([[report()]]).model_dump()["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_statistics_of_the_websocket_have_reasoning_tokens_and_the_finish_reason():
    stats = socket_stats(report(reasoning=3, finish="tool_calls"))
    assert (stats.completion_tokens, stats.reasoning_tokens, stats.finish_reason) == (5, 3, "tool_calls")


def test_timings_of_several_choices_sum_tokens_and_take_the_longest_time():
    both = [report(cached=4), report(cached=9, output=7, decode_s=3.0)]
    total = timings([both, [report(prompt=20)]])
    assert (total.cache_n, total.prompt_n, total.predicted_n) == (4, 26, 17)
    assert (total.prompt_ms, total.predicted_ms) == (1000, 3000)
    assert (total.prompt_per_second, total.predicted_per_second) == (26, 17 / 3)


def test_timings_have_the_longest_wait_the_latest_first_token_and_the_highest_memory():
    early = replace(report(), queue_s=0.25, ttft_s=0.5, peak_memory_bytes=3_000_000_000)
    late = replace(report(), queue_s=0.125, ttft_s=2.0, peak_memory_bytes=1_000_000_000)
    total = timings([[early], [late]])
    assert (total.queue_ms, total.ttft_ms, total.peak_memory_gb) == (250, 2000, 3)


def test_timings_without_tokens_do_not_divide_by_zero():
    nothing = timings([[report(prompt=4, cached=4, output=0, decode_s=0.0)]])
    assert (nothing.prompt_per_token_ms, nothing.predicted_per_token_ms, nothing.predicted_per_second) == (0, 0, 0)


@pytest.mark.parametrize("impossible", [-math.inf, math.nan, -1e30])
def test_an_impossible_token_has_the_lowest_logprob(impossible):
    token = TokenLogprob(token=5, text="é", bytes="é".encode(), logprob=impossible)
    assert chat_logprobs([token]) == [{"token": "é", "logprob": -9999.0, "bytes": [195, 169], "top_logprobs": []}]

"""Tests with openai-python: all parameters, and errors as exceptions of the client.

Tests that depend on the text use the real SmolLM2.
"""

import openai
import pytest
from openai import OpenAI

from tests.support.labs import serving

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def smol_lab(starter_home):
    with serving(starter_home, MODEL) as lab:
        yield lab


@pytest.fixture(scope="module")
def echo(lab):
    """Return a client of the echo engine, for tests that work with any engine."""
    with OpenAI(**lab.openai, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tiny(tiny_lab):
    """Return a client of the tiny model, for tests that work with any model: the real one is slow."""
    with OpenAI(**tiny_lab.openai, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(smol_lab):
    with OpenAI(base_url=f"{smol_lab.url}/v1", api_key="anything", max_retries=0) as client:
        yield client


@pytest.mark.long
def test_the_real_model_knows_paris_and_counts_its_tokens(client):
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=30)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens == 37


def test_a_stream_has_the_same_text_and_ends_with_usage(client):
    text, usage, reasons = "", None, []
    stream = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert "Paris" in text
    assert reasons == ["stop"]
    assert usage.completion_tokens > 0


def test_a_stop_string_is_not_part_of_the_text(client):
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=30, stop=["Paris"])
    assert answer.choices[0].message.content == "The capital of France is "
    assert answer.choices[0].finish_reason == "stop"


def ask(client, **parameters):
    asked = {"model": "default", "messages": FRANCE, "temperature": 0, "max_tokens": 8, **parameters}
    return client.chat.completions.create(**asked)


def text(client, **parameters):
    return ask(client, **parameters).choices[0].message.content or ""


def test_16_stop_strings_are_accepted(client):
    stops = [f"zz{number}" for number in range(15)] + ["Paris"]
    assert text(client, stop=stops, max_tokens=30) == "The capital of France is "
    with pytest.raises(openai.BadRequestError):
        ask(client, stop=["a"] * 17)


@pytest.mark.slow
def test_a_seeded_answer_is_reproducible(echo):
    warm = {"temperature": 1.5, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    assert text(echo, seed=1, **warm) == text(echo, seed=1, **warm)
    assert len({text(echo, seed=seed, **warm) for seed in (1, 2, 3)}) > 1


def test_logprobs_are_objects_of_the_client(client):
    logprobs = ask(client, logprobs=True, top_logprobs=2, max_tokens=6).choices[0].logprobs
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == "The capital of France is Paris"
    for token in logprobs.content:
        assert bytes(token.bytes or []).decode() == token.token
        assert token.top_logprobs[0].logprob == token.logprob
        assert len(token.top_logprobs) == 2


def test_a_bias_can_force_and_forbid_tokens(client):
    assert text(client, logit_bias={"7042": 100}, max_tokens=4) == " Paris" * 4
    assert "Paris" not in text(client, logit_bias={"7042": -100})


@pytest.mark.parametrize(
    "parameters",
    [
        {"top_p": 0.1},
        {"presence_penalty": 2},
        {"frequency_penalty": -2},
        {"extra_body": {"top_k": 1}},
        {"extra_body": {"top_k": 10**6}},
        {"extra_body": {"min_p": 0.9}},
        {"extra_body": {"repetition_penalty": 1.5}},
        {"extra_body": {"ignore_eos": True}},
        {"user": "me", "metadata": {"a": "b"}, "store": False},
    ],
)
def test_each_parameter_is_accepted(echo, parameters):
    assert text(echo, temperature=0.7, seed=1, **parameters)


def test_top_k_1_and_min_p_1_are_greedy(tiny):
    for extra in ({"top_k": 1}, {"min_p": 1}):
        assert text(tiny, temperature=1.9, extra_body=extra) == text(tiny)


def test_penalties_increase_the_variety_of_tokens(tiny):
    twelve = {str(token): 100 for token in range(1000, 1012)}

    def various(**penalty):
        logprobs = ask(tiny, logit_bias=twelve, logprobs=True, max_tokens=24, **penalty).choices[0].logprobs
        assert logprobs is not None
        return len({token.token for token in logprobs.content or []})

    without = various()
    assert without < 12
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"extra_body": {"repetition_penalty": 1.5}}):
        assert various(**penalty) > without


def complete(client, prompt, **parameters):
    return client.completions.create(model=MODEL, prompt=prompt, temperature=0, **parameters)


def test_completions_continue_the_prompt(client):
    answer = complete(client, ["The capital of France is", "Two plus two is"], max_tokens=4, echo=True)
    assert answer.choices[0].text.startswith("The capital of France is Paris")
    assert answer.choices[1].text.startswith("Two plus two is")
    pieces = client.completions.create(model=MODEL, prompt="One, two,", temperature=0, max_tokens=4, stream=True)
    streamed = "".join(piece.choices[0].text for piece in pieces)
    assert streamed == complete(client, "One, two,", max_tokens=4).choices[0].text


def test_an_echo_scores_likely_texts_higher(client):
    scores = []
    for end in (" Paris", " banana"):
        prompt = "The capital of France is" + end
        logprobs = complete(client, prompt, max_tokens=0, echo=True, logprobs=1).choices[0].logprobs
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

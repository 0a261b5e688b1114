"""openai-python against the real SmolLM2: chat, stream, stop, usage, and errors as its own typed exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from lmx_lab.lab import Lab
from tests.flows.conftest import serving

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def smol_lab(starter_home: Path) -> Iterator[Lab]:
    with serving(starter_home, MODEL) as lab:
        yield lab


@pytest.fixture(scope="module")
def client(smol_lab: Lab) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{smol_lab.url}/v1", api_key="anything", max_retries=0) as client:
        yield client


def test_the_real_model_knows_paris_and_counts_its_tokens(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=30)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens == 37


def test_a_stream_says_the_same_and_ends_with_usage(client: OpenAI) -> None:
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
    assert usage is not None
    assert usage.completion_tokens > 0


def test_stop_ends_before_the_word(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=30, stop=["Paris"])
    assert answer.choices[0].message.content == "The capital of France is "
    assert answer.choices[0].finish_reason == "stop"


def test_max_tokens_ends_with_length(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_models_are_listed(client: OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).owned_by == "lmx-lab"


def test_errors_are_the_clients_own_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=2.1)
    assert (wrong.value.code, wrong.value.param) == ("invalid-request", "temperature")
    assert wrong.value.request_id
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="unheard-of", messages=FRANCE)
    assert unknown.value.code == "model-not-found"


def test_no_model_is_an_error_that_is_not_sent_again(starter_home: Path) -> None:
    with (
        serving(starter_home, None) as lab,
        OpenAI(**lab.openai, max_retries=2) as client,
        pytest.raises(openai.InternalServerError) as refused,
    ):
        client.chat.completions.create(model=MODEL, messages=FRANCE)
    assert refused.value.code == "no-model-loaded"
    assert refused.value.response.headers["x-should-retry"] == "false"

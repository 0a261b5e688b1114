"""Two larger models on llama.cpp: tools, schemas, infilling, long prompts, sliding windows, a large vocabulary.

``make test-models`` fetches them and runs these tests. Other runs skip the tests if the models are missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import httpx2
import pytest

import lmx_lab
from lmx_lab.notebook.lab import Lab
from tests.larger_models.fetch import GEMMA, QWEN, LargerModel
from tests.support.labs import serving

pytestmark = pytest.mark.long
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ROUNDING = 0.15
"""Largest difference of a log-probability, because llama.cpp computes texts of other lengths with other kernels."""
FACT = "The code of the blue door is 7351. "
FILLER = "The garden has roses, and nobody has counted them since the spring. "


def running(model: LargerModel, home: object, **settings: object) -> Iterator[Lab]:
    if not model.path.exists():
        pytest.skip("make test-models fetches this model")
    with serving(home, model.path, **settings) as lab:
        yield lab


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    yield from running(QWEN, tmp_path_factory.mktemp("home"), slots=2)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    yield from running(GEMMA, tmp_path_factory.mktemp("home"), slots=2)


def post(lab, route, **body):
    answer = httpx2.post(f"{lab.url}{route}", json={"temperature": 0, **body}, timeout=280)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(lab, messages, **fields):
    return post(lab, "/v1/chat/completions", messages=messages, max_tokens=80, **fields)


def test_the_quantization_and_the_context_are_those_of_the_file(qwen):
    (record,) = [record for record in qwen.models() if record.loaded]
    assert record.quantization == "Q4_K_M"
    assert lmx_lab.plan(QWEN.path).context_length == 32768


def test_a_simple_question_is_answered(qwen):
    assert "Paris" in qwen.chat("What is the capital of France?", temperature=0, max_tokens=20).text


def test_a_tool_is_called_and_its_result_is_used(qwen):
    answer = chat(qwen, QUESTION, tools=[WEATHER])["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"temperature_c": 23, "sky": "clear"}'}
    last = chat(qwen, [*QUESTION, answer["message"], result], tools=[WEATHER])
    assert "23" in last["choices"][0]["message"]["content"]


def test_a_streamed_call_is_the_same_call(qwen):
    whole = chat(qwen, QUESTION, tools=[WEATHER])["choices"][0]["message"]["tool_calls"][0]["function"]
    body = {"messages": QUESTION, "tools": [WEATHER], "stream": True, "temperature": 0, "max_tokens": 80}
    name = arguments = text = ""
    with httpx2.stream("POST", f"{qwen.url}/v1/chat/completions", json=body, timeout=280) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                text += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    name += call["function"].get("name") or ""
                    arguments += call["function"].get("arguments") or ""
    assert (name, arguments, text) == (whole["name"], whole["arguments"], "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_required_is_made(qwen, choice):
    message = chat(qwen, QUESTION, tools=[WEATHER], tool_choice=choice)["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}


def test_a_schema_is_filled_with_the_facts_of_the_text(qwen):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    asked = [{"role": "user", "content": "Ada Lovelace is 36 years old. Give her name and age as JSON."}]
    content = chat(qwen, asked, response_format=form)["choices"][0]["message"]["content"]
    assert json.loads(content) == {"name": "Ada Lovelace", "age": 36}


def test_a_gap_in_code_is_filled(qwen):
    body = {"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n\nprint(add(1, 2))\n", "n_predict": 8}
    assert post(qwen, "/infill", **body)["content"].startswith("a + b")
    body = {"prompt": body["input_prefix"], "suffix": body["input_suffix"], "max_tokens": 8}
    assert post(qwen, "/v1/completions", **body)["choices"][0]["text"].startswith("a + b")


def test_a_fact_at_the_start_of_a_long_prompt_is_found_and_its_prefix_is_reused(qwen):
    text = FACT + FILLER * 250
    first = [{"role": "user", "content": f"{text}\nWhat is the code of the blue door?"}]
    one = chat(qwen, first)
    assert one["usage"]["prompt_tokens"] > 3000
    assert "7351" in one["choices"][0]["message"]["content"]
    more = [*first, one["choices"][0]["message"], {"role": "user", "content": "Say the code once more."}]
    two = chat(qwen, more)
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] >= one["usage"]["prompt_tokens"]
    assert "7351" in two["choices"][0]["message"]["content"]


def test_the_memory_of_weights_and_cache_is_as_planned(qwen):
    plan = lmx_lab.plan(QWEN.path)
    assert plan.weights_bytes == pytest.approx(QWEN.path.stat().st_size, rel=0.05)
    # 24 layers, two heads of 64 values for keys and for values, in 16 bits.
    assert plan.kv_bytes_per_token == 24 * 2 * 2 * 64 * 2


def test_a_base_model_continues_a_text(gemma):
    text = "Paris is the capital of France. Madrid is the capital of Spain. Rome is the capital of"
    answer = post(gemma, "/v1/completions", prompt=text, max_tokens=2)
    assert answer["choices"][0]["text"].startswith(" Italy")


def test_texts_of_many_languages_are_unchanged_after_tokenizing(gemma):
    text = "Grüße, 世界! नमस्ते 🙂 العربية\n\n\tdef f(x): return x"
    tokens = post(gemma, "/tokenize", content=text)["tokens"]
    assert post(gemma, "/detokenize", tokens=tokens)["content"] == text


def test_a_prefix_longer_than_the_window_gives_the_same_text_as_a_new_prompt(gemma, tmp_path):
    """The cache of a sliding window keeps only its last tokens, so a prefix is used only where they are kept."""
    text = FACT + FILLER * 80
    prompts = [text, text + "In the evening,", text + "In the morning,", FACT + FILLER * 40 + "At noon,"]

    def answers(lab):
        for prompt in prompts:
            yield post(lab, "/v1/completions", prompt=prompt, max_tokens=24)["choices"][0]["text"]

    one_after_another = list(answers(gemma))
    for prompt, text_ in zip(prompts, one_after_another, strict=True):
        for lab in running(GEMMA, tmp_path, slots=2):
            assert post(lab, "/v1/completions", prompt=prompt, max_tokens=24)["choices"][0]["text"] == text_


def test_a_score_does_not_depend_on_the_text_after_it(gemma):
    body = {"prompt": "The capital of France is Paris", "max_tokens": 0, "echo": True, "logprobs": 1}
    scores = post(gemma, "/v1/completions", **body)["choices"][0]["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert all(math.isfinite(score) and score <= 0 for score in scores[1:])
    longer = post(gemma, "/v1/completions", **{**body, "prompt": body["prompt"] + " and Rome"})["choices"][0][
        "logprobs"
    ]
    assert longer["token_logprobs"][1 : len(scores)] == pytest.approx(scores[1:], abs=ROUNDING)

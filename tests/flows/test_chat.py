"""Tests of POST /v1/chat/completions: specification sections 2.2, 2.3 and 4.1."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from openai.types.chat import ChatCompletionMessage

from tests.support.asking import ENDLESS, HELLO, chat_body, echo_body, error_of, events
from tests.support.labs import manager_of, serving, wait_until_idle
from tests.support.waiting import until

PATH = "/v1/chat/completions"


def choices(http, **changes):
    response = http.post(PATH, json=echo_body(**changes))
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def chunks(http, **changes):
    """Return the chunks of a stream."""
    response = http.post(PATH, json=echo_body(stream=True, **changes))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, done = events(response.text)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in found]


def of_choice(chunks, index):
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def test_a_completion_has_its_cost(http):
    body = http.post(PATH, json=echo_body()).json()
    assert body["usage"]["completion_tokens"] == body["timings"]["predicted_n"] == 8
    assert body["timings"]["predicted_per_second"] > 0
    details = body["usage"]["prompt_tokens_details"]
    assert 0 <= details["disk_cached_tokens"] <= details["cached_tokens"] < body["usage"]["prompt_tokens"]


def test_the_last_chunk_has_the_timings_and_usage_only_on_request(http):
    found = chunks(http)
    assert found[-1]["choices"] == [{"index": 0, "delta": {}, "finish_reason": "length"}]
    assert found[-1]["timings"]["predicted_n"] == 8
    assert not any("usage" in chunk for chunk in found)


WARM = {"messages": HELLO, "temperature": 1.5, "seed": 7, "max_tokens": 12, "ignore_eos": True}
"""After the two tokens of the message, the echo engine samples random tokens."""


def test_n_choices_differ_share_a_seed_and_count_the_prompt_once(http):
    body = http.post(PATH, json=echo_body(n=2, **WARM)).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert texts[0] != texts[1]
    alone = http.post(PATH, json=echo_body(**WARM)).json()
    assert alone["choices"][0]["message"]["content"] == texts[0]
    assert body["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == body["timings"]["predicted_n"] == 24
    assert body["timings"]["cache_n"] + body["timings"]["prompt_n"] == body["usage"]["prompt_tokens"]
    *streamed, last = chunks(http, n=2, stream_options={"include_usage": True}, **WARM)
    assert last["usage"]["completion_tokens"] == last["timings"]["predicted_n"] == 24
    for index, text in enumerate(texts):
        first, *pieces, end = of_choice(streamed, index)
        assert (first["delta"], end["finish_reason"]) == ({"role": "assistant", "content": ""}, "length")
        assert "".join(piece["delta"]["content"] for piece in pieces) == text


def test_choices_of_a_cancelled_request_free_all_their_slots(lab, http):
    with http.stream("POST", PATH, json=echo_body(stream=True, n=2, **ENDLESS)) as response:
        next(response.iter_text())
        # The snapshot may be older than the first token.
        until(lambda: manager_of(lab).snapshot.active_requests + manager_of(lab).snapshot.queued_requests > 0)
    wait_until_idle(lab)


def test_more_choices_than_the_queue_can_ever_hold_are_an_invalid_request(lab, http):
    refused = http.post(PATH, json=echo_body(n=5))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    wait_until_idle(lab)


@pytest.mark.long
def test_64_simultaneous_clients_are_served_by_8_slots(tiny_home):
    bodies = [chat_body(max_tokens=20, seed=at, temperature=1, ignore_eos=True) for at in range(64)]
    with (
        serving(tiny_home, "tiny", slots=8, queue_limit=64) as lab,
        httpx2.Client(base_url=lab.url) as http,
        ThreadPoolExecutor(64) as pool,
    ):
        answers = [answer.json() for answer in pool.map(lambda body: http.post(PATH, json=body), bodies)]
        alone = http.post(PATH, json=bodies[0]).json()
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [20] * 64
    assert alone["choices"] == answers[0]["choices"]


@pytest.mark.slow
def test_reasoning_ends_at_its_budget_and_can_be_disabled(thinker_home):
    def ask(**changes):
        response = http.post(PATH, json=chat_body(**{"model": "thinker", "max_tokens": 40, **changes}))
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert "think>" not in json.dumps(choice["message"])
        return choice, response.json()["usage"]

    with serving(thinker_home, "thinker") as lab, httpx2.Client(base_url=lab.url) as http:
        thinking = {"chat_template_kwargs": {"open_thoughts": True}, "thinking_token_budget": 5}
        choice, usage = ask(**thinking, logprobs=True)
        plain, without = ask(reasoning_effort="none", max_tokens=80)
        prompts = [ask(reasoning_effort=effort)[1]["prompt_tokens"] for effort in (None, "low")]
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"]
    # The marker at the end of the reasoning counts as a reasoning token, but not in the budget.
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5 + 1}
    assert usage["completion_tokens"] == len(choice["logprobs"]["content"]) == 40
    assert "reasoning_content" not in plain["message"]
    assert (without["completion_tokens_details"], bool(plain["message"]["content"])) == ({"reasoning_tokens": 0}, True)
    assert prompts[0] < prompts[1], "the template writes the effort"


def test_logprobs_have_each_token_its_bytes_and_alternatives(http):
    (choice,) = choices(http, logprobs=True, top_logprobs=3)
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert len(content) == 8
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == choice["message"]["content"]
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        rivals = [rival["logprob"] for rival in token["top_logprobs"]]
        assert len(rivals) == 3
        assert rivals == sorted(rivals, reverse=True)
        # With greedy sampling, the token is the most likely one.
        assert token["logprob"] == rivals[0] <= 0


def test_a_chat_may_have_probabilities_after_sampling(http):
    fields = {"logprobs": True, "top_logprobs": 3, "top_k": 2, "temperature": 1, "seed": 3, "max_tokens": 3}
    body = echo_body(**fields, post_sampling_probs=True)
    content = http.post(PATH, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry.keys() for entry in content] == [{"token", "prob", "bytes", "top_probs"}] * len(content)
    assert [sum(other["prob"] for other in entry["top_probs"]) for entry in content] == pytest.approx(
        [1] * len(content)
    )
    chunks = [json.loads(each) for each in events(http.post(PATH, json={**body, "stream": True}).text)[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice.get("logprobs")]
    assert [entry for choice in choices for entry in choice["logprobs"]["content"]] == content


def test_without_top_logprobs_there_are_no_alternatives(http):
    (choice,) = choices(http, logprobs=True)
    assert [token["top_logprobs"] for token in choice["logprobs"]["content"]] == [[]] * 8
    assert choices(http)[0]["logprobs"] is None


@pytest.mark.parametrize("stop", [None, "e"])
def test_streamed_logprobs_equal_the_whole(http, stop):
    fields = {"logprobs": True, "top_logprobs": 2, "max_tokens": 16, "stop": stop}
    whole = choices(http, **fields)[0]["logprobs"]["content"]
    first, *pieces, last = of_choice(chunks(http, **fields), 0)
    assert first["logprobs"] is last["logprobs"] is None
    streamed = [token for piece in pieces for token in piece["logprobs"]["content"]]
    # Alone or in a batch, float32 sums are rounded differently.
    assert [token["token"] for token in streamed] == [token["token"] for token in whole]
    assert [token["logprob"] for token in streamed] == pytest.approx([token["logprob"] for token in whole], abs=1e-4)


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_only_programs_on_this_machine_may_name_the_loaded_model_by_its_path(tiny_http, tiny_home, path):
    folder = tiny_home / "models" / "tiny"
    body = {"prompt": "a", "max_tokens": 1} if path != PATH else chat_body(max_tokens=1)
    assert tiny_http.post(path, json={**body, "model": f"{folder}/"}).json()["model"] == "tiny"
    # The header of a proxy, which may forward requests from other machines.
    for name, headers in ((f"{folder}-two", {}), (str(folder), {"x-forwarded-for": "192.0.2.7"})):
        answer = tiny_http.post(path, json={**body, "model": name}, headers=headers)
        message = error_of(answer, 404, "model-not-found")["message"]
        assert ("by id" in message, "tiny is loaded" in message) == (True, True), message


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me"},
        {"metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"n": 1, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"},
        dict.fromkeys(["audio", "prediction", "functions", "function_call", "modalities", "web_search_options"]),
        dict.fromkeys(
            ["prompt_cache_retention", "reasoning_effort", "verbosity", "moderation", "tools", "tool_choice"]
        ),
        dict.fromkeys(["response_format", "parallel_tool_calls"]),
        {"modalities": ["text"], "functions": [], "function_call": "none", "prompt_cache_retention": "24h"},
        {
            "messages": [
                *echo_body()["messages"],
                ChatCompletionMessage(role="assistant", content="Hello.").model_dump(),
                {"role": "assistant", "content": "Hello.", "annotations": [], "reasoning_content": None},
                {"role": "user", "content": "and?"},
            ]
        },
        {"temperature": None, "top_p": None, "max_tokens": None, "max_completion_tokens": 3, "stop": None},
        {"top_p": 0},
        {"seed": -(10**399), "temperature": 1},
        {"top_k": 10**9, "temperature": 1},
        {"logit_bias": {"5": -100, "05": 100}, "min_p": 0, "repetition_penalty": 1},
        {"logprobs": False, "top_logprobs": 0},
        dict.fromkeys(["top_k", "min_p", "repetition_penalty", "seed", "n", "logprobs", "top_logprobs", "ignore_eos"]),
        {"max_tokens": 5.0},
        {
            "messages": [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}]
            + echo_body()["messages"]
        },
        {
            "messages": [
                *echo_body()["messages"],
                {"role": "assistant", "content": None},
                {"role": "user", "content": ""},
            ]
        },
    ],
)
def test_fields_of_the_format_that_have_no_effect_here_are_accepted(http, extra):
    response = http.post(PATH, json=echo_body(**extra))
    assert response.status_code == 200, response.text

"""Tests of POST /v1/completions: all forms of prompts, and the echo and scores that evaluation harnesses use."""

import json
import threading

import httpx2
import pytest
from tokenizers import Tokenizer

from lmx_lab.wire.completions import LlamaRequest
from tests.support.asking import ENDLESS, chat_body, echo_body, error_of, events
from tests.support.labs import wait_until_idle

PATH = "/v1/completions"
SEA = "The sea is wide and deep, and what it says it says again."
WARM = {"temperature": 1.5, "seed": 7, "max_tokens": 40, "ignore_eos": True}


def body(**changes):
    return {"model": "echo", "prompt": SEA, "temperature": 0, "max_tokens": 8, **changes}


def complete(http, **changes):
    response = http.post(PATH, json=body(**changes))
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return Tokenizer.from_file(str(tiny.path / "tokenizer.json"))


@pytest.fixture(scope="module")
def ids(tokenizer):
    """Return the token ids of the prompt."""
    return tokenizer.encode(SEA).ids


def tiny_choice(http, **changes):
    (only,) = complete(http, model="tiny", **changes)["choices"]
    return only


def test_a_completion_has_the_shape_of_the_format(http):
    answer = complete(http)
    assert (answer["object"], answer["id"][:5], answer["model"]) == ("text_completion", "cmpl-", "echo")
    (only,) = answer["choices"]
    assert only.pop("text")
    assert only == {"index": 0, "logprobs": None, "finish_reason": "length"}
    assert answer["usage"]["completion_tokens"] == answer["timings"]["predicted_n"] == 8


def test_the_defaults_of_the_format_are_16_tokens_at_temperature_1(http):
    response = http.post(PATH, json={"model": "default", "prompt": SEA, "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == 16


def test_token_ids_are_the_same_prompt(tiny_http, ids):
    plain = tiny_choice(tiny_http)
    assert tiny_choice(tiny_http, prompt=ids) == tiny_choice(tiny_http, prompt=[ids]) == plain


def test_several_prompts_are_answered_in_order_and_counted_together(http):
    prompts = [SEA, "One two three", "Dear", SEA, "x"]
    answer = complete(http, prompt=prompts, ignore_eos=True)
    alone = [complete(http, prompt=prompt, ignore_eos=True) for prompt in prompts]
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3, 4]
    assert [one["text"] for one in answer["choices"]] == [one["choices"][0]["text"] for one in alone]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["timings"]["predicted_n"] == 40
    assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == answer["usage"]["prompt_tokens"]


def test_many_prompts_do_not_fill_the_queue_by_themselves(http):
    # This server accepts only four requests at a time: two slots and a queue of two.
    assert len(complete(http, prompt=["a", "b", "c"] * 10, max_tokens=2)["choices"]) == 30


@pytest.mark.slow
def test_choices_are_numbered_by_prompt_first(http):
    answer = complete(http, prompt=[SEA, "Dear"], n=2, **WARM)
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
    alone = complete(http, prompt="Dear", n=2, **WARM)
    assert [one["text"] for one in answer["choices"][2:]] == [one["text"] for one in alone["choices"]]


@pytest.mark.parametrize(
    "fields", [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 0}, {"stop": ["e"]}]
)
def test_streamed_text_and_logprobs_equal_the_whole(http, fields):
    fields = {"prompt": [SEA, "Dear"], "max_tokens": 30, **fields}
    whole = complete(http, **fields)
    response = http.post(PATH, json=body(stream=True, stream_options={"include_usage": True}, **fields))
    *chunks, done = events(response.text)
    assert (response.status_code, done) == (200, "[DONE]")
    *chunks, usage = [json.loads(chunk) for chunk in chunks]
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], whole["usage"]["total_tokens"])
    assert len({chunk["id"] for chunk in chunks}) == 1
    for expected in whole["choices"]:
        *parts, last = [one for chunk in chunks for one in chunk["choices"] if one["index"] == expected["index"]]
        assert "".join(part["text"] for part in (*parts, last)) == expected["text"]
        assert [part["finish_reason"] for part in parts] == [None] * len(parts)
        assert last["finish_reason"] == expected["finish_reason"]
        logprobs = [part["logprobs"] for part in (*parts, last) if part["logprobs"] is not None]
        assert bool(logprobs) == (expected["logprobs"] is not None)
        for name in ("tokens", "text_offset") if logprobs else ():
            assert [item for part in logprobs for item in part[name]] == expected["logprobs"][name]


def test_echo_puts_the_prompt_before_the_text(tiny_http, ids):
    text = tiny_choice(tiny_http)["text"]
    assert tiny_choice(tiny_http, echo=True)["text"] == SEA + text
    assert tiny_choice(tiny_http, prompt=ids, echo=True)["text"] == SEA + text


def test_an_echo_without_tokens_returns_the_prompt(http):
    answer = complete(http, echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == SEA
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_with_logprobs_scores_the_prompt(tiny_http, ids, max_tokens):
    logprobs = tiny_choice(tiny_http, prompt=ids, echo=True, logprobs=1, max_tokens=max_tokens)["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(ids) + max_tokens}
    assert "".join(logprobs["tokens"][: len(ids)]) == SEA
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    for token, logprob, top in list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert top[token] == logprob <= max(top.values()) <= 0


def with_tokens(tokenizer, ids, made):
    """Return the ids of the prompt and of generated tokens. Tokenizing their text together might give other tokens."""
    return ids + [token for text in made["tokens"] for token in tokenizer.encode(text).ids]


def test_scores_distinguish_greedy_tokens_from_others(tiny_http, tokenizer, ids):
    """lm-evaluation-harness compares the logprob of each token with the highest one at its position."""
    greedy = tiny_choice(tiny_http, prompt=ids, logprobs=1, max_tokens=4)["logprobs"]
    wrong = tiny_choice(tiny_http, prompt=ids, logprobs=1, max_tokens=4, temperature=2, seed=1)["logprobs"]
    for made, expected in ((greedy, True), (wrong, False)):
        prompt = with_tokens(tokenizer, ids, made)
        scored = tiny_choice(tiny_http, prompt=prompt, echo=True, logprobs=1, max_tokens=1)["logprobs"]
        rest = slice(len(ids), -1)
        pairs = list(zip(scored["token_logprobs"][rest], scored["top_logprobs"][rest], strict=True))
        assert len(pairs) == 4
        assert all(logprob == max(top.values()) for logprob, top in pairs) is expected


def test_scores_of_a_continuation_equal_the_logprobs_of_generating_it(tiny_http, tokenizer, ids):
    made = tiny_choice(tiny_http, prompt=ids, logprobs=0, max_tokens=4)["logprobs"]
    prompt = with_tokens(tokenizer, ids, made)
    scored = tiny_choice(tiny_http, prompt=prompt, echo=True, logprobs=0, max_tokens=1)["logprobs"]
    assert scored["tokens"][len(ids) : -1] == made["tokens"]
    assert scored["token_logprobs"][len(ids) : -1] == pytest.approx(made["token_logprobs"], abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": [1, 99999]}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_token": 5}, "max_token"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ],
)
def test_an_invalid_field_is_400_and_named(http, changes, param):
    error = error_of(http.post(PATH, json=body(**changes)), 400, "invalid-request")
    assert error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_prompt_among_the_first_refuses_the_request(lab, http, stream):
    response = http.post(PATH, json=body(prompt=["a", "word " * 40_000], stream=stream))
    error = error_of(response, 400, "context_length_exceeded")
    assert error["param"] == "prompt"
    wait_until_idle(lab)


def test_a_later_invalid_prompt_ends_the_request(lab, http):
    prompts = ["a"] * 5 + ["word " * 40_000]
    error_of(http.post(PATH, json=body(prompt=prompts)), 400, "context_length_exceeded")
    with http.stream("POST", PATH, json=body(prompt=prompts, stream=True)) as response:
        *_, last = events("".join(response.iter_text()))
    assert json.loads(last)["error"]["code"] == "context_length_exceeded"
    wait_until_idle(lab)


def test_a_client_that_disconnects_frees_the_slots_of_all_prompts(lab, http):
    with http.stream("POST", PATH, json=body(prompt=["a", "b"] * 50, stream=True, **ENDLESS)) as response:
        next(response.iter_text())
    wait_until_idle(lab)
    with pytest.raises(httpx2.ReadTimeout):
        http.post(PATH, json=body(prompt=["a", "b"] * 50, **ENDLESS), timeout=httpx2.Timeout(60, read=0.1))
    wait_until_idle(lab)


@pytest.mark.slow
def test_a_queue_filled_by_others_only_delays_later_prompts(lab, http):
    running, over = threading.Event(), threading.Event()
    statuses = []

    def fill_queue():
        with httpx2.Client(base_url=lab.url) as client:
            running.wait()
            # Six clients eventually fill a server with four places. The number of requests is limited, because more of
            # them would delay the others for minutes on a busy machine.
            while 429 not in statuses or (not over.is_set() and statuses.count(429) < 20):
                response = client.post("/v1/chat/completions", json=echo_body(max_tokens=40, ignore_eos=True))
                statuses.append(response.status_code)

    others = [threading.Thread(target=fill_queue) for _ in range(6)]
    for other in others:
        other.start()
    try:
        # This request is accepted while the queue has room, and the others are sent while it runs.
        long = body(prompt=[SEA] * 8, max_tokens=300, ignore_eos=True, stream=True)
        with http.stream("POST", PATH, json=long) as response:
            running.set()
            answer = events("".join(response.iter_text()))
    finally:
        running.set()
        over.set()
        for other in others:
            other.join()
    assert answer[-1] == "[DONE]"
    ends = [end for chunk in answer[:-1] if (end := json.loads(chunk)["choices"][0]["finish_reason"])]
    assert len(ends) == 8


@pytest.mark.parametrize("bias", [{}, {"2": 100}], ids=["the text continues", "the text ends"])
def test_a_harness_that_leaves_out_the_last_entry_sums_the_whole_prompt(tiny_http, bias):
    answer = complete(tiny_http, model="tiny", max_tokens=1, echo=True, logprobs=1, logit_bias=bias)
    logprobs, usage = answer["choices"][0]["logprobs"], answer["usage"]
    assert usage["completion_tokens"] == 1
    for entries in logprobs.values():
        assert len(entries) == usage["prompt_tokens"] + 1
    if bias:
        assert logprobs["tokens"][-1] == "<|im_end|>"
        assert logprobs["text_offset"][-1] == len(SEA)
        assert answer["choices"][0]["text"] == SEA


def test_chat_logprobs_leave_out_the_token_that_ends_the_text(tiny_http):
    fields = chat_body(logprobs=True, logit_bias={"2": 100})
    answer = tiny_http.post("/v1/chat/completions", json=fields).json()
    assert answer["choices"][0]["logprobs"]["content"] == []
    assert answer["usage"]["completion_tokens"] == 1


# In the form of llama.cpp's server


def test_the_answer_of_llama_cpp_has_its_members(http):
    fields = {"prompt": "hello sea", "n_predict": 2, "n_probs": 1, "seed": 7, "return_tokens": True}
    answer = http.post("/completion", json=fields).json()
    assert (answer["content"], answer["stop_type"], answer["tokens_predicted"]) == ("hello", "limit", 2)
    assert (answer["truncated"], answer["has_new_line"], answer["stopping_word"]) == (False, False, "")
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["seed"], settings["temperature"]) == (2, 7, 0.8)
    assert answer["timings"]["predicted_n"] == 2
    entries = answer["completion_probabilities"]
    assert [entry["id"] for entry in entries] == answer["tokens"]
    assert [entry["top_logprobs"][0]["token"] for entry in entries] == ["hel", "lo"]
    assert [entry["top_logprobs"][0]["id"] for entry in entries] == answer["tokens"]


def test_llama_cpp_returns_probabilities_after_sampling(http):
    fields = {"prompt": "hello sea", "n_predict": 2, "n_probs": 3, "post_sampling_probs": True}
    fields |= {"temperature": 1, "top_k": 2, "top_p": 1, "min_p": 0, "seed": 7}
    answer = http.post("/completion", json=fields).json()
    entries = answer["completion_probabilities"]
    assert [entry["token"] for entry in entries] == ["hel", "lo"]
    for entry in entries:
        assert entry.keys() == {"id", "token", "prob", "bytes", "top_probs"}
        assert [other.keys() for other in entry["top_probs"]] == [{"id", "token", "prob", "bytes"}] * 2
        assert sum(other["prob"] for other in entry["top_probs"]) == pytest.approx(1)
        assert (entry["prob"], entry["id"]) == (entry["top_probs"][0]["prob"], entry["top_probs"][0]["id"])
    streamed = [json.loads(each) for each in events(http.post("/completion", json={**fields, "stream": True}).text)]
    assert [each for part in streamed for each in part["completion_probabilities"]] == entries
    assert "completion_probabilities" not in http.post("/completion", json={**fields, "n_probs": 0}).json()
    refused = error_of(http.post("/completion", json={**fields, "logprob_tokens": [5]}), 400, "invalid-request")
    assert refused["param"] == "post_sampling_probs"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_each_chunk_may_have_the_timings_so_far(http, path):
    text = "one two three four five six"
    prompt = {"messages": [{"role": "user", "content": text}]} if path == "/v1/chat/completions" else {"prompt": text}
    body = {**prompt, "stream": True, "max_tokens": 6}

    def parts(**fields):
        data = [each for each in events(http.post(path, json={**body, **fields}).text) if each != "[DONE]"]
        return [json.loads(each) for each in data]

    timed = [part["timings"] for part in parts(timings_per_token=True) if "timings" in part]
    # A busy machine sends several tokens in a chunk.
    assert len(timed) > 1
    tokens = [each["predicted_n"] for each in timed]
    assert (tokens, tokens[-1]) == (sorted(tokens), 6)
    prompts = {each["cache_n"] + each["prompt_n"] for each in timed}
    assert len(prompts) == 1
    assert all(each["predicted_ms"] >= 0 and each["prompt_ms"] >= 0 for each in timed)
    assert sum("timings" in part for part in parts()) == 1


LLAMA_VIM = {
    **{
        "id_slot": 0,
        "prompt": "",
        "n_predict": 8,
        "stop": [],
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.99,
        "stream": False,
    },
    **{
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
    },
    **{"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "x", "time": [1, 2], "filename": "f"}]},
    "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
}
LLAMA_VSCODE = {
    **{"input_prefix": "a", "input_suffix": "b", "input_extra": [], "prompt": "", "n_predict": 0, "samplers": []},
    **{"cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "model": "", "response_fields": [""]},
}
SILLY_TAVERN = {
    **{
        "prompt": "hello",
        "n_predict": 8,
        "n_probs": 0,
        "seed": -1,
        "temperature": 1,
        "top_p": 1,
        "top_k": 0,
        "top_a": 0,
    },
    **{"tfs_z": 1, "typical_p": 1, "min_p": 0.1, "repeat_penalty": 1.1, "repeat_last_n": 64, "presence_penalty": 0},
    **{"mirostat": 0, "mirostat_tau": 5, "grammar": "", "stop": ["\nUser:"], "dry_multiplier": 0, "xtc_probability": 0},
    **{"samplers": ["penalties", "top_k", "temperature"], "logit_bias": [], "stream": True, "truncation_length": 8192},
}


@pytest.mark.parametrize(
    ("path", "body"), [("/infill", LLAMA_VIM), ("/infill", LLAMA_VSCODE), ("/completion", SILLY_TAVERN)]
)
def test_the_requests_of_clients_of_llama_cpp_are_answered(http, path, body):
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "samplers" in response.headers["x-lmx-ignored"]


@pytest.mark.parametrize(("seed", "expected"), [(-1, None), (2**32 - 1, None), (7, 7)])
def test_llama_cpps_values_for_a_random_seed_are_converted(seed, expected):
    converted = LlamaRequest.model_validate({"prompt": "hello", "seed": seed}).converted(infill=False)
    assert (converted.seed, list(converted.ignored())) == (expected, [])


def test_llama_cpp_returns_several_completions_of_a_prompt(http):
    answers = http.post("/completion", json={"prompt": "hello sea", "n_predict": 2, "n_cmpl": 3}).json()
    assert [(each["index"], each["content"]) for each in answers] == [(at, "hello") for at in range(3)]


def test_llama_cpp_returns_only_the_requested_members_of_an_answer(http):
    fields = ["content", "generation_settings/seed", "prompt", "timings/predicted_n", "tokens", "stop/x", "nothing"]
    body = {"prompt": "hello sea", "n_predict": 2, "seed": 7, "response_fields": fields}
    expected = {"content": "hello", "generation_settings/seed": 7, "prompt": "hello sea", "timings/predicted_n": 2}
    assert http.post("/completion", json=body).json() == {**expected, "tokens": []}
    *_, last = events(http.post("/completion", json={**body, "stream": True}).text)
    assert json.loads(last) == {**expected, "content": "", "tokens": []}
    assert http.post("/completion", json={**body, "response_fields": []}).json()["stop"] is True


def test_a_prompt_of_llama_cpp_may_be_an_object(http):
    one = {"prompt_string": "one", "multimodal_data": []}
    assert http.post("/completion", json={"prompt": one}).json()["content"] == "one"
    for prompts in ([one, one], [one, "one"], [tokens_of(http, "one"), one]):
        answers = http.post("/completion", json={"prompt": prompts}).json()
        assert [answer["content"] for answer in answers] == ["one", "one"]
    for prompt in ({**one, "multimodal_data": ["aaaa"]}, {"prompt_string": 5}, {}):
        error = error_of(http.post("/completion", json={"prompt": prompt}), 400, "invalid-request")
        assert error["param"] == "prompt"


def test_llama_cpp_answers_several_prompts_with_a_list(http):
    prompts = ["one", "two\n"]
    answers = http.post("/completion", json={"prompt": prompts}).json()
    assert [(each["index"], each["content"], each["has_new_line"]) for each in answers] == [
        (0, "one", False),
        (1, "two\n", True),
    ]
    assert {each["generation_settings"]["n_predict"] for each in answers} == {-1}
    streamed = http.post("/completion", json={"prompt": prompts, "stream": True}).text
    parts = [json.loads(each) for each in events(streamed)]
    for index, prompt in enumerate(prompts):
        assert "".join(part["content"] for part in parts if part["index"] == index) == prompt


def tokens_of(http, text):
    return http.post("/tokenize", json={"content": text}).json()["tokens"]


def test_llama_cpp_reads_biases_as_pairs_of_tokens_or_texts(http):
    (the, *_) = tokens_of(http, "The sea")
    excluding = [{str(the): False}, [[the, False]], [[the, -100.0]], [["The", False]], {"The": -100}]
    for biases in ([], [[the, 5]], [["zebra", False]], *excluding):
        answer = http.post(
            "/completion", json={"prompt": "The sea", "n_predict": 5, "logit_bias": biases, "return_tokens": True}
        ).json()
        assert (answer["tokens"][0] == the) == (biases not in excluding), biases
    body = {"prompt": "The sea", "max_tokens": 1, "logit_bias": [[the, False]]}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] != "The"
    for biases in ([5], [[the]], [[the, True]], [[the, 101]], [[10**9, 1]], "The"):
        error = error_of(http.post("/completion", json={"prompt": "a", "logit_bias": biases}), 400, "invalid-request")
        assert error["param"].startswith("logit_bias")


@pytest.mark.parametrize("path", ["/completion", "/infill"])
def test_llama_cpp_computes_a_prompt_without_an_answer(http, path):
    body = {"prompt": f"{path} is a long prompt", "input_suffix": "!", "n_predict": 0}
    answer = http.post(path, json=body).json()
    assert (answer["content"], answer["tokens"], answer["tokens_predicted"]) == ("", [], 0)
    assert (answer["stop_type"], answer["generation_settings"]["n_predict"]) == ("limit", 0)
    assert len(events(http.post(path, json={**body, "stream": True}).text)) == 1
    assert http.post(path, json={**body, "n_predict": 1}).json()["timings"]["cache_n"] > 1
    assert http.post(path, json={**body, "n_predict": -2}).json()["stop_type"] == "eos"


def test_a_prompt_of_llama_cpp_consists_of_texts_and_token_ids(http):
    one, two = tokens_of(http, "one"), tokens_of(http, "two")
    for prompt in (["one", *two], [*one, "two"], [*one, "tw", *tokens_of(http, "o")]):
        answer = http.post("/completion", json={"prompt": prompt}).json()
        assert (answer["content"], answer["index"]) == ("onetwo", 0)
    for prompts in ([one, "two"], ["one", two], [one, two]):
        answers = http.post("/completion", json={"prompt": prompts}).json()
        assert [answer["content"] for answer in answers] == ["one", "two"]
    answers = http.post("/completion", json={"prompt": [["one", *two], "two"]}).json()
    assert [answer["content"] for answer in answers] == ["onetwo", "two"]
    wrong = {
        "prompt": (["a", 5] * 1025, {}),
        "prompt.1": ([1, None], ["a", 2.5]),
        "prompt.0.1": ([["a", -1]],),
        "prompt.1.0": ([[5], [True]],),
    }
    for param, prompts in wrong.items():
        for prompt in prompts:
            error = error_of(http.post("/completion", json={"prompt": prompt}), 400, "invalid-request")
            assert error["param"] == param


def test_infill_fills_the_gap_between_two_texts(http):
    fields = {"input_prefix": "def f(", "input_suffix": "): pass", "prompt": "x", "n_predict": 8}
    gap = http.post("/v1/completions", json={"prompt": "def f(x", "suffix": "): pass", "max_tokens": 8})
    assert http.post("/infill", json=fields).json()["content"] == gap.json()["choices"][0]["text"]
    extra = [{"filename": "a.py", "text": "import x\n"}, {"text": "y"}]
    read = "\n\n--- snippet ---\n\nimport x\n\n\n--- snippet ---\n\ny"
    with_extra = http.post("/infill", json={**fields, "input_extra": extra}).json()
    same = http.post("/infill", json={**fields, "input_prefix": f"{read}def f("}).json()
    assert (with_extra["content"], with_extra["tokens_evaluated"]) == (same["content"], same["tokens_evaluated"])
    # At the end of a file, and in an empty one, the same special tokens are around the texts.
    for prefix in ("def f(", ""):
        empty = http.post("/infill", json={"input_prefix": prefix, "n_predict": 2}).json()
        assert empty["tokens_evaluated"] == 3 + len(http.post("/tokenize", json={"content": prefix}).json()["tokens"])
    for wrong in ({"n_predict": "many"}, {"prompt": [1, 2]}, {"input_extra": [{"filename": "a"}]}):
        error_of(http.post("/infill", json={**fields, **wrong}), 400, "invalid-request")


def test_the_slots_are_listed(http):
    assert http.get("/slots").json() == [
        {"id": at, "n_ctx": 32768, "is_processing": False} for at in range(http.get("/props").json()["total_slots"])
    ]

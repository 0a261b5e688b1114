"""Tests of Ollama's API below ``/api``, on the echo engine."""

from datetime import datetime

import httpx2
import pytest

from lmx_lab.server.ollama import engine_request, listed_name, requested_model
from lmx_lab.wire.ollama import OllamaChatRequest, OllamaGenerateRequest, read_duration
from tests.support.asking import HELLO
from tests.support.formats import OllamaChat
from tests.support.labs import manager_of

CHAT, GENERATE = "/api/chat", "/api/generate"
COUNTERS = {
    *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
    }
]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}


def chat(**changes):
    return {"model": "echo", "messages": HELLO, "options": {"temperature": 0}} | changes


def user(text):
    return [{"role": "user", "content": text}]


def asked_for_clock(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "clock", "arguments": arguments}}]}


def lines(http, path, body):
    """Return the lines of a stream."""
    response = http.post(path, json=body)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
    return OllamaChat().frames(response.text)


@pytest.mark.parametrize(
    ("content", "changes", "expected"),
    [
        ("one", {"options": {"num_predict": -1}}, {"content": "one"}),
        ("<think>hm</think>one", {"think": "low"}, {"content": "one", "thinking": "hm"}),
        ("no", {"format": SCHEMA}, {"content": '{"city":"Paris"}'}),
        ("no", {"format": "json"}, {"content": '{"":""}'}),
    ],
)
def test_an_answer_has_a_message_and_counters(http, content, changes, expected):
    answer = http.post(CHAT, json=chat(messages=user(content), stream=False, **changes)).json()
    assert answer["message"] == {"role": "assistant", **expected}
    assert answer.keys() >= COUNTERS
    assert all(isinstance(answer[name], int) for name in COUNTERS)
    assert datetime.fromisoformat(answer["created_at"]).tzinfo is not None


def test_a_prompt_is_continued_with_and_without_the_chat_template(http):
    body = {"model": "echo:latest", "prompt": "the sea", "options": {"temperature": 0}}
    templated = http.post(GENERATE, json={**body, "system": "Be brief.", "stream": False}).json()
    raw = http.post(GENERATE, json={**body, "raw": True, "stream": False}).json()
    filled = http.post(GENERATE, json={**body, "suffix": "is blue", "stream": False}).json()
    assert (templated["response"], raw["response"], filled["response"]) == ("the sea",) * 3
    counts = [answer["prompt_eval_count"] for answer in (templated, filled, raw)]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 3
    *parts, last = lines(http, GENERATE, body)
    assert "".join(part["response"] for part in (*parts, last)) == "the sea"
    assert last.keys() >= COUNTERS
    scored = http.post(GENERATE, json={**body, "logprobs": True, "top_logprobs": 2, "stream": False}).json()
    assert "".join(entry["token"] for entry in scored["logprobs"]) == "the sea"
    assert len(scored["logprobs"][0]["top_logprobs"]) == 2


def test_a_conversation_with_calls_is_converted_to_the_chat_format():
    call = {"function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    other = {"id": "mine", "function": {"name": "other", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it?", "images": []},
        {"role": "assistant", "content": None, "thinking": "hm", "tool_calls": [call, other, call]},
        {"role": "tool", "tool_name": "other", "content": "o"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "tool_name": "clock", "content": "2"},
    ]
    request = engine_request(OllamaChatRequest.model_validate({"messages": messages, "think": True}))
    converted = list(request.prompt.messages)
    calls = converted[2]["tool_calls"]
    assert [(each["id"], each["function"]["arguments"]) for each in calls] == [
        ("call_1", {"zone": "UTC"}),
        ("mine", {}),
        ("call_3", {"zone": "UTC"}),
    ]
    assert converted[2]["reasoning_content"] == "hm"
    assert [(each["tool_call_id"], each["content"]) for each in converted[3:]] == [
        ("mine", "o"),
        ("call_1", "1"),
        ("call_3", "2"),
    ]
    assert request.prompt.template_options == {"enable_thinking": True}


def test_options_are_converted_and_have_the_defaults_of_the_format():
    def convert(**options):
        return engine_request(OllamaGenerateRequest.model_validate({"prompt": "a", "options": options}))

    plain = convert()
    assert (plain.sampling.temperature, plain.sampling.top_k, plain.sampling.top_p) == (0.8, 40, 0.9)
    assert (plain.sampling.seed, plain.max_tokens) == (None, 4096)
    given = convert(
        temperature=0.5, top_k=3, min_p=0.1, seed=7, num_predict=9, repeat_penalty=1.5, stop=["x"], presence_penalty=1
    )
    sampling = given.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 3, 0.1, 7)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 1)
    assert (given.max_tokens, given.stop) == (9, ("x",))
    assert convert(seed=-1).sampling.seed is None
    assert convert(num_predict=0).max_tokens == convert(num_predict=-2).max_tokens == 2**31 - 1


@pytest.mark.parametrize(
    ("name", "id_", "shown"),
    [
        ("smollm2-135m", "smollm2-135m", "smollm2-135m:latest"),
        ("smollm2-135m:latest", "smollm2-135m", "smollm2-135m:latest"),
        ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M", "org/name:Q4_K_M"),
    ],
)
def test_names_of_models_may_have_a_tag(name, id_, shown):
    assert requested_model(name) == id_
    assert listed_name(id_) == shown
    assert requested_model("default:latest") is None


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *[(300, 300), (-1, -1), (0, 0), (2.5, 2.5), ("-1", -1), ("0", 0)],
        *[("5m", 300), ("1h30m0.5s", 5400.5), ("-1m", -60), ("24h", 86400), ("100ms", 0.1)],
    ],
)
def test_durations_have_many_forms(given, seconds):
    assert read_duration(given) == pytest.approx(seconds)


INVALID = (400, "invalid-request")


@pytest.mark.parametrize(
    ("path", "body", "expected", "message"),
    [
        (CHAT, chat(keep_alive="soon"), INVALID, "keep_alive: must be a number of seconds"),
        (CHAT, chat(keep_alive="nan"), INVALID, "keep_alive: must be a number of seconds"),
        (CHAT, chat(think="deep"), INVALID, "think: Input should be 'low', 'medium' or 'high'"),
        (CHAT, chat(keep_alive=True), INVALID, "keep_alive"),
        (GENERATE, {"prompt": "a", "images": ["aaaa"]}, INVALID, "no vision"),
        (GENERATE, {"prompt": "a", "template": "{{ .Prompt }}"}, INVALID, "template: templates"),
        (GENERATE, {"prompt": "a", "context": [1]}, INVALID, "/api/chat"),
        (GENERATE, {"prompt": "a", "raw": True, "system": "b"}, INVALID, "system: has no effect"),
        (CHAT, chat(format="xml"), INVALID, "format: must be"),
        (CHAT, chat(options={"temperature": "1"}), INVALID, "options.temperature"),
        (CHAT, chat(options={"stop": ["x"] * 17}), INVALID, "options.stop"),
        (GENERATE, {"prompt": "a", "format": {"title": "x" * 300_000}}, INVALID, "format: has"),
        (CHAT, chat(model="other:latest"), (503, "no-model-loaded"), "other is not loaded"),
        (CHAT, chat(model="none:7b"), (404, "model-not-found"), "none:7b"),
        ("/api/show", {"name": "none"}, (404, "model-not-found"), "none"),
        ("/api/show", {}, INVALID, "model: is missing"),
        ("/api/pull", {"model": "none"}, (404, "model-not-found"), "none"),
        ("/api/embed", {"input": "a"}, INVALID, "model"),
        ("/api/embed", {"model": "echo", "input": 5}, INVALID, "must be a text or a list of texts"),
        ("/api/embed", {"model": "echo", "input": [5]}, INVALID, "must be a text or a list of texts"),
        ("/api/create", {"model": "none"}, (404, "invalid-request"), "/openapi.json"),
    ],
)
def test_errors_have_the_form_of_the_format(http, path, body, expected, message):
    response = http.post(path, json=body)
    problem = OllamaChat().problem(response.json())
    assert (response.status_code, problem.code) == expected
    assert message in problem.message
    assert problem.request_id == response.headers["x-request-id"]


def test_models_are_listed_and_described(http):
    listed = {model["name"]: model for model in http.get("/api/tags").json()["models"]}
    assert listed.keys() == {"echo:latest", "other:latest"}
    other = listed["other:latest"]
    assert other["model"] == "other:latest"
    assert other["details"]["family"] == "llama"
    assert other["size"] > 0
    assert datetime.fromisoformat(other["modified_at"])
    (running,) = http.get("/api/ps").json()["models"]
    assert (running["name"], running["context_length"]) == ("echo:latest", 32768)
    assert datetime.fromisoformat(running["expires_at"]) > datetime.fromisoformat(other["modified_at"])
    assert all(part.isdecimal() for part in http.get("/api/version").json()["version"].split("."))
    shown = http.post("/api/show", json={"name": "echo", "verbose": True, "other": None})
    assert shown.headers["x-lmx-ignored"] == "verbose"
    info = shown.json()
    assert {"completion", "tools", "insert"} <= {*info["capabilities"]}
    # Continue searches the template for this word, and splits the parameters at line ends.
    assert ".Suffix" in info["template"]
    assert info["parameters"] == "num_ctx 32768"
    assert info["model_info"]["echo.context_length"] == 32768
    info = http.post("/api/show", json={"model": "other:latest"}).json()
    assert info["capabilities"] == ["completion", "tools"]
    assert info["model_info"]["llama.context_length"] == 2048


def test_vectors_are_those_of_the_chat_format(quick_lab):
    with httpx2.Client(base_url=quick_lab.url) as http:
        expected = http.post("/v1/embeddings", json={"model": "echo", "input": ["a cat", "a dog"]}).json()
        response = http.post("/api/embed", json={"model": "echo:latest", "input": ["a cat", "a dog"], "verbose": True})
        single = http.post("/api/embeddings", json={"model": "echo", "prompt": "a cat", "options": {}}).json()
    vectors, found = [item["embedding"] for item in expected["data"]], response.json()
    assert response.headers["x-lmx-ignored"] == "verbose"
    assert found.keys() == {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
    assert found["embeddings"] == vectors
    assert single["embedding"] == vectors[0]
    assert found["prompt_eval_count"] == expected["usage"]["prompt_tokens"]


def test_a_request_without_a_prompt_loads_or_unloads_the_model(fresh_lab, fresh_http, echo_home):
    assert fresh_http.post(CHAT, json={"model": "echo"}).json()["done_reason"] == "load"
    unloaded = fresh_http.post(GENERATE, json={"model": "echo:latest", "keep_alive": "0s"}).json()
    assert datetime.fromisoformat(unloaded.pop("created_at"))
    assert unloaded == {"model": "echo:latest", "done": True, "done_reason": "unload", "response": ""}
    assert manager_of(fresh_lab).snapshot.model is None
    assert "no model is loaded" in fresh_http.post("/api/show", json={"model": "default"}).json()["error"]
    assert fresh_http.post(CHAT, json={"model": "echo", "messages": [], "keep_alive": 0}).status_code == 200
    loaded = fresh_http.post(CHAT, json={"model": "echo", "messages": []}).json()
    assert (loaded["done_reason"], loaded["message"]) == ("load", {"role": "assistant", "content": ""})
    assert manager_of(fresh_lab).snapshot.model == "echo"
    # The name is never a path, not even for callers on this machine.
    for name in ("none", str(echo_home / "models" / "other")):
        for given in ({"model": name}, {"model": name, "keep_alive": 0}):
            missing = fresh_http.post(CHAT, json=given)
            assert (missing.status_code, missing.json()["code"]) == (404, "model-not-found")


def test_a_pull_of_a_model_that_is_here_ends_at_once(http):
    *parts, last = lines(http, "/api/pull", {"model": "other:latest", "insecure": False})
    assert {"status": "pulling manifest"} in parts
    assert last == {"status": "success"}
    assert http.post("/api/pull", json={"name": "other", "stream": False}).json() == {"status": "success"}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/pull", {"model": "other"}), (CHAT, {"model": "echo", "keep_alive": 0}), (GENERATE, {"model": "other"})],
)
def test_callers_on_other_machines_do_not_load_or_download(http, path, body):
    response = http.post(path, json=body, headers={"x-forwarded-for": "127.0.0.1"})
    assert (response.status_code, response.json()["code"]) == (403, "admin-forbidden")


def test_callers_on_other_machines_do_not_change_how_long_a_model_stays(http):
    body = {"model": "echo", "keep_alive": "5m"}
    response = http.post(GENERATE, json=body, headers={"x-forwarded-for": "127.0.0.1"})
    assert (response.status_code, response.json()["done_reason"]) == (200, "load")
    (running,) = http.get("/api/ps").json()["models"]
    assert running["expires_at"].startswith("9999")

"""Tests that all formats accept the same: prompts, names of models, keys, and fields without effect."""

import json

import httpx2
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.support.formats import CLOCK, FORMATS, Request, Socket, each_format
from tests.support.labs import serving

OTHER_STREAMS = {"/api/pull": "the progress of a download", "/infill": "the streams of /completion"}
"""Routes with streams that are not answers of a model, or are those of another route."""


def test_each_route_that_streams_answers_has_an_adapter(http):
    found = set()
    for path, operations in http.get("/openapi.json").json()["paths"].items():
        has_stream = len(operations.get("post", {}).get("responses", {}).get("200", {}).get("content", ())) > 1
        is_socket = "101" in operations.get("get", {}).get("responses", {})
        if has_stream or is_socket:
            found.add(path)
    assert found == {form.path for form in FORMATS} | OTHER_STREAMS.keys()


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What time is it?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    {"role": "user", "content": "Thank you."},
]


@pytest.mark.parametrize(
    ("request_", "ability"),
    [
        (Request(), "template"),
        (Request(tools=[CLOCK]), "tools"),
        (Request(tools=[CLOCK], choice="required"), "forced"),
        (Request(messages=CONVERSATION, tools=[CLOCK]), "history"),
    ],
    ids=["message", "tools", "forced", "conversation"],
)
def test_all_formats_make_the_same_prompt(lab, http, request_, ability):
    prompts = {}
    for form in FORMATS:
        if ability in form.can:
            form.streamed(http, request_)
            prompts[form.name] = lab.requests[-1].prompt
    assert prompts == dict.fromkeys(prompts, prompts["chat"])


HINTS = {"user": "me", "cache_prompt": True}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
IGNORED = {
    "chat": (HINTS, "user, cache_prompt"),
    "completions": (HINTS, "user, cache_prompt"),
    "llama.cpp completion": ({"cache_prompt": True, "samplers": ["top_k"]}, "cache_prompt, samplers"),
    "messages": (
        {
            "metadata": {"user_id": "u"},
            "tools": [SEARCH],
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "bad\r\nname": 1,
        },
        "metadata, thinking.budget_tokens, tools.web_search",
    ),
    "responses": (
        {
            "truncation": "auto",
            "reasoning": {"effort": "extreme", "context": "all"},
            "text": {"verbosity": "low"},
            "include": ["reasoning.encrypted_content"],
            "tools": [{"type": "web_search"}],
        },
        "truncation, text.verbosity, reasoning.context, tools.web_search, reasoning.effort, "
        "include.reasoning.encrypted_content",
    ),
    "cohere": ({"safety_mode": "NONE", "raw_prompting": True}, "safety_mode, raw_prompting"),
    **dict.fromkeys(
        ("ollama chat", "ollama generate"),
        (
            {"truncate": True, "keep_alive": "5m", "options": {"num_ctx": 4096, "mirostat": 1, "bad\r\nname": 1}},
            "truncate, options.num_ctx, options.mirostat, keep_alive",
        ),
    ),
}
"""Fields without effect of each format, and their names in the header."""


def null(value):
    """Return the fields of a format with null instead of each value that has no effect."""
    return {
        name: null(inner) if isinstance(inner, dict) and name != "metadata" else inner if name == "type" else None
        for name, inner in value.items()
    }


@pytest.mark.parametrize("stream", [False, True])
@each_format("http")
def test_ignored_fields_are_named_in_a_header(form, http, stream):
    fields, names = IGNORED[form.name]
    for extra, named in ((fields, names), (null(fields), None), ({}, None)):
        response = http.post(form.path, json=form.body(Request(extra=extra), stream=stream))
        assert response.status_code == 200, response.text
        assert response.headers.get("x-lmx-ignored") == named


OTHER_ROUTES = {
    "/v1/embeddings": {"model": "default", "input": "sea"},
    "/v2/embed": {"model": "default", "texts": ["sea"]},
    "/embed": {"inputs": "sea"},
    "/embedding": {"content": "sea"},
    "/api/embed": {"model": "default", "input": "sea"},
    "/v1/rerank": {"model": "default", "query": "sea", "documents": ["salt"]},
    "/rerank": {"query": "sea", "texts": ["salt"]},
    "/v1/score": {"model": "default", "text_1": "sea", "text_2": "salt"},
    "/tokenize": {"content": "sea"},
    "/v1/messages/count_tokens": {"messages": list(Request().messages)},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/responses/compact": {"model": "default", "input": "hello"},
}
"""Bodies of routes that do not stream answers."""
BODIES = {form.path: form.body(Request(), stream=False) for form in FORMATS if "http" in form.can} | OTHER_ROUTES


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_ignored_and_named_unless_it_is_misspelt(path, http):
    unknown = {"kv_transfer_params": {}, "mode": "chat", "chat_id": "7"}
    response = http.post(path, json=BODIES[path] | unknown)
    assert (response.status_code, response.headers["x-lmx-ignored"]) == (200, ", ".join(unknown)), response.text
    last = list(BODIES[path])[-1]
    response = http.post(path, json=BODIES[path] | {f"{last}_": 1})
    assert response.status_code == 400
    assert f"{last}_: is not a field of this request, or not supported by this version; did you mean" in response.text


SETS = {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}, "uniqueItems": True}}}


def chat_schema(**strict):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "sets", "schema": SETS, **strict}}}


def responses_schema(**strict):
    return {"text": {"format": {"type": "json_schema", "name": "sets", "schema": SETS, **strict}}}


def messages_schema():
    return {"output_config": {"format": {"type": "json_schema", "schema": SETS}}}


def ollama_schema():
    return {"format": SETS}


SCHEMA_FIELDS = {
    "chat": (chat_schema, "response_format"),
    "completions": (chat_schema, "response_format"),
    "responses": (responses_schema, "text.format"),
    "messages": (messages_schema, "output_config.format"),
    "cohere": (
        lambda: {"response_format": {"type": "json_object", "json_schema": SETS}},
        "response_format",
    ),
    "llama.cpp completion": (lambda: {"json_schema": SETS}, "json_schema"),
    "ollama chat": (ollama_schema, "format"),
    "ollama generate": (ollama_schema, "format"),
}
"""The field with a schema in each format, and its name in headers and errors."""


@each_format("http")
def test_a_part_of_a_schema_that_cannot_be_enforced_is_named_in_a_header(form, http):
    fields, place = SCHEMA_FIELDS[form.name]
    response = form.post(http, Request(extra=fields()))
    assert (response.status_code, response.headers["x-lmx-ignored"]) == (200, f"{place}.uniqueItems")
    assert set(json.loads(form.answer(response.json()).text).get("a", [])) <= {1}


@pytest.mark.parametrize("name", ["chat", "completions", "responses"])
def test_a_strict_schema_is_enforced_as_a_whole_or_refused(name, http):
    (form,) = [form for form in FORMATS if form.name == name]
    fields, place = SCHEMA_FIELDS[name]
    assert "x-lmx-ignored" in form.post(http, Request(extra=fields(strict=False))).headers
    response = form.post(http, Request(extra=fields(strict=True)))
    assert (response.status_code, response.json()["error"]["param"]) == (400, place)
    assert "uniqueItems" in response.json()["error"]["message"]


@pytest.mark.parametrize("form", [form for form in FORMATS if form.name in ("chat", "completions")])
def test_the_ids_of_all_tokens_are_returned_if_requested(form, lab, http):
    request = Request(extra={"return_token_ids": True})
    response = form.post(http, request)
    assert "x-lmx-ignored" not in response.headers
    whole = response.json()
    [choice], prompt = whole["choices"], list(lab.requests[-1].prompt)
    assert choice.get("prompt_token_ids", whole.get("prompt_token_ids")) == prompt
    text = http.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["content"]
    assert text == "hello<|end|>"
    frames = form.frames(form.streamed(http, request))
    pieces = [piece for frame in frames for piece in frame["choices"]]
    assert [id for piece in pieces for id in piece["token_ids"]] == choice["token_ids"]
    found = [part["prompt_token_ids"] for part in [*frames, *pieces] if "prompt_token_ids" in part]
    assert found == [prompt]


@each_format()
def test_no_model_and_default_mean_the_loaded_model(form, http):
    bodies = [form.post(http, Request(model=model)).json() for model in ("echo", "default", None)]
    assert [body["model"].removesuffix(":latest") for body in bodies] == ["echo"] * 3
    assert [form.answer(body).text for body in bodies] == ["hello"] * 3


@each_format("http")
def test_null_means_the_loaded_model(form, http):
    assert form.answer(form.post(http, Request(extra={"model": None})).json()).text == "hello"


@pytest.fixture(scope="module")
def keyed_lab(echo_home):
    with serving(echo_home, "echo", api_key="secret") as lab:
        yield lab


@each_format("http")
def test_a_key_is_accepted_in_the_header_of_the_format(form, keyed_lab):
    with httpx2.Client(base_url=keyed_lab.url) as http:
        accepted = form.post(http, Request(), headers=form.key_headers("secret"))
        refused = [form.post(http, Request(), headers=headers) for headers in ({}, form.key_headers("wrong"))]
    assert form.answer(accepted.json()).text == "hello"
    for response in refused:
        problem = form.problem(response.json())
        assert (response.status_code, problem.code) == (401, "unauthorized")
        assert problem.kind == form.kinds.get(401)


def test_a_websocket_needs_the_key_before_the_handshake(keyed_lab):
    address = keyed_lab.url.replace("http", "ws") + Socket.path
    with connect(address, additional_headers=Socket().key_headers("secret")):
        pass
    with pytest.raises(InvalidStatus) as refused, connect(address):
        pass
    assert refused.value.response.status_code == 401

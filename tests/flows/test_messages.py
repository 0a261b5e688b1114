"""Tests of POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages format, on the echo engine."""

import json

import httpx2
import pytest

from lmx_lab.server.messages import chat_request
from lmx_lab.wire.messages import MessagesRequest
from tests.support.asking import HELLO
from tests.support.formats import Messages
from tests.support.labs import serving

PATH = "/v1/messages"
TOOLS = [{"name": "clock", "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}}}]


def body(**changes):
    return {"model": "default", "max_tokens": 64, "messages": HELLO, "temperature": 0} | changes


def test_a_conversation_is_converted_to_the_chat_format():
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What time is it?", **cached}]},
        {"role": "user", "content": "In UTC."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "abc"},
                {"type": "redacted_thinking", "data": "abc"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "clock", "input": {"zone": "UTC"}},
                {"type": "tool_use", "id": "c2", "name": "clock", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Here you are."},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "noon"}]},
                {"type": "tool_result", "tool_use_id": "c1", "is_error": True},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc=1"},
        {"type": "text", "text": "Be brief.", **cached},
    ]
    request = MessagesRequest.model_validate({"messages": messages, "system": system})
    chat = chat_request(request).model_dump(mode="json", include={"messages"}, exclude_unset=True)["messages"]
    calls = chat[2].pop("tool_calls")
    assert chat == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it?\n\nIn UTC."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "user", "content": "Here you are."},
    ]
    assert [(call["id"], call["function"]["name"]) for call in calls] == [("c1", "clock"), ("c2", "clock")]


@pytest.mark.parametrize("changes", [{}, {"system": "Be brief."}, {"tools": TOOLS}])
def test_the_counted_tokens_are_those_of_the_prompt(http, changes):
    query = {"beta": "true"}
    usage = http.post(PATH, json=body(**changes), params=query).json()["usage"]
    counted = http.post(f"{PATH}/count_tokens", json={"messages": HELLO, **changes}, params=query).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "messages: has 0 items"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "the type 'x'"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "type: Field required"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "name the tool"),
        (
            {"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}], "tool_choice": {"type": "any"}},
            "tool_choice: is 'required', but there are no tools",
        ),
        ({"stop_sequences": ["x" * 2000]}, "stop_sequences"),
    ],
)
def test_the_error_of_an_invalid_request_names_the_mistake(http, changes, message):
    response = http.post(PATH, json=body(**changes))
    problem = Messages().problem(response.json())
    assert (response.status_code, problem.kind) == (400, "invalid_request_error")
    assert message in problem.message


def test_a_wrong_bearer_token_is_refused_despite_a_valid_key(echo_home):
    with serving(echo_home, "echo", api_key="secret") as lab, httpx2.Client(base_url=lab.url) as http:
        both = http.post(PATH, json=body(), headers={"x-api-key": "secret", "authorization": "Bearer wrong"})
    assert (both.status_code, both.json()["error"]["type"]) == (401, "authentication_error")


def chat_of(messages, **fields):
    return chat_request(MessagesRequest.model_validate({"messages": messages, **fields}))


def test_sampling_fields_are_converted():
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_tokens": 7, "stream": True}
    chat = chat_of(HELLO, stop_sequences=["x"], **fields)
    assert {name: getattr(chat, name) for name in (*fields, "stop")} == {**fields, "stop": ["x"]}
    assert chat_of(HELLO).temperature == 1


def test_a_document_of_text_is_read():
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A sea."}}
    results = [{"type": "tool_result", "tool_use_id": "c1", "content": [document]}]
    messages = chat_of([{"role": "user", "content": [document, *results]}]).messages
    assert [(message.role, message.content) for message in messages] == [("tool", "A sea."), ("user", "A sea.")]


FORMAT = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}}


@pytest.mark.parametrize("fields", [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}])
def test_the_required_format_is_enforced(http, fields):
    answer = http.post(PATH, json=body(**fields)).json()
    (block,) = answer["content"]
    assert (json.loads(block["text"]), answer["stop_reason"]) == ({"a": 7}, "end_turn")


def test_other_settings_of_the_answer_are_named_as_ignored(http):
    response = http.post(PATH, json=body(output_config={"format": FORMAT, "effort": "high"}))
    assert response.headers["x-lmx-ignored"] == "output_config.effort"
    assert http.post(PATH, json=body(output_config={"format": None})).json()["content"][0]["text"] == "hello"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: Field required"),
        ({"output_config": {"format": {"type": "yaml", "schema": {}}}}, "output_config.format.type"),
        ({"output_config": {"format": FORMAT | {"schema": {"type": 5}}}}, "this format cannot be enforced"),
        ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "send output_config.format only"),
    ],
)
def test_a_format_that_cannot_be_enforced_is_refused_by_its_place(http, fields, message):
    response = http.post(PATH, json=body(**fields))
    assert (response.status_code, message in response.json()["error"]["message"]) == (400, True), response.text

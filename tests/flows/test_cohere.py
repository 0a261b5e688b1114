"""What only version 2 of Cohere's chat format has; what all formats share is tested in ``tests/contract/formats``."""

import json

import pytest

from tests.support.asking import HELLO

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]},
    },
}


def ask(http, **fields):
    response = http.post("/v2/chat", json={"model": "default", "messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_documents_and_plans_of_earlier_calls_are_given_to_the_model(http):
    first = ask(http, tools=[WEATHER], tool_choice="REQUIRED")["message"]
    (call,) = first["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Rome"})
    documents = [
        {"type": "document", "document": {"id": "1", "data": "twenty degrees"}},
        {"type": "document", "document": {"data": {"rain": "none"}}},
    ]
    result = {"role": "tool", "tool_call_id": call["id"], "content": documents}
    history = [*HELLO, {**first, "tool_plan": "I will look."}, result]
    (part,) = ask(http, messages=history, tools=[WEATHER], tool_choice="NONE")["message"]["content"]
    # The engine repeats the last message.
    assert part == {"type": "text", "text": 'twenty degrees{"rain": "none"}'}


def test_clients_that_accept_only_json_get_a_stream_of_lines(http):
    body = {"model": "default", "messages": HELLO, "stream": True}
    answer = http.post("/v2/chat", json=body, headers={"accept": "application/json"})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    events = [json.loads(line) for line in answer.text.splitlines()]
    kinds = ["message-start", "content-start", "content-delta", "content-end", "message-end"]
    assert list(dict.fromkeys(event["type"] for event in events)) == kinds


def test_tools_that_must_be_strict_are_refused_if_their_schema_cannot_be_enforced(http):
    sets = {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}, "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "sets", "parameters": sets}}
    ask(http, tools=[tool], tool_choice="REQUIRED")
    body = {"model": "default", "messages": HELLO, "tools": [tool], "tool_choice": "REQUIRED", "strict_tools": True}
    refused = http.post("/v2/chat", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools.0.function.parameters")


@pytest.mark.parametrize(
    ("field", "value"),
    [("documents", ["a"]), ("logprobs", True), ("k", -1), ("p", 2), ("stop_sequences", [1]), ("tool_choice", "any")],
)
def test_errors_name_the_field_of_the_format(http, field, value):
    refused = http.post("/v2/chat", json={"model": "default", "messages": HELLO, field: value})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].split(".")[0] == field

"""Tests of the routes below /v1/responses: OpenAI's Responses format, on the echo engine."""

import json
import re

import httpx2
import openai
import pytest
from pydantic import BaseModel

from lmx_lab.server.responses.convert import convert_request, input_items
from lmx_lab.wire.responses import ResponsesRequest
from tests.support.asking import ENDLESS_TEXT
from tests.support.formats import Responses
from tests.support.labs import manager_of, serving, wait_until_idle
from tests.support.waiting import until

PATH = "/v1/responses"
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** " /[0-9]{100}/ "\\n"'}
CODE = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}"}
TOOLS = [
    {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
    {"type": "custom", "name": "patch", "description": "Change a file.", "format": GRAMMAR},
    {"type": "custom", "name": "code", "format": CODE},
    {"type": "namespace", "name": "mcp__files", "tools": [{"type": "function", "name": "look"}]},
    {"type": "web_search"},
]


def call(name, **arguments):
    """Return the message that the echo engine repeats as a tool call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def body(**changes):
    return {"model": "default", "input": "hello", "temperature": 0} | changes


def frames(http, **changes):
    """Return the data of all events of a stream."""
    response = http.post(PATH, json=body(stream=True, **changes))
    assert response.status_code == 200
    return Responses().frames(response.text)


@pytest.mark.parametrize(
    ("content", "changes", "expected"),
    [
        (call("patch", input='a\n"b"'), {}, {"type": "custom_tool_call", "name": "patch", "input": 'a\n"b"'}),
        (
            call("mcp__files__look"),
            {},
            {"type": "function_call", "name": "look", "namespace": "mcp__files", "arguments": "{}"},
        ),
        # A custom tool that is forced gets an input that its grammar generates.
        ("hello", {"tool_choice": {"type": "custom", "name": "patch"}}, {"type": "custom_tool_call", "name": "patch"}),
        (
            "abc",
            {"tool_choice": {"type": "custom", "name": "code"}},
            {"type": "custom_tool_call", "name": "code", "input": "abc"},
        ),
        (
            "hello",
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": TOOLS[:1]}},
            {"type": "function_call", "name": "clock"},
        ),
    ],
)
def test_a_stream_and_a_whole_response_have_the_calls_of_the_format(http, content, changes, expected):
    fields = {"input": content, "tools": TOOLS, **changes}
    whole, form = http.post(PATH, json=body(**fields)).json(), Responses()
    [item] = whole["output"]
    assert {name: item[name] for name in expected} == expected
    assert ("namespace" in item) == ("namespace" in expected)
    if item["name"] == "patch" and changes:
        assert item["call_id"].startswith("call_")
        assert re.fullmatch(r"\*\*\* [0-9]{100}\n", item["input"])
    assert form.comparable(form.assemble(frames(http, **fields))) == form.comparable(whole)


def test_a_conversation_is_converted_to_the_chat_format():
    items = [
        {"role": "developer", "content": "Use tools."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What time is it?"}]},
        {"role": "user", "content": "In UTC."},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "namespace": "mcp__files", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    ]
    request = ResponsesRequest.model_validate({"input": items, "instructions": "Be brief.", "tools": TOOLS})
    chat = convert_request(request, input_items(request)).chat
    messages = [message.model_dump(exclude_unset=True, exclude={"tool_calls"}) for message in chat.messages]
    assert messages == [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "What time is it?\n\nIn UTC."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    calls = [(each.id, each.function.name, each.function.arguments) for each in chat.messages[2].tool_calls or ()]
    assert calls == [("c1", "mcp__files__look", {"a": 1}), ("c2", "patch", {"input": "x"})]
    names = [tool.function.name for tool in chat.tools or ()]
    assert names == ["clock", "patch", "code", "mcp__files__look"]


def test_a_function_may_be_written_as_in_the_chat_format():
    function = {"name": "clock", "parameters": {"type": "object"}}
    choice = {"type": "function", "function": {"name": "clock"}}
    nested = {"input": "hi", "tools": [{"type": "function", "function": function}], "tool_choice": choice}
    flat = {
        "input": "hi",
        "tools": [{"type": "function", **function}],
        "tool_choice": {"type": "function", "name": "clock"},
    }
    requests = [ResponsesRequest.model_validate(fields) for fields in (nested, flat)]
    chats = [convert_request(request, input_items(request)).chat for request in requests]
    assert chats[0] == chats[1]
    assert chats[0].choice.function.name == "clock"


UNIQUE = {"type": "json_schema", "name": "a", "strict": True, "schema": {"type": "array", "uniqueItems": True}}
CLOCK_CALL = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"}


@pytest.mark.parametrize(
    ("changes", "status", "param", "message"),
    [
        ({"input": []}, 400, "input", "has no message"),
        ({"input": None}, 400, "input", "should be a valid"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 400, "input.0.id", "send the item itself"),
        ({"input": [CLOCK_CALL | {"arguments": "[" + "[]," * 60_000}]}, 400, "input", "50,000 lists and objects"),
        ({"input": [{"role": "user", "content": "x"}] * 5000}, 400, "input", "5000 items, the limit is 4096"),
        ({"previous_response_id": "resp_gone"}, 400, "previous_response_id", "send the whole conversation as input"),
        ({"conversation": "conv_1"}, 400, "conversation", "send previous_response_id, or the whole input"),
        ({"tools": [{"type": "function", "name": "a b"}]}, 400, "tools.0.name", "rename it"),
        ({"tool_choice": "required"}, 400, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": 5}}, 400, "tool_choice.type", "valid string"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, 400, "tool_choice", "names 'web_search'"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format.type", "text.format.type: is not a format"),
        (
            {"text": {"format": {"type": "json_schema", "schema": 1}}},
            400,
            "text.format.schema",
            "must be a JSON schema",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"title": "x" * 300_000}}}},
            400,
            "text.format.schema",
            "text.format.schema: has",
        ),
        ({"text": {"format": UNIQUE}}, 400, "text.format", "cannot be enforced"),
        ({"prompt": {"id": "pmpt_1"}}, 400, "prompt", "stored prompts (send instructions and input) are not supported"),
        ({"background": True, "stream": True}, 400, None, "leave one of them out"),
        ({"background": True, "store": False}, 400, None, "must be stored"),
        ({"model": "gpt-x"}, 404, "model", "gpt-x"),
    ],
)
def test_errors_name_the_field_and_the_next_step(http, changes, status, param, message):
    response = http.post(PATH, json=body(**changes))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert message in error["message"]


# Stored responses


@pytest.fixture(scope="module")
def client(lab):
    with openai.OpenAI(base_url=f"{lab.url}/v1", api_key="anything", max_retries=0) as client:
        yield client


def test_a_stored_response_is_continued_read_and_deleted(client):
    first = client.responses.create(model="echo", input="<think>hm</think>" + call("clock", zone="UTC"), tools=TOOLS)
    second = client.responses.create(
        model="echo",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": first.output[1].call_id, "output": "noon"}],
        metadata={"a": "b"},
    )
    assert (second.output_text, second.previous_response_id, second.metadata) == ("noon", first.id, {"a": "b"})
    assert client.responses.retrieve(second.id) == second
    third = client.responses.create(model="echo", previous_response_id=second.id, input="Thank you.", store=False)
    assert third.output_text == "Thank you."
    kinds = ["message", "reasoning", "function_call", "function_call_output"]
    items = client.responses.input_items.list(second.id, order="asc", limit=3)
    assert [item.type for item in items.data] == kinds[:3]
    assert [item.type for item in items] == kinds
    assert len({item.id for item in items}) == 4
    newest = client.responses.input_items.list(second.id)
    assert [item.type for item in newest] == kinds[::-1]
    client.responses.delete(second.id)
    for gone in (second.id, third.id):
        with pytest.raises(openai.NotFoundError, match="no stored response"):
            client.responses.retrieve(gone)
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as input"):
        client.responses.create(model="echo", previous_response_id=second.id, input="more")
    with pytest.raises(openai.BadRequestError, match="is not the id of an item"):
        client.responses.input_items.list(first.id, after="msg_0")
    with pytest.raises(openai.ConflictError, match="not generated in the background"):
        client.responses.cancel(first.id)
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        client.responses.retrieve(first.id, stream=True)


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {"type": None}, {}])
def test_items_of_stored_responses_are_found_by_their_ids(kind, http):
    first = http.post(PATH, json=body(input="one")).json()
    second = http.post(PATH, json=body(previous_response_id=first["id"], input="two")).json()
    asked = http.get(f"{PATH}/{second['id']}/input_items").json()["data"][0]["id"]
    answers = [first["output"][0]["id"], second["output"][0]["id"]]
    referred = [{**kind, "id": each} for each in (asked, *answers)]
    third = http.post(PATH, json=body(input=[*referred, {"role": "user", "content": "three"}])).json()
    shown = http.get(f"{PATH}/{third['id']}/input_items", params={"order": "asc"}).json()["data"]
    texts = [(item["role"], item["content"][0]["text"]) for item in shown]
    assert texts == [("user", "two"), ("assistant", "one"), ("assistant", "two"), ("user", "three")]
    counted = http.post(f"{PATH}/input_tokens", json=body(previous_response_id=third["id"], input=referred[:1])).json()
    assert counted["input_tokens"] > third["usage"]["input_tokens"]


def test_ids_that_clients_choose_and_items_of_deleted_responses_are_not_found(http):
    stored = http.post(PATH, json=body(input=[{"role": "user", "content": "one", "id": "msg_mine"}])).json()
    http.delete(f"{PATH}/{stored['id']}")
    for gone in ("msg_mine", stored["output"][0]["id"]):
        error = http.post(PATH, json=body(input=[{"type": "item_reference", "id": gone}])).json()["error"]
        assert (error["param"], f"the id '{gone}'" in error["message"]) == ("input.0.id", True)


class City(BaseModel):
    name: str
    days: int


def test_the_input_tokens_of_a_request_are_those_that_its_answer_reports(client):
    body = {"model": "echo", "input": "How salty is the sea?", "instructions": "Be brief."}
    first = client.responses.create(**body)
    assert client.responses.input_tokens.count(**body).input_tokens == first.usage.input_tokens
    follow = {"model": "echo", "input": "And the lake?", "previous_response_id": first.id}
    counted = client.responses.input_tokens.count(**follow)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(**follow).usage.input_tokens > first.usage.input_tokens


def test_helpers_of_openai_python_stream_and_parse(client):
    content = '<think>hm</think>{"name": "Rome", "days": 3}'
    with client.responses.stream(model="echo", input=content, text_format=City) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response()
    assert {"response.reasoning_summary_text.delta", "response.output_text.done", "response.completed"} <= kinds
    parsed = client.responses.parse(model="echo", input=content, text_format=City)
    assert streamed.output_parsed == parsed.output_parsed == City(name="Rome", days=3)
    tools = [openai.pydantic_function_tool(City)]
    with client.responses.stream(model="echo", input="x", tools=tools, tool_choice="required") as stream:
        output = stream.get_final_response().output
    assert isinstance(output[0].parsed_arguments, City)
    logprobs = client.responses.create(
        model="echo", input="one two", include=["message.output_text.logprobs"], top_logprobs=2
    )
    part = logprobs.output[0].content[0]
    assert "".join(token.token for token in part.logprobs) == part.text == "one two"
    assert {len(token.top_logprobs) for token in part.logprobs} == {2}


def test_a_response_in_the_background_ends_or_is_cancelled(client, lab):
    wait_until_idle(lab)
    done = client.responses.create(model="echo", input="one two", background=True)
    assert (done.status, done.output) == ("in_progress", [])
    until(lambda: client.responses.retrieve(done.id).status == "completed")
    assert client.responses.cancel(done.id).output_text == "one two"
    running = [client.responses.create(model="echo", input=ENDLESS_TEXT, background=True) for _ in range(2)]
    until(lambda: manager_of(lab).snapshot.active_requests == 2)
    with pytest.raises(openai.BadRequestError, match="is in_progress"):
        client.responses.create(model="echo", previous_response_id=running[0].id, input="more")
    assert client.responses.cancel(running[0].id).status == "cancelled"
    client.responses.delete(running[1].id)
    wait_until_idle(lab)
    assert client.responses.retrieve(running[0].id).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(running[1].id)


def test_a_response_in_the_background_that_fails_keeps_its_text(tmp_path):
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"text": "one two", "error": "broken", "code": "internal-error"}))
    with serving(tmp_path, "echo", echo_script=script) as lab, httpx2.Client(base_url=lab.url) as http:
        path = f"{PATH}/{http.post(PATH, json=body(background=True)).json()['id']}"
        until(lambda: http.get(path).json()["status"] != "in_progress")
        ended = http.get(path).json()
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")
    assert "broken" in ended["error"]["message"]
    (item,) = ended["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "one two")


@pytest.mark.slow
def test_a_server_stops_with_a_response_in_the_background(tmp_path):
    with serving(tmp_path, "echo", echo_tokens_per_s=100) as lab, httpx2.Client(base_url=lab.url) as http:
        assert http.post(PATH, json=body(input=ENDLESS_TEXT, background=True)).json()["status"] == "in_progress"
        until(lambda: manager_of(lab).snapshot.active_requests == 1)

"""Tests of POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages format, on the echo engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.notebook import Lab
from lmx_lab.server.messages import chat_request
from lmx_lab.wire.messages import MessagesRequest
from tests.flows.conftest import ENDLESS_TEXT, HELLO, serving, wait_until, wait_until_idle

PATH = "/v1/messages"
TOOLS = [{"name": "clock", "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}}}]
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 64, "messages": HELLO, "temperature": 0} | changes


def events(http: httpx2.Client, **changes: Any) -> list[dict[str, Any]]:
    """Return the data of all events of a stream; each has the name of its type."""
    with http.stream("POST", PATH, json=body(stream=True, **changes)) as response:
        assert response.status_code == 200
        text = "".join(response.iter_text())
    found = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in found]
    assert [name for name, _ in found] == [f"event: {event['type']}" for event in data]
    return data


def joined(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the blocks of a stream as a client assembles them."""
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in data:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                texts.append("")
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                kind, text = next((name, event["delta"][name]) for name in event["delta"] if name != "type")
                assert (
                    event["delta"]["type"]
                    == {
                        "text": "text_delta",
                        "thinking": "thinking_delta",
                        "partial_json": "input_json_delta",
                    }[kind]
                )
                texts[-1] += text
    names = {"text": "text", "thinking": "thinking"}
    for block, text in zip(blocks, texts, strict=True):
        block[names.get(block["type"], "input")] = text if block["type"] in names else json.loads(text)
    return blocks


@pytest.mark.parametrize(
    ("content", "changes", "kinds", "end"),
    [
        ("hello", {}, ["text"], ("end_turn", None)),
        ("one two three", {"max_tokens": 2}, ["text"], ("max_tokens", None)),
        ("one two three", {"stop_sequences": ["zzz", "two"]}, ["text"], ("stop_sequence", "two")),
        ("<think>hm</think>one", {}, ["thinking", "text"], ("end_turn", None)),
        ("<think>hm</think>one", {"thinking": {"type": "disabled"}}, ["text"], ("end_turn", None)),
        (CALL, {"tools": TOOLS}, ["tool_use"], ("tool_use", None)),
        ("hello", {"tools": TOOLS, "tool_choice": {"type": "any"}}, ["tool_use"], ("tool_use", None)),
        ("hello", {"tools": TOOLS, "tool_choice": {"type": "none"}}, ["text"], ("end_turn", None)),
        ("hello", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "clock"}}, ["tool_use"], ("tool_use", None)),
    ],
)
def test_a_stream_has_the_blocks_of_the_whole_answer(
    http: httpx2.Client, content: str, changes: dict[str, Any], kinds: list[str], end: tuple[str, str | None]
) -> None:
    messages = [{"role": "user", "content": content}]
    whole = http.post(PATH, json=body(messages=messages, **changes)).json()
    assert [block["type"] for block in whole["content"]] == kinds
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "echo")
    assert (whole["stop_reason"], whole["stop_sequence"]) == end
    data = events(http, messages=messages, **changes)
    assert [event["type"] for event in data[:2]] == ["message_start", "ping"]
    assert data[0]["message"]["content"] == []
    assert [event["type"] for event in data[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert data[-2]["delta"] == {"stop_reason": end[0], "stop_sequence": end[1]}
    blocks = [{**block, "id": ""} for block in joined(data)]
    assert blocks == [{**block, "id": ""} for block in whole["content"]]
    usage = data[-2]["usage"]
    assert usage["output_tokens"] == whole["usage"]["output_tokens"]
    prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt_tokens == data[0]["message"]["usage"]["input_tokens"]
    given = {name: value for name, value in body(messages=messages, **changes).items() if name in ("messages", "tools")}
    if changes.get("tool_choice", {}).get("type") != "none":
        assert http.post(f"{PATH}/count_tokens", json=given).json() == {"input_tokens": prompt_tokens}


def test_a_conversation_is_converted_to_the_chat_format() -> None:
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


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}


@pytest.mark.parametrize(
    ("changes", "status", "kind", "message"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages: has 0 items"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "content.0: images"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, 400, "invalid_request_error", "the type 'x'"),
        ({"messages": [{"role": "user", "content": [{}]}]}, 400, "invalid_request_error", "type: Field required"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": "H"}]},
            400,
            "invalid_request_error",
            "cannot continue",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c9", "content": "x"}]}]},
            400,
            "invalid_request_error",
            "'c9' does not answer a call",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "name the tool"),
        (
            {"messages": [{"role": "user", "content": "a " * 40_000}]},
            400,
            "invalid_request_error",
            "prompt is too long: ",
        ),
        ({"model": "claude-x"}, 404, "not_found_error", "claude-x"),
        ({"temperature": "1"}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": ["x" * 2000]}, 400, "invalid_request_error", "stop_sequences"),
    ],
)
def test_errors_have_the_form_of_the_format(
    http: httpx2.Client, changes: dict[str, Any], status: int, kind: str, message: str
) -> None:
    response = http.post(PATH, json=body(**changes))
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert message in error["error"]["message"]
    assert error["request_id"] == response.headers["x-request-id"]


def test_ignored_fields_are_named_in_a_header(http: httpx2.Client) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    fields = {"metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 9}, "bad\r\nname": 1}
    response = http.post(PATH, json=body(**fields, tools=[search]), params={"beta": "true"})
    assert response.status_code == 200
    assert response.headers["x-lmx-ignored"] == "metadata, tools.web_search, thinking.budget_tokens"
    assert "x-lmx-ignored" not in http.post(PATH, json=body()).headers


def test_a_failing_answer_ends_with_an_error_event(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"text": "one two", "error": "broken", "code": "internal-error"}\n')
    with serving(tmp_path, "echo", echo_script=script) as lab, httpx2.Client(base_url=lab.url) as http:
        data = events(http)
    assert joined(data) == [{"type": "text", "text": "one two"}]
    assert data[-1]["type"] == "error"
    assert data[-1]["error"]["type"] == "api_error"
    assert "broken" in data[-1]["error"]["message"]


def test_the_key_is_accepted_in_the_header_of_the_format(echo_home: Path) -> None:
    with serving(echo_home, "echo", api_key="secret") as lab, httpx2.Client(base_url=lab.url) as http:
        answers = {key: http.post(PATH, json=body(), headers={"x-api-key": key}) for key in ("secret", "wrong")}
        both = http.post(PATH, json=body(), headers={"x-api-key": "secret", "authorization": "Bearer wrong"})
    assert answers["secret"].status_code == 200
    assert (answers["wrong"].status_code, both.status_code) == (401, 401)
    assert answers["wrong"].json()["error"]["type"] == "authentication_error"


def test_a_document_of_text_is_read_and_other_blocks_are_refused_by_their_place() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A sea."}}
    results = [{"type": "tool_result", "tool_use_id": "c1", "content": [document]}]
    request = MessagesRequest.model_validate({"messages": [{"role": "user", "content": [document, *results]}]})
    messages = chat_request(request).messages
    assert [(message.role, message.content) for message in messages] == [("tool", "A sea."), ("user", "A sea.")]
    call = {"type": "tool_use", "id": "c1", "name": "clock", "input": {}}
    request = MessagesRequest.model_validate({"messages": [{"role": "user", "content": [call]}]})
    with pytest.raises(InvalidRequestError, match=r"messages\.0\.content\.0: tool_use is not valid in a message of"):
        chat_request(request)


@pytest.mark.slow
def test_an_answer_ends_if_its_client_disconnects(http: httpx2.Client, lab: Lab) -> None:
    wait_until_idle(lab)
    before = lab.engine.snapshot.output_tokens
    long = body(stream=True, max_tokens=30_000, messages=[{"role": "user", "content": ENDLESS_TEXT}])
    with http.stream("POST", PATH, json=long) as response:
        assert response.status_code == 200
        wait_until(lambda: lab.engine.snapshot.output_tokens > before)
    wait_until_idle(lab)
    assert 0 < lab.engine.snapshot.output_tokens - before < 10_000

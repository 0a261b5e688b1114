"""The cases in which the compliance suite of Open Responses tests a server, on the echo engine.

They follow version 2026-04-24 of the specification at https://www.openresponses.org. An image is refused, because no
engine reads images; the other cases of the suite pass.
"""

import json
from contextlib import ExitStack
from itertools import groupby

import openai
import pytest
from websockets.sync.client import connect

from lmx_lab.server.responses.convert import convert_request, input_items
from lmx_lab.server.translate import generation_request
from lmx_lab.wire.responses import ResponsesRequest
from tests.support.asking import ENDLESS_TEXT, error_of
from tests.support.formats import named_events
from tests.support.labs import manager_of, wait_until_idle
from tests.support.waiting import until

PATH = "/v1/responses"
REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier"),
    "prompt_cache_key",
}
"""The fields that a response must have."""
NUMBERS = ("top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature")
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
"""Types of the events at the end of an answer."""
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'


def message(role, content, **fields):
    return {"type": "message", "role": role, "content": content, **fields}


CASES = {
    "basic": {"input": [message("user", "Say hello in exactly 3 words.")]},
    "phases": {
        "input": [
            message("assistant", "The saved number is needed.", phase="commentary"),
            message("assistant", "The number is four.", phase="final_answer"),
            message("user", "Which number?"),
        ]
    },
    "system prompt": {"input": [message("system", "You are a pirate."), message("user", "Say hello.")]},
    "tool call": {"input": [message("user", CALL)], "tools": [TOOL]},
    "turns": {
        "input": [message("user", "I am Alice."), message("assistant", "Hello Alice!"), message("user", "Who am I?")]
    },
}


def check(response, kind="message"):
    """Check the fields of a completed response and of its items, and return it."""
    assert response.keys() >= REQUIRED
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    assert all(isinstance(response[name], int | float) for name in NUMBERS)
    assert response["usage"].keys() >= {"input_tokens_details", "output_tokens_details", "total_tokens"}
    for tool in response["tools"]:
        assert tool.keys() == {"type", "name", "description", "parameters", "strict"}
    (item,) = response["output"]
    assert (item["type"], item["status"]) == (kind, "completed")
    return response


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_response_has_all_required_fields(http, case, stream):
    answer = http.post(PATH, json={"model": "echo", "stream": stream, **CASES[case]})
    assert answer.status_code == 200
    kind = "function_call" if case == "tool call" else "message"
    if not stream:
        check(answer.json(), kind)
        return
    events = named_events(answer.text)
    assert all(event["response"].keys() >= REQUIRED for event in events if "response" in event)
    assert events[-1]["type"] == "response.completed"
    check(events[-1]["response"], kind)


def test_fields_of_the_request_are_returned_with_the_response(http):
    given = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "max_tool_calls": 3,
        "safety_identifier": "someone",
        "prompt_cache_key": "key",
        "user": "me",
        "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "get_weather"}]},
        "tools": [TOOL | {"strict": True, "description": "Says how the weather is."}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}, "verbosity": "low"},
    }
    answer = http.post(PATH, json={"model": "echo", "input": "{}", **given})
    assert answer.headers["x-lmx-ignored"].split(", ") == [
        *("max_tool_calls", "safety_identifier", "prompt_cache_key", "user", "text.verbosity")
    ]
    response = check(answer.json())
    given["tool_choice"]["mode"] = "auto"
    given["text"]["format"] |= {"description": None, "strict": False}
    assert {name: response[name] for name in given} == given


@pytest.mark.parametrize(
    ("field", "value"),
    [("presence_penalty", 2.5), ("frequency_penalty", -3), ("max_tool_calls", 0), ("safety_identifier", 5)],
)
def test_an_invalid_value_is_named(http, field, value):
    error = error_of(http.post(PATH, json={"model": "echo", "input": "a", field: value}), 400, "invalid-request")
    assert error["param"] == field


def test_penalties_reach_the_engine():
    body = ResponsesRequest.model_validate({"input": "a", "presence_penalty": 0.5, "frequency_penalty": -0.25})
    sampling = generation_request(convert_request(body, input_items(body)).chat).sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)


# Compaction

REFERENCE = {"type": "item_reference", "id": "msg_1"}
TALK = [
    message("user", "We launch on Tuesday."),
    message("assistant", "Understood."),
    {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    {"role": "user", "content": [{"type": "input_text", "text": "And tell support first."}]},
]


def compact(http, **fields):
    return http.post(f"{PATH}/compact", json={"model": "echo", **fields})


def test_a_compaction_keeps_the_messages_of_the_user_and_summarizes_the_rest(http):
    answer = compact(http, input=TALK, instructions="Be brief.", prompt_cache_key="key").json()
    assert answer.keys() == {"id", "object", "created_at", "output", "usage"}
    assert (answer["object"], answer["usage"]["total_tokens"] > 0) == ("response.compaction", True)
    *kept, summary = answer["output"]
    assert [(item["type"], item["role"], item["status"], item["content"]) for item in kept] == [
        ("message", "user", "completed", [{"type": "input_text", "text": text}])
        for text in ("We launch on Tuesday.", "And tell support first.")
    ]
    assert len({item["id"] for item in answer["output"]}) == 3
    assert (summary["type"], summary["id"][:4]) == ("compaction", "cmp_")
    # The echo engine repeats the last message, which ends with the request for a summary.
    body = ResponsesRequest.model_validate({"input": [*answer["output"], message("user", "Go on.")]})
    (merged,) = convert_request(body, input_items(body)).chat.messages
    texts = str(merged.content).split("\n\n")
    assert texts[:3] == ["We launch on Tuesday.", "And tell support first.", "Summary of the conversation so far:"]
    assert texts[-2].startswith("Summarize this conversation")
    assert texts[-1] == "Go on."
    again = http.post(PATH, json={"model": "echo", "input": [*answer["output"], message("user", "Go on.")]}).json()
    assert again["output"][0]["content"][0]["text"].endswith("Go on.")


def test_a_stored_conversation_is_compacted(http):
    first = http.post(PATH, json={"model": "echo", "input": "We launch on Tuesday."}).json()
    answer = compact(http, previous_response_id=first["id"]).json()
    assert [item["type"] for item in answer["output"]] == ["message", "compaction"]
    assert answer["output"][0]["content"][0]["text"] == "We launch on Tuesday."


def test_a_summary_of_another_server_is_shown_as_unreadable():
    for content in ("gAAAAABpM0Yj-...=", "aGVsbG8="):
        items = [{"type": "compaction", "encrypted_content": content}, message("user", "Go on.")]
        body = ResponsesRequest.model_validate({"input": items})
        (merged,) = convert_request(body, input_items(body)).chat.messages
        assert str(merged.content) == "[summary of an earlier conversation, not readable on this server]\n\nGo on."


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": TALK}, 400, "model"),
        ({"model": None, "input": TALK}, 400, "model"),
        ({"model": "echo"}, 400, "input"),
        ({"model": "echo", "input": []}, 400, "input"),
        ({"model": "echo", "input": [REFERENCE]}, 400, "input.0.id"),
        ({"model": "echo", "previous_response_id": "resp_gone"}, 400, "previous_response_id"),
        ({"model": "gpt-x", "input": TALK}, 404, "model"),
    ],
)
def test_errors_of_a_compaction_name_the_field(http, fields, status, param):
    answer = http.post(f"{PATH}/compact", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


# The WebSocket


@pytest.fixture
def connected(lab):
    """Return a function that opens a connection."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(connect(f"ws://127.0.0.1:{lab.server.port}{PATH}", proxy=None))


def create(**fields):
    return {"type": "response.create", "model": "echo", **fields}


def events_of(client, request):
    """Send a request, and return its events."""
    client.send(request if isinstance(request, str) else json.dumps(request))
    events = []
    while not events or events[-1]["type"] not in ENDS:
        events.append(json.loads(client.recv(timeout=60)))
    return events


def text_of(events):
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return check(events[-1]["response"])["output"][0]["content"][0]["text"]


def error_in(events):
    (event,) = events
    assert (event["type"], event["status"]) == ("error", 400)
    return event["error"]["code"], event["error"]["param"]


@pytest.mark.parametrize("case", CASES)
def test_a_websocket_receives_the_events_of_a_stream(http, connected, case):
    events = events_of(connected(), create(**CASES[case]))
    check(events[-1]["response"], "function_call" if case == "tool call" else "message")
    streamed = http.post(PATH, json={"model": "echo", "stream": True, **CASES[case]}).text
    # How many tokens are sent together differs.
    both = (events, named_events(streamed))
    ours, theirs = ([kind for kind, _ in groupby(event["type"] for event in each)] for each in both)
    assert ours == theirs


def test_a_websocket_answers_several_requests_in_their_order(connected):
    client = connected()
    for text in ("first", "second", "third"):
        client.send(json.dumps(create(input=text, store=False)))
    assert text_of(events_of(client, create(input="fourth"))) == "first"
    for text in ("second", "third", "fourth"):
        events = []
        while not events or events[-1]["type"] != "response.completed":
            events.append(json.loads(client.recv(timeout=60)))
        assert text_of(events) == text


def test_a_response_that_is_not_stored_is_continued_on_its_connection_only(http, connected):
    client = connected()
    first = events_of(client, create(input="The word is cobalt.", store=False))[-1]["response"]
    second = events_of(client, create(input="And now?", store=False, previous_response_id=first["id"]))
    assert text_of(second) == "And now?"
    assert second[-1]["response"]["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    other = connected()
    last = second[-1]["response"]["id"]
    missing = events_of(other, create(input="And now?", store=False, previous_response_id=last))
    assert error_in(missing) == ("previous_response_not_found", "previous_response_id")
    assert text_of(events_of(other, create(input="again", store=False))) == "again"
    assert http.get(f"{PATH}/{last}").status_code == 404
    # Only the last response is kept.
    missing = events_of(client, create(input="And now?", store=False, previous_response_id=first["id"]))
    assert error_in(missing) == ("previous_response_not_found", "previous_response_id")


def test_an_item_of_a_response_that_is_not_stored_is_found_on_its_connection_only(http, connected):
    client = connected()
    first = events_of(client, create(input="The word is cobalt.", store=False))[-1]["response"]
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    error_of(http.post(PATH, json={"input": [reference]}), 400, "invalid-request")
    assert text_of(events_of(client, create(input=[reference, message("user", "And now?")], store=False))) == "And now?"


def test_a_stored_response_is_continued_over_http_and_on_other_connections(http, connected):
    first = events_of(connected(), create(input="The word is cobalt."))[-1]["response"]
    assert http.get(f"{PATH}/{first['id']}").json() == first
    assert text_of(events_of(connected(), create(input="And now?", previous_response_id=first["id"]))) == "And now?"
    body = {"model": "echo", "input": "And now?", "previous_response_id": first["id"]}
    assert http.post(PATH, json=body).status_code == 200


def test_a_response_without_an_answer_is_continued(http, connected):
    client = connected()
    warmed = events_of(client, create(input="The word is cobalt.", generate=False, store=False))
    assert not [event["type"] for event in warmed if "output" in event["type"]]
    first = warmed[-1]["response"]
    assert (warmed[-1]["type"], first["status"], first["output"]) == ("response.completed", "completed", [])
    fields = create(input="And now?", previous_response_id=first["id"], store=False)
    second = events_of(client, fields)[-1]["response"]
    assert second["output"][0]["content"][0]["text"] == "The word is cobalt.\n\nAnd now?"
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
    whole = http.post(PATH, json={"input": "hello", "generate": False}).json()
    assert (whole["status"], whole["output"]) == ("completed", [])


def test_a_request_that_fails_ends_the_chain_that_it_continues(connected):
    client = connected()
    first = events_of(client, create(input="The word is ember.", store=False))[-1]["response"]["id"]
    failed = events_of(client, create(input=[REFERENCE], store=False, previous_response_id=first))
    assert error_in(failed) == ("invalid-request", "input.0.id")
    again = events_of(client, create(input="And now?", store=False, previous_response_id=first))
    assert error_in(again) == ("previous_response_not_found", "previous_response_id")


def test_a_compacted_conversation_is_continued_over_a_websocket(http, connected):
    output = compact(http, input=TALK).json()["output"]
    events = events_of(connected(), create(input=[*output, message("user", "Go on.")], store=False, tools=[]))
    assert text_of(events).endswith("Go on.")


def test_a_prompt_that_is_too_long_fails_as_in_other_streams(connected):
    events = events_of(connected(), create(input="a " * 40_000))
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ("no JSON", None),
        ({"type": "response.cancel", "input": "a"}, "type"),
        ({"input": "a"}, "type"),
        (create(), "input"),
        (create(input="a", background=True), "background"),
        (create(input="a", temperature=3), "temperature"),
    ],
)
def test_a_connection_remains_open_after_an_error(connected, request_, param):
    client = connected()
    assert error_in(events_of(client, request_)) == ("invalid-request", param)
    assert text_of(events_of(client, create(input="hello"))) == "hello"


def test_a_disconnect_ends_the_answer(lab, connected):
    client = connected()
    client.send(json.dumps(create(input=ENDLESS_TEXT)))
    until(lambda: manager_of(lab).snapshot.active_requests == 1)
    client.close()
    wait_until_idle(lab)


# openai-python uses websockets in a way that its latest version warns about.
@pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning")
def test_openai_python_connects(lab):
    with (
        openai.OpenAI(base_url=f"{lab.url}/v1", api_key="anything") as client,
        client.responses.connect() as connection,
    ):
        for text in ("one", "two"):
            connection.response.create(model="echo", input=text, store=False)
            for event in connection:
                if event.type == "response.completed":
                    break
            assert event.response.output[0].content[0].text == text

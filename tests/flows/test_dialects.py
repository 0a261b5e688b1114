"""Tests that all request formats give the same answer to the same greedy request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from tests.flows.conftest import SEA

PROMPT = SEA[0]["content"]
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
CLOCK = {"name": "clock", "description": "Tells the time."}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an answer consists of, in every format."""

    text: str
    calls: tuple[tuple[str, Any], ...]
    """Name and arguments of each tool call."""
    finish: str
    """``stop``, ``length`` or ``tool_calls``."""
    usage: tuple[int, int]
    """Number of tokens of the prompt and of the answer."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A format of requests and answers."""

    path: str
    request: Callable[[int, bool], dict[str, Any]]
    """Returns the body of a greedy request with a token limit, with or without a required tool."""
    read: Callable[[Any], Answer]
    """Reads the body of a whole answer."""
    read_stream: Callable[[list[Any]], Answer]
    """Reads the JSON of all events of a stream."""
    can_require_tools: bool = True


# Chat completions


def chat_request(max_tokens: int, tool: bool) -> dict[str, Any]:
    tools = {"tools": [{"type": "function", "function": CLOCK | {"parameters": PARAMETERS}}], "tool_choice": "required"}
    return {"max_tokens": max_tokens, "messages": SEA} | (tools | {"parallel_tool_calls": False} if tool else {})


def chat_answer(answer: Any) -> Answer:
    [choice] = answer["choices"]
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    return Answer(
        text=choice["message"]["content"] or "",
        calls=tuple((function["name"], json.loads(function["arguments"])) for function in functions),
        finish=choice["finish_reason"],
        usage=(answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]),
    )


def chat_stream(chunks: list[Any]) -> Answer:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    functions = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls") or ()]
    arguments = "".join(function["arguments"] for function in functions)
    names = [function["name"] for function in functions if "name" in function]
    usage = chunks[-1]["usage"]
    return Answer(
        text="".join(choice["delta"].get("content") or "" for choice in choices),
        calls=tuple((name, json.loads(arguments)) for name in names),
        finish=choices[-1]["finish_reason"],
        usage=(usage["prompt_tokens"], usage["completion_tokens"]),
    )


# Messages

STOP_REASONS = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def messages_request(max_tokens: int, tool: bool) -> dict[str, Any]:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    tools = {"tools": [CLOCK | {"input_schema": PARAMETERS}], "tool_choice": choice}
    return {"max_tokens": max_tokens, "messages": SEA} | (tools if tool else {})


def messages_usage(usage: Any) -> tuple[int, int]:
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]


def messages_answer(answer: Any) -> Answer:
    blocks = answer["content"]
    return Answer(
        text="".join(block["text"] for block in blocks if block["type"] == "text"),
        calls=tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"),
        finish=STOP_REASONS[answer["stop_reason"]],
        usage=messages_usage(answer["usage"]),
    )


def messages_stream(events: list[Any]) -> Answer:
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    arguments = "".join(delta.get("partial_json", "") for delta in deltas)
    end = next(event for event in events if event["type"] == "message_delta")
    return Answer(
        text="".join(delta.get("text", "") for delta in deltas),
        calls=tuple((block["name"], json.loads(arguments)) for block in started if block["type"] == "tool_use"),
        finish=STOP_REASONS[end["delta"]["stop_reason"]],
        usage=messages_usage(end["usage"]),
    )


# Responses


def responses_request(max_tokens: int, tool: bool) -> dict[str, Any]:
    tools = {"tools": [CLOCK | {"type": "function", "parameters": PARAMETERS}], "tool_choice": "required"}
    fields = {"max_output_tokens": max_tokens, "input": PROMPT}
    return fields | (tools | {"parallel_tool_calls": False} if tool else {})


def responses_answer(answer: Any) -> Answer:
    items = answer["output"]
    calls = [item for item in items if item["type"] == "function_call"]
    finish = "length" if answer["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return Answer(
        text="".join(part["text"] for item in items if item["type"] == "message" for part in item["content"]),
        calls=tuple((call["name"], json.loads(call["arguments"])) for call in calls),
        finish=finish,
        usage=(answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]),
    )


def responses_stream(events: list[Any]) -> Answer:
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    answer = responses_answer(events[-1]["response"])
    assert "".join(event["delta"] for event in deltas) == answer.text
    return answer


# Ollama


def ollama_request(max_tokens: int, tool: bool) -> dict[str, Any]:
    assert not tool
    return {"options": {"temperature": 0, "num_predict": max_tokens}, "messages": SEA}


def ollama_answer(answer: Any) -> Answer:
    return ollama_stream([answer])


def ollama_stream(lines: list[Any]) -> Answer:
    messages = [line["message"] for line in lines]
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    end = lines[-1]
    return Answer(
        text="".join(message["content"] for message in messages),
        calls=tuple((function["name"], function["arguments"]) for function in functions),
        finish="tool_calls" if functions else end["done_reason"],
        usage=(end["prompt_eval_count"], end["eval_count"]),
    )


DIALECTS: Mapping[str, Dialect] = {
    "chat completions": Dialect(
        path="/v1/chat/completions", request=chat_request, read=chat_answer, read_stream=chat_stream
    ),
    "Messages": Dialect(
        path="/v1/messages", request=messages_request, read=messages_answer, read_stream=messages_stream
    ),
    "Responses": Dialect(
        path="/v1/responses", request=responses_request, read=responses_answer, read_stream=responses_stream
    ),
    "Ollama": Dialect(
        path="/api/chat", request=ollama_request, read=ollama_answer, read_stream=ollama_stream, can_require_tools=False
    ),
}


def json_of_events(text: str) -> list[Any]:
    """Return the JSON of server-sent events, or of the lines of a stream without them."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize(
    ("max_tokens", "tool", "finish"), [(64, False, "stop"), (5, False, "length"), (64, True, "tool_calls")]
)
def test_all_formats_give_the_same_answer(http: httpx2.Client, max_tokens: int, tool: bool, finish: str) -> None:
    answers: dict[str, Answer] = {}
    for name, dialect in DIALECTS.items():
        if tool and not dialect.can_require_tools:
            continue
        body = {"model": "default", "temperature": 0, **dialect.request(max_tokens, tool)}
        answers[name] = dialect.read(http.post(dialect.path, json=body | {"stream": False}).json())
        usage = {"stream_options": {"include_usage": True}} if name == "chat completions" else {}
        streamed = http.post(dialect.path, json=body | {"stream": True} | usage)
        answers[f"{name}, streamed"] = dialect.read_stream(json_of_events(streamed.text))
    expected = answers["chat completions"]
    assert expected.finish == finish
    assert bool(expected.calls) is tool
    assert answers == dict.fromkeys(answers, expected)

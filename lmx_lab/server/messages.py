"""The routes ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``: Anthropic's Messages format.

A request is converted to one of the chat format, so that both formats have the same limits, tools and answers. The
events of a stream are in the order in which anthropic-python and Claude Code require them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from lmx_lab.errors import InvalidRequestError, LabError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.errors import status_of
from lmx_lab.http.openapi import event_stream
from lmx_lab.http.streaming import named_event, while_connected
from lmx_lab.server.answers import AnswerRequest, AnswerWriter, json_response, respond
from lmx_lab.server.convert import (
    ChatHistory,
    FieldNames,
    call_arguments,
    content_texts,
    function_tool,
    newest_question,
    part_text,
)
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import MESSAGES_ERRORS
from lmx_lab.server.translate import generation_request
from lmx_lab.values.outputs import Delta, GenerationReport, merge_tool_calls
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.errors import ErrorDetail, validated
from lmx_lab.wire.messages import (
    CountRequest,
    InputMessage,
    Message,
    MessageEvent,
    MessagesError,
    MessagesErrorDetail,
    MessagesRequest,
    MessagesUsage,
    OtherBlock,
    StopReason,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolResultBlock,
    ToolUseBlock,
)

PING = named_event("ping", '{"type":"ping"}')
NAMES = FieldNames(
    {
        "continue_final_message": "messages",
        "tools.*.function.parameters": "tools.*.input_schema",
        "tools.*.function": "tools.*",
        "tool_choice.function": "tool_choice",
        "reasoning_effort": "thinking",
        "stop": "stop_sequences",
        "response_format.json_schema.schema": "output_config.format.schema",
        "response_format": "output_config.format",
        "messages.tool_call_id": "messages.content.tool_use_id",
    }
)
"""Fields of the Messages format, by the chat format's fields that errors name."""
TOOL_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
STOP_REASONS: Mapping[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status; others are ``api_error`` from 500, and ``invalid_request_error`` below."""


def messages_routes(service: InferenceService) -> APIRouter:
    """Return the router of ``/v1/messages``."""
    description = "A message or, with `stream: true`, its named events. An error is sent as the event `error`"
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    @router.post(
        "/v1/messages",
        response_model=Message,
        responses={200: event_stream(MessageEvent, MessagesError, description=description), **MESSAGES_ERRORS},
    )
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation in the Messages format, completely or with `stream: true` as named events."""
        with NAMES.in_errors():
            chat = await asyncio.to_thread(chat_request, body)
            prompt = generation_request(chat)
        wanted = AnswerRequest(
            prompts=[prompt],
            writer=lambda model, _: MessageWriter(model),
            stream=bool(body.stream),
            ignored=body.ignored(),
            names=NAMES,
        )
        return await respond(service, request, wanted)

    @router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=MESSAGES_ERRORS)
    async def count_tokens(body: CountRequest, request: Request) -> Response:
        """Count the tokens of a conversation, with its tools, as the model reads them."""
        with NAMES.in_errors():
            chat = await asyncio.to_thread(chat_request, body)
            wanted = replace(generation_request(chat), caller=service.caller_of(request))
            count = TokenCount(input_tokens=len(await while_connected(request, service.manager.encode(wanted))))
        return json_response(count.model_dump_json(), body.ignored())

    return router


def messages_error(detail: ErrorDetail, status: int) -> MessagesError:
    """Convert an error to the Messages format."""
    default = "api_error" if status >= 500 else "invalid_request_error"
    error = MessagesErrorDetail(type=ERROR_TYPES.get(status, default), message=detail.message, code=detail.code)
    return MessagesError(error=error, request_id=detail.request_id)


# Requests


def chat_request(body: CountRequest) -> ChatRequest:
    """Convert a request to the chat format.

    Raises:
        InvalidRequestError: a block cannot be read, or the request exceeds a limit of the chat format.
    """
    tools = [
        function_tool(tool.name or "", tool.description, tool.input_schema, strict=tool.strict)
        for tool in body.tools or ()
        if tool.input_schema is not None
    ]
    history = ChatHistory()
    system = [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]
    # Claude Code adds this block. It differs in every request, so a prompt that contained it would never be in the
    # prefix cache.
    if kept := [text for text in system if not text.lstrip().startswith("x-anthropic-billing-header:")]:
        history.add("system", kept)
    roles = []
    for message in body.messages:
        blocks = [] if isinstance(message.content, str | None) else message.content
        has_only_results = bool(blocks) and all(isinstance(block, ToolResultBlock) for block in blocks)
        roles.append("tool" if has_only_results else message.role)
    newest = newest_question(roles)
    for number, message in enumerate(body.messages):
        _add_message(history, message, f"messages.{number}", is_newest=number == newest)
    fields: dict[str, Any] = {"model": body.model, "messages": history.messages()}
    if (last := fields["messages"][-1]).role == "assistant" and not last.calls:
        fields["continue_final_message"] = True
    if tools:
        fields["tools"] = tools
    # Without tools that the model can call, a call cannot be required: the error is that of the chat format.
    if (choice := body.tool_choice) is not None and (tools or choice.type in ("any", "tool")):
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else TOOL_CHOICES[choice.type]
        # A tool that is required by its name is called once.
        fields["parallel_tool_calls"] = choice.type != "tool" and choice.disable_parallel_tool_use is not True
    if body.thinking is not None and body.thinking.type == "disabled":
        fields["reasoning_effort"] = "none"
    if (wanted := body.required_format) is not None:
        named = {"name": "answer", "schema": wanted.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    if isinstance(body, MessagesRequest):
        others = {
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences or None,
        }
        fields |= {"max_tokens": body.max_tokens}
        # The format's own default of the temperature is 1.
        fields |= {"temperature": 1.0} | {name: value for name, value in others.items() if value is not None}
    return validated(ChatRequest, fields)


def _add_message(history: ChatHistory, message: InputMessage, place: str, *, is_newest: bool) -> None:
    """Add a message to the history: first its tool results, then the rest."""
    if isinstance(message.content, str | None):
        history.add(message.role, [message.content or ""])
        return
    has_results = any(isinstance(block, ToolResultBlock) for block in message.content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[ToolUseBlock, str]] = []
    for number, block in enumerate(message.content):
        at = f"{place}.content.{number}"
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock() if message.role == "assistant":
                thoughts.append(block.thinking)
            case ToolUseBlock() if message.role == "assistant":
                calls.append((block, at))
            case ToolResultBlock() if message.role == "user":
                history.add_result(block.tool_use_id, content_texts(block.content or ""))
            case OtherBlock():
                # An image beside results of tools is usually a part of one of them.
                texts.append(part_text(block, asked_at=at if is_newest and not has_results else None))
            case _:
                raise InvalidRequestError(
                    f"{at}: {block.type} is not valid in a message of the {message.role}", param=at
                )
    if texts or thoughts or calls or not has_results:
        history.add(message.role, texts, thoughts=thoughts)
    for call, at in calls:
        history.add_call(call.id, call.name, call.input, place=at)


# Answers


class MessageWriter(AnswerWriter):
    """Writes one answer in the Messages format."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"msg_{secrets.token_hex(12)}"
        self._index = -1
        self._open = ""
        """Type of the block that has begun and not ended."""

    def whole(self, parts: Sequence[Sequence[tuple[Delta, GenerationReport]]]) -> str:
        [[(delta, report)]] = parts
        content: list[dict[str, Any]] = []
        if delta.reasoning:
            content.append({"type": "thinking", "thinking": delta.reasoning, "signature": ""})
        if delta.text or not (content or delta.tool_calls):
            content.append({"type": "text", "text": delta.text})
        content += [
            {"type": "tool_use", "id": call.id or "", "name": call.name or "", "input": call_arguments(call)}
            for call in merge_tool_calls(delta.tool_calls)
        ]
        return Message(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=_stop_reason(report),
            stop_sequence=report.stop_sequence,
            usage=_usage(report),
        ).model_dump_json()

    def begin(self, index: int, prompt_tokens: int) -> Iterator[str]:
        message = Message(
            id=self._id,
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=MessagesUsage(input_tokens=prompt_tokens, output_tokens=0),
        )
        yield named_event("message_start", f'{{"type":"message_start","message":{message.model_dump_json()}}}')
        yield PING

    def delta(self, index: int, delta: Delta) -> Iterator[str]:
        if delta.reasoning:
            yield from self._begin("thinking", '{"type":"thinking","thinking":"","signature":""}')
            yield self._part("thinking_delta", "thinking", delta.reasoning)
        if delta.text:
            yield from self._begin("text", '{"type":"text","text":""}')
            yield self._part("text_delta", "text", delta.text)
        for call in delta.tool_calls:
            if call.name is not None:
                block = {"type": "tool_use", "id": call.id or "", "name": call.name, "input": {}}
                yield from self._end_block()
                yield from self._begin("tool_use", to_json(block).decode())
            if call.arguments:
                yield self._part("input_json_delta", "partial_json", call.arguments)

    def end(self, index: int, report: GenerationReport) -> Iterator[str]:
        if self._index < 0:
            yield from self._begin("text", '{"type":"text","text":""}')
        yield from self._end_block()
        stop = {"stop_reason": _stop_reason(report), "stop_sequence": report.stop_sequence}
        usage = _usage(report).model_dump()
        yield named_event("message_delta", to_json({"type": "message_delta", "delta": stop, "usage": usage}).decode())

    def finish(self, reports: Sequence[Sequence[GenerationReport]]) -> Iterator[str]:
        yield named_event("message_stop", '{"type":"message_stop"}')

    def error(self, error: LabError, detail: ErrorDetail) -> Iterator[str]:
        yield named_event("error", messages_error(detail, status_of(error)).model_dump_json())

    def keep_alive(self, status: str) -> str:
        return PING

    def _begin(self, kind: str, block: str) -> Iterator[str]:
        """Begin a block, unless one of this type is open."""
        if self._open == kind:
            return
        yield from self._end_block()
        self._index, self._open = self._index + 1, kind
        data = f'{{"type":"content_block_start","index":{self._index},"content_block":{block}}}'
        yield named_event("content_block_start", data)

    def _part(self, kind: str, name: str, text: str) -> str:
        delta = f'{{"type":"{kind}","{name}":{to_json(text).decode()}}}'
        data = f'{{"type":"content_block_delta","index":{self._index},"delta":{delta}}}'
        return named_event("content_block_delta", data)

    def _end_block(self) -> Iterator[str]:
        if self._open:
            self._open = ""
            yield named_event("content_block_stop", f'{{"type":"content_block_stop","index":{self._index}}}')


def _stop_reason(report: GenerationReport) -> StopReason:
    return "stop_sequence" if report.stop_sequence is not None else STOP_REASONS[report.finish_reason]


def _usage(report: GenerationReport) -> MessagesUsage:
    return MessagesUsage(
        input_tokens=report.prompt_tokens - report.cached_tokens,
        cache_read_input_tokens=report.cached_tokens,
        output_tokens=report.output_tokens,
    )

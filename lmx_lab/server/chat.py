"""The route ``POST /v1/chat/completions``, and the writer of its format, whose chunks the completions format shares."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response

from lmx_lab.engine import Answer
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.openapi import event_stream
from lmx_lab.http.streaming import DONE, data_line
from lmx_lab.server.answers import CHAT_NAMES, AnswerRequest, AnswerWriter, respond
from lmx_lab.server.convert import FieldNames
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import ANSWER_DESCRIPTION, GENERATION_ERRORS
from lmx_lab.server.translate import (
    call_chunks,
    chat_logprobs,
    generation_request,
    json_text,
    timings,
    usage,
)
from lmx_lab.values.outputs import Delta, FinishReason, GenerationReport, merge_tool_calls
from lmx_lab.wire.chat import AnswerMessage, ChatChunk, ChatCompletion, ChatRequest, Choice, ChoiceLogprobs
from lmx_lab.wire.completions import CompletionRequest
from lmx_lab.wire.errors import ErrorBody
from lmx_lab.wire.tools import AnswerFunction, AnswerToolCall


def chat_routes(service: InferenceService) -> APIRouter:
    """Return the router of ``/v1/chat/completions``."""
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses={
            200: event_stream(ChatChunk, ErrorBody, description=ANSWER_DESCRIPTION, end=DONE),
            **GENERATION_ERRORS,
        },
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, completely or with `stream: true` as server-sent events that end with `[DONE]`."""
        # The writer must not refer to the body, whose memory is released before the answer.
        prompts: dict[int, Sequence[int]] | None = {} if body.return_token_ids else None
        wanted = AnswerRequest(
            prompts=[generation_request(body)],
            writer=partial(
                ChatWriter,
                logprobs=bool(body.logprobs),
                include_usage=body.include_usage,
                prompts=prompts,
                has_functions=bool(body.functions),
            ),
            choices=body.n or 1,
            stream=bool(body.stream),
            ignored=body.ignored(),
            names=field_names(body),
            read=aiter if prompts is None else keep_prompts(prompts),
        )
        return await respond(service, request, wanted)

    return router


def field_names(body: ChatRequest | CompletionRequest) -> FieldNames:
    """Return the names of fields in errors: the names under which the request gives the format and the tools."""
    name, _ = body.format
    names = {} if name == "response_format" else {"response_format": name}
    if isinstance(body, ChatRequest) and body.functions:
        names["tools.*.function"] = "functions.*"
    return FieldNames(names) if names else CHAT_NAMES


def keep_prompts(
    prompts: dict[int, Sequence[int]], read: Callable[[Answer], AsyncIterator[Delta]] = aiter
) -> Callable[[Answer], AsyncIterator[Delta]]:
    """Return a reader that also stores the tokens of the prompt of each answer by its index."""

    def reader(answer: Answer) -> AsyncIterator[Delta]:
        prompts[answer.index] = answer.prompt
        return read(answer)

    return reader


class ChunkWriter(AnswerWriter):
    """Writes what the chunks of the chat and of the completions format have in common.

    Chunks are written as text around the parts that change, because building and dumping a pydantic model for every
    token would cost more than everything else between the engine and the socket. Tests compare them with the dumps of
    the models.

    Args:
        logprobs: Whether the request asks for log-probabilities.
        include_usage: Whether a stream ends with a chunk that contains the usage.
        prompts: The tokens of the prompt of each choice, known from its first delta on, if the answer has the ids of
            all tokens; see ``keep_prompts``.
    """

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    """Value of the chunks' field ``object``."""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        *,
        logprobs: bool = False,
        include_usage: bool = False,
        prompts: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._prompts = prompts
        self._ids = defaultdict[int, list[int]](list)
        """Ids of the tokens of each choice that no chunk contains yet."""
        self._begun: set[int] = set()
        """Indexes of the choices whose first chunk was written."""
        self._shared = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = f'{json_text(self._shared)[:-1]},"choices":['

    def finish(self, reports: Sequence[Sequence[GenerationReport]]) -> Iterator[str]:
        if self._include_usage:
            shown = f'"usage":{usage(reports).model_dump_json()},"timings":{timings(reports).model_dump_json()}'
            yield data_line(f"{self._head}],{shown}}}")
        yield data_line(DONE)


class ChatWriter(ChunkWriter):
    """Writes one answer in the chat format.

    Args:
        has_functions: Whether the request has ``functions`` instead of ``tools``, so that a call is a
            ``function_call``.
    """

    id_prefix = "chatcmpl"
    object = "chat.completion.chunk"

    def __init__(self, model: str, fingerprint: str, *, has_functions: bool = False, **options: Any) -> None:
        super().__init__(model, fingerprint, **options)
        self._has_functions = has_functions

    def delta(self, index: int, delta: Delta) -> Iterator[str]:
        """Yield the chunks of a delta: first its reasoning, then its text and its tool calls. An empty delta has none.

        Before the first delta of a choice, its first chunk has the role. The first chunk of a delta contains the
        log-probabilities of the whole delta.
        """
        if index not in self._begun:
            yield self._first_chunk(index)
        if self._prompts is not None:
            self._ids[index] += delta.ids
        parts = [f'{{"reasoning_content":{json_text(delta.reasoning)}}}'] if delta.reasoning else []
        if delta.text:
            parts.append(f'{{"content":{json_text(delta.text)}}}')
        for call in call_chunks(delta.tool_calls) if delta.tool_calls else ():
            if not self._has_functions:
                parts.append(f'{{"tool_calls":[{json_text(call)}]}}')
            elif call["index"] == 0:
                parts.append(f'{{"function_call":{json_text(call["function"])}}}')
        # Tokens without text also have log-probabilities.
        if not parts and delta.logprobs:
            parts = ['{"content":""}']
        logprobs = "null"
        if self._logprobs:
            logprobs = json_text({"content": chat_logprobs(delta.logprobs), "refusal": None})
        for part in parts:
            yield self._chunk(index, part, logprobs)
            logprobs = "null"

    def end(self, index: int, report: GenerationReport) -> Iterator[str]:
        if index not in self._begun:
            yield self._first_chunk(index)
        end = f',"timings":{timings([[report]]).model_dump_json()}'
        yield self._chunk(index, "{}", reason=f'"{self._reason(report)}"', end=end)

    def whole(self, parts: Sequence[Sequence[tuple[Delta, GenerationReport]]]) -> str:
        choices = []
        for index, (delta, report) in enumerate(parts[0]):
            calls = [
                AnswerToolCall(
                    id=call.id or "", function=AnswerFunction(name=call.name or "", arguments=call.arguments)
                )
                for call in merge_tool_calls(delta.tool_calls)
            ]
            logprobs = {"content": chat_logprobs(delta.logprobs)} if self._logprobs else None
            choice = Choice(
                index=index,
                message=AnswerMessage(
                    content=None if calls and not delta.text else delta.text,
                    reasoning_content=delta.reasoning or None,
                    tool_calls=None if self._has_functions else calls or None,
                    function_call=calls[0].function if self._has_functions and calls else None,
                ),
                logprobs=ChoiceLogprobs.model_validate(logprobs) if logprobs else None,
                finish_reason=self._reason(report),
                token_ids=None if self._prompts is None else list(delta.ids),
            )
            choices.append(choice)
        reports = [report for _, report in parts[0]]
        body = ChatCompletion(
            **self._shared | {"object": "chat.completion"},
            choices=choices,
            usage=usage([reports]),
            timings=timings([reports]),
            prompt_token_ids=None if self._prompts is None else list(self._prompts[0]),
        )
        return body.model_dump_json()

    def _first_chunk(self, index: int) -> str:
        # Clients measure the time to the first token with the first chunk, so it is written with the first delta.
        self._begun.add(index)
        prompt = (self._prompts or {}).get(index)
        end = "" if prompt is None else f',"prompt_token_ids":{json_text(prompt)}'
        return self._chunk(index, '{"role":"assistant","content":""}', end=end)

    def _reason(self, report: GenerationReport) -> FinishReason | Literal["function_call"]:
        is_older = self._has_functions and report.finish_reason == "tool_calls"
        return "function_call" if is_older else report.finish_reason

    def _chunk(self, index: int, delta: str, logprobs: str = "null", reason: str = "null", end: str = "") -> str:
        field = f',"logprobs":{logprobs}' if self._logprobs else ""
        ids = "" if self._prompts is None else f',"token_ids":{json_text(self._ids.pop(index, []))}'
        field = f'{field},"finish_reason":{reason}{ids}'
        return data_line(f'{self._head}{{"index":{index},"delta":{delta}{field}}}]{end}}}')

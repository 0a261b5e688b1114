"""The route ``POST /v1/chat/completions``, and the writer of its format, whose chunks the completions format shares."""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
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
from lmx_lab.wire.generation import Timings
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
        running, is_shown = RunningAnswers(), bool(body.return_token_ids or body.timings_per_token)
        wanted = AnswerRequest(
            prompts=[generation_request(body)],
            # The writer must not refer to the body, whose memory is released before the answer.
            writer=partial(
                ChatWriter,
                running,
                logprobs=bool(body.logprobs),
                include_usage=body.include_usage,
                token_ids=bool(body.return_token_ids),
                token_timings=bool(body.timings_per_token),
                has_functions=bool(body.functions),
                as_probs=bool(body.post_sampling_probs),
            ),
            choices=body.n or 1,
            stream=bool(body.stream),
            ignored=body.ignored(),
            names=field_names(body),
            read=running.read if is_shown else aiter,
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


class RunningAnswers:
    """The answers to a request, for writers whose chunks describe their state.

    An answer is available from its first delta on.

    They stay in memory until the end of the request, so it is used only if the request asks for their state.

    Args:
        read: Returns the deltas of an answer.
    """

    def __init__(self, read: Callable[[Answer], AsyncIterator[Delta]] = aiter) -> None:
        self._read = read
        self._answers: dict[int, Answer] = {}
        self._tokens = Counter[int]()
        """Number of tokens of each choice so far."""
        self._prefills: dict[int, tuple[int, float, float]] = {}
        """For each choice, the number of computed prompt tokens, and the start and end of its prefill in seconds
        after the arrival of the request."""

    def read(self, answer: Answer) -> AsyncIterator[Delta]:
        """Return the deltas of an answer; see ``AnswerRequest``."""
        self._answers[answer.index] = answer
        return self._read(answer)

    def prompt(self, index: int) -> tuple[int, ...]:
        """Return the ids of the tokens of the prompt of a choice."""
        return self._answers[index].prompt

    def timings(self, index: int, delta: Delta) -> Timings:
        """Return the timings of a choice up to this delta. It must be called for each delta, in order."""
        answer, self._tokens[index] = self._answers[index], self._tokens[index] + delta.tokens
        now = time.perf_counter() - answer.steps.arrived_at
        if index not in self._prefills:
            # Computed only once, because an answer may have thousands of steps.
            steps = answer.steps.steps()
            computed = [step for step in steps if step.kind == "prefill"]
            began = next((step.end_s for step in steps if step.kind == "queued"), 0.0)
            ended = computed[-1].end_s if computed else began
            self._prefills[index] = sum(step.tokens for step in computed), began, ended
        tokens, began, ended = self._prefills[index]
        report = GenerationReport(
            model=answer.model,
            finish_reason="length",
            prompt_tokens=len(answer.prompt),
            cached_tokens=max(0, len(answer.prompt) - tokens),
            output_tokens=self._tokens[index],
            queue_s=began,
            prefill_s=ended - began,
            ttft_s=ended,
            decode_s=max(0.0, now - ended),
            peak_memory_bytes=0,
        )
        return timings([[report]]).model_copy(update={"peak_memory_gb": None})


class ChunkWriter(AnswerWriter):
    """Writes what the chunks of the chat and of the completions format have in common.

    Chunks are written as text around the parts that change, because building and dumping a pydantic model for every
    token would cost more than everything else between the engine and the socket. Tests compare them with the dumps of
    the models.

    Args:
        running: The answers.
        logprobs: Whether the request asks for log-probabilities.
        include_usage: Whether a stream ends with a chunk that contains the usage.
        token_ids: Whether the answer has the ids of all tokens.
        token_timings: Whether each chunk of a stream has the timings so far.
    """

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    """Value of the chunks' field ``object``."""

    def __init__(
        self,
        running: RunningAnswers,
        model: str,
        fingerprint: str,
        *,
        logprobs: bool = False,
        include_usage: bool = False,
        token_ids: bool = False,
        token_timings: bool = False,
    ) -> None:
        self._running = running
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._has_ids = token_ids
        self._has_timings = token_timings
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

    def _timings(self, index: int, delta: Delta) -> str:
        """Return the last field of the chunks of a delta: the timings so far."""
        return f',"timings":{self._running.timings(index, delta).model_dump_json()}'

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
        as_probs: Whether the log-probabilities are written as probabilities.
    """

    id_prefix = "chatcmpl"
    object = "chat.completion.chunk"

    def __init__(
        self,
        running: RunningAnswers,
        model: str,
        fingerprint: str,
        *,
        has_functions: bool = False,
        as_probs: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(running, model, fingerprint, **options)
        self._has_functions = has_functions
        self._as_probs = as_probs

    def delta(self, index: int, delta: Delta) -> Iterator[str]:
        """Yield the chunks of a delta: first its reasoning, then its text and its tool calls. An empty delta has none.

        Before the first delta of a choice, its first chunk has the role. The first chunk of a delta contains the
        log-probabilities of the whole delta.
        """
        if index not in self._begun:
            yield self._first_chunk(index)
        if self._has_ids:
            self._ids[index] += delta.ids
        end = self._timings(index, delta) if self._has_timings else ""
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
            entries = chat_logprobs(delta.logprobs, as_probs=self._as_probs)
            logprobs = json_text({"content": entries, "refusal": None})
        for part in parts:
            yield self._chunk(index, part, logprobs, end=end)
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
            entries = chat_logprobs(delta.logprobs, as_probs=self._as_probs)
            logprobs = {"content": entries} if self._logprobs else None
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
                token_ids=list(delta.ids) if self._has_ids else None,
            )
            choices.append(choice)
        reports = [report for _, report in parts[0]]
        body = ChatCompletion(
            **self._shared | {"object": "chat.completion"},
            choices=choices,
            usage=usage([reports]),
            timings=timings([reports]),
            prompt_token_ids=list(self._running.prompt(0)) if self._has_ids else None,
        )
        return body.model_dump_json()

    def _first_chunk(self, index: int) -> str:
        # Clients measure the time to the first token with the first chunk, so it is written with the first delta.
        self._begun.add(index)
        end = f',"prompt_token_ids":{json_text(self._running.prompt(index))}' if self._has_ids else ""
        return self._chunk(index, '{"role":"assistant","content":""}', end=end)

    def _reason(self, report: GenerationReport) -> FinishReason | Literal["function_call"]:
        is_older = self._has_functions and report.finish_reason == "tool_calls"
        return "function_call" if is_older else report.finish_reason

    def _chunk(self, index: int, delta: str, logprobs: str = "null", reason: str = "null", end: str = "") -> str:
        field = f',"logprobs":{logprobs}' if self._logprobs else ""
        ids = f',"token_ids":{json_text(self._ids.pop(index, []))}' if self._has_ids else ""
        field = f'{field},"finish_reason":{reason}{ids}'
        return data_line(f'{self._head}{{"index":{index},"delta":{delta}{field}}}]{end}}}')

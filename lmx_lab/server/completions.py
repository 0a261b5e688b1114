"""The route ``POST /v1/completions``, and the writer of its format: plain prompts, for evaluation harnesses and older
programs.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import chain

from fastapi import APIRouter, Request, Response

from lmx_lab.engine import Answer, TextPrompt, TokenPrompt
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.openapi import event_stream
from lmx_lab.http.streaming import DONE, data_line
from lmx_lab.server.answers import AnswerRequest, respond
from lmx_lab.server.chat import ChunkWriter
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import ANSWER_DESCRIPTION, GENERATION_ERRORS
from lmx_lab.server.translate import (
    completion_requests,
    json_text,
    timings,
    usage,
    wire_logprob,
)
from lmx_lab.values.outputs import Delta, GenerationReport, TokenLogprob
from lmx_lab.wire.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from lmx_lab.wire.errors import ErrorBody


def completion_routes(service: InferenceService) -> APIRouter:
    """Return the router of ``/v1/completions``."""
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    async def with_echo(answer: Answer) -> AsyncGenerator[Delta, None]:
        """Yield the prompt as a delta, and then those of its answer.

        The scores of the prompt are known at the first token or, without tokens, at the end.
        """
        prompt = answer.request.prompt
        if isinstance(prompt, TextPrompt):
            text = prompt.text
        else:
            assert isinstance(prompt, TokenPrompt)
            text = await service.manager.decode(answer, prompt.tokens)
        is_echoed = False
        async for delta in answer:
            if not is_echoed:
                yield _echo(text, answer)
                is_echoed = True
            yield delta
        if not is_echoed:
            yield _echo(text, answer)

    @router.post(
        "/v1/completions",
        response_model=Completion,
        responses={
            200: event_stream(Completion, ErrorBody, description=ANSWER_DESCRIPTION, end=DONE),
            **GENERATION_ERRORS,
        },
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue plain prompts, completely or with `stream: true` as server-sent events that end with `[DONE]`."""
        # The writer must not refer to the body, whose memory is released before the answer.
        options = {"logprobs": body.logprobs is not None, "include_usage": body.include_usage}
        wanted = AnswerRequest(
            prompts=completion_requests(body),
            writer=lambda model, fingerprint: CompletionWriter(model, fingerprint, **options),
            choices=body.choices,
            stream=bool(body.stream),
            ignored=body.ignored(),
            read=with_echo if body.echo else aiter,
        )
        return await respond(service, request, wanted)

    return router


def _echo(text: str, answer: Answer) -> Delta:
    return Delta(text=text, tokens=0, logprobs=answer.prompt_scores.tokens if answer.prompt_scores else ())


class CompletionWriter(ChunkWriter):
    """Writes one answer in the completions format."""

    id_prefix = "cmpl"
    object = "text_completion"

    def __init__(self, model: str, fingerprint: str, *, logprobs: bool = False, include_usage: bool = False) -> None:
        super().__init__(model, fingerprint, logprobs=logprobs, include_usage=include_usage)
        self._writers = defaultdict[int, LogprobsWriter](LogprobsWriter)
        """Writers of the log-probabilities of each choice."""

    def begin(self, index: int, prompt_tokens: int) -> Iterator[str]:
        yield from ()

    def delta(self, index: int, delta: Delta) -> Iterator[str]:
        if delta.text or delta.logprobs:
            written = self._writers[index].write(delta.logprobs).model_dump_json() if self._logprobs else "null"
            yield self._chunk(index, delta.text, logprobs=written)

    def end(self, index: int, report: GenerationReport) -> Iterator[str]:
        end = f',"timings":{timings([[report]]).model_dump_json()}'
        yield self._chunk(index, "", reason=f'"{report.finish_reason}"', end=end)

    def whole(self, parts: Sequence[Sequence[tuple[Delta, GenerationReport]]]) -> str:
        reports = [[report for _, report in choices] for choices in parts]
        choices = [
            CompletionChoice(
                text=delta.text,
                index=index,
                logprobs=self._writers[index].write(delta.logprobs) if self._logprobs else None,
                finish_reason=report.finish_reason,
            )
            for index, (delta, report) in enumerate(chain.from_iterable(parts))
        ]
        body = Completion(
            **self._shared,
            choices=choices,
            usage=usage(reports),
            timings=timings(reports),
        )
        return body.model_dump_json(exclude_unset=True)

    def _chunk(self, index: int, text: str, logprobs: str = "null", reason: str = "null", end: str = "") -> str:
        fields = f'"text":{json_text(text)},"index":{index},"logprobs":{logprobs},"finish_reason":{reason}'
        return data_line(f"{self._head}{{{fields}}}]{end}}}")


class LogprobsWriter:
    """Writes the log-probabilities of one choice in the completions format, one piece at a time.

    The text offsets of a piece continue those of the piece before.
    """

    def __init__(self) -> None:
        self._at = 0
        # A character may consist of several tokens; its offset is that of its first token.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Return the log-probabilities of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._at)
            self._at += len(self._decoder.decode(token.bytes))
        named = [{other.text: wire_logprob(other.logprob) for other in token.named} for token in tokens]
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[None if token.logprob is None else wire_logprob(token.logprob) for token in tokens],
            top_logprobs=[_alternatives(token) for token in tokens],
            text_offset=offsets,
            logprob_tokens=named if any(named) else None,
        )


def _alternatives(token: TokenLogprob) -> dict[str, float] | None:
    """Return the log-probabilities of the alternatives and of the token itself, by text.

    If several tokens have the same text, that of the most likely one is returned.
    """
    if token.logprob is None:
        return None
    found: dict[str, float] = {}
    for other in (*token.top, token):
        found.setdefault(other.text, wire_logprob(other.logprob))
    return found

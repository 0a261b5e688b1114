"""The route ``POST /v1/completions``, and the writer of its format: plain prompts, for evaluation harnesses and older
programs.
"""

from __future__ import annotations

import asyncio
import codecs
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request, Response

from lmx_lab.engine import Answer, GenerationRequest, InfillPrompt, ModelManager, TextPrompt, TokenPrompt
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.openapi import Responses, event_stream
from lmx_lab.http.streaming import DONE, data_line, while_connected
from lmx_lab.server.answers import AnswerRequest, AnswerWriter, respond
from lmx_lab.server.chat import ChunkWriter, RunningAnswers, field_names
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import ANSWER_DESCRIPTION, GENERATION_ERRORS
from lmx_lab.server.translate import (
    chat_logprobs,
    completion_requests,
    json_text,
    requested_model,
    timings,
    usage,
    wire_logprob,
)
from lmx_lab.values.outputs import Delta, GenerationReport, TokenLogprob
from lmx_lab.wire.base import ANY_MODEL, UNLIMITED, read_biases
from lmx_lab.wire.completions import (
    PROMPT_LIMIT,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    LlamaCompletion,
    LlamaRequest,
    mixed_shape_of,
    shape_of,
)
from lmx_lab.wire.errors import ErrorBody

LlamaAnswer = LlamaCompletion | dict[str, Any]
"""The answer to one prompt, or only the members of it that ``response_fields`` selects."""
LLAMA = "A completion, a list if there are several or, with `stream: true`, events with parts of them"
"""Description of the response to llama.cpp's requests."""


def completion_routes(service: InferenceService) -> APIRouter:
    """Return the router of ``/v1/completions``."""
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    async def with_echo(answer: Answer) -> AsyncGenerator[Delta, None]:
        """Yield the prompt as a delta, and then those of its answer.

        The scores of the prompt are known at the first token or, without tokens, at the end.
        """
        text = await prompt_text(service.manager, answer)
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
        read = with_echo if body.echo else aiter
        running, is_shown = RunningAnswers(read), bool(body.return_token_ids or body.timings_per_token)
        wanted = AnswerRequest(
            prompts=completion_requests(body),
            # The writer must not refer to the body, whose memory is released before the answer.
            writer=partial(
                CompletionWriter,
                running,
                logprobs=body.logprobs is not None,
                include_usage=body.include_usage,
                token_ids=bool(body.return_token_ids),
                token_timings=bool(body.timings_per_token),
            ),
            choices=body.n or 1,
            stream=bool(body.stream),
            ignored=body.ignored(),
            names=field_names(body),
            read=running.read if is_shown else read,
        )
        return await respond(service, request, wanted)

    async def complete(body: LlamaRequest, request: Request, *, infill: bool) -> Response:
        body = await _with_tokens(service, body, request)
        converted = await asyncio.to_thread(body.converted, infill=infill)
        as_probs, running = bool(body.post_sampling_probs), RunningAnswers()
        prompts = [replace(prompt, after_sampling=as_probs) for prompt in completion_requests(converted)]
        if infill:
            # The text after the gap may be empty, as at the end of a file.
            gap = InfillPrompt(prefix=str(converted.prompt), suffix=body.input_suffix)
            prompts = [replace(prompt, prompt=gap) for prompt in prompts]
        if body.n_predict == 0:
            # One token, so that the prompt is computed and its KV cache is kept. The writer leaves it out.
            prompts = [replace(prompt, max_tokens=1) for prompt in prompts]
        most, sampling = prompts[0].max_tokens, asdict(prompts[0].sampling)
        limit = 0 if body.n_predict == 0 else -1 if most == UNLIMITED else most
        settings = {"n_predict": limit, "stop": prompts[0].stop, **sampling}
        texts = [each.prompt.text if isinstance(each.prompt, TextPrompt) else None for each in prompts]
        options: dict[str, Any] = {
            "prompts": [text for text in texts for _ in range(converted.n or 1)],
            "is_list": shape_of(converted.prompt) in ("list[str]", "list[list]"),
            "logprobs": bool(body.n_probs),
            "as_probs": as_probs,
            "token_timings": bool(converted.timings_per_token),
            "has_tokens": bool(body.stream or body.return_tokens),
            "fields": body.response_fields or (),
        }
        wanted = AnswerRequest(
            prompts=prompts,
            writer=lambda model, _: LlamaWriter(running, model, settings, **options),
            choices=converted.n or 1,
            stream=bool(body.stream),
            ignored=converted.ignored(),
            names=field_names(converted),
            read=running.read if converted.timings_per_token else aiter,
        )
        return await respond(service, request, wanted)

    responses: Responses = {
        200: event_stream(LlamaCompletion, dict, ErrorBody, description=LLAMA),
        **GENERATION_ERRORS,
    }

    @router.post("/completion", response_model=LlamaAnswer | list[LlamaAnswer], responses=responses)
    async def completion(body: LlamaRequest, request: Request) -> Response:
        """Continue plain prompts, in the form of llama.cpp's server."""
        return await complete(body, request, infill=False)

    @router.post("/infill", response_model=LlamaAnswer | list[LlamaAnswer], responses=responses)
    async def infill(body: LlamaRequest, request: Request) -> Response:
        """Fill the gap between two texts, in the form of llama.cpp's server."""
        return await complete(body, request, infill=True)

    return router


async def prompt_text(manager: ModelManager, answer: Answer) -> str:
    """Return the prompt of an answer to a plain text or to token ids."""
    prompt = answer.request.prompt
    if isinstance(prompt, TextPrompt):
        return prompt.text
    assert isinstance(prompt, TokenPrompt)
    return await manager.decode(answer, prompt.tokens)


async def _with_tokens(service: InferenceService, body: LlamaRequest, request: Request) -> LlamaRequest:
    """Return the request with token ids in place of texts where ``/v1/completions`` accepts no texts."""
    extra = body.model_extra or {}
    model = requested_model(str(extra.get("model") or ANY_MODEL))

    async def encode(text: str, *, special: bool) -> list[int]:
        prompt = TextPrompt(text=text, special=special)
        wanted = GenerationRequest(prompt=prompt, model=model, caller=service.caller_of(request))
        return await while_connected(request, service.manager.encode(wanted))

    async def encode_all(pieces: str | Sequence[int | str]) -> list[int]:
        found: list[int] = []
        for at, piece in enumerate([pieces] if isinstance(pieces, str) else pieces):
            found += [piece] if isinstance(piece, int) else await encode(piece, special=at == 0)
        return found

    changed, shape, biases = dict[str, Any](), mixed_shape_of(body.prompt), read_biases(extra.get("logit_bias"))
    if shape in ("list[int | str]", "list[list[int | str]]"):
        given: list[Any] = [body.prompt] if shape == "list[int | str]" else list(body.prompt)
        texts = sum(isinstance(piece, str) for each in given for piece in each)
        if texts > PROMPT_LIMIT:
            raise InvalidRequestError(
                f"prompt has {texts:,} texts between token ids, the limit is {PROMPT_LIMIT:,}; join them",
                param="prompt",
            )
        tokens = [await encode_all(each) for each in given]
        changed["prompt"] = tokens[0] if shape == "list[int | str]" else tokens
    if isinstance(biases, dict) and len(biases) <= PROMPT_LIMIT:
        changed["logit_bias"] = {}
        for name, bias in biases.items():
            named = [name] if name.isdigit() else await encode(name, special=False)
            changed["logit_bias"] |= dict.fromkeys(map(str, named), bias)
    return body.model_copy(update=changed)


def _echo(text: str, answer: Answer) -> Delta:
    return Delta(text=text, tokens=0, logprobs=answer.prompt_scores.tokens if answer.prompt_scores else ())


class CompletionWriter(ChunkWriter):
    """Writes one answer in the completions format."""

    id_prefix = "cmpl"
    object = "text_completion"

    def __init__(self, running: RunningAnswers, model: str, fingerprint: str, **options: Any) -> None:
        super().__init__(running, model, fingerprint, **options)
        self._writers = defaultdict[int, LogprobsWriter](LogprobsWriter)
        """Writers of the log-probabilities of each choice."""

    def delta(self, index: int, delta: Delta) -> Iterator[str]:
        if self._has_ids:
            self._ids[index] += delta.ids
        end = self._timings(index, delta) if self._has_timings else ""
        if delta.text or delta.logprobs:
            written = self._writers[index].write(delta.logprobs).model_dump_json() if self._logprobs else "null"
            yield self._chunk(index, delta.text, logprobs=written, end=end)

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
                **{"token_ids": list(delta.ids), "prompt_token_ids": list(self._running.prompt(index))}
                if self._has_ids
                else {},
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
        if self._has_ids:
            fields += f',"token_ids":{json_text(self._ids.pop(index, []))}'
            if index not in self._begun:
                self._begun.add(index)
                fields += f',"prompt_token_ids":{json_text(self._running.prompt(index))}'
        return data_line(f"{self._head}{{{fields}}}]{end}}}")


class LlamaWriter(AnswerWriter):
    """Writes one answer in the form of llama.cpp's ``POST /completion``.

    Args:
        running: The answers.
        settings: The parameters of the generation.
        prompts: The prompt of each choice; None if it is not a text.
        is_list: Whether the request has a list of prompts; its whole answer is then a list too.
        logprobs: Whether the request asks for log-probabilities.
        as_probs: Whether these are written as probabilities.
        token_timings: Whether each line of a stream has the timings so far.
        has_tokens: Whether the answer contains the ids of its tokens.
        fields: Paths of the members of a whole answer; empty for all.
    """

    def __init__(
        self,
        running: RunningAnswers,
        model: str,
        settings: dict[str, Any],
        *,
        prompts: Sequence[str | None],
        is_list: bool,
        logprobs: bool,
        as_probs: bool,
        token_timings: bool,
        has_tokens: bool,
        fields: Sequence[str],
    ) -> None:
        self._running = running
        self._model = model
        self._settings = settings
        self._as_probs = as_probs
        self._has_timings = token_timings
        self._prompts = prompts
        self._is_list = is_list
        self._has_tokens = has_tokens
        self._fields = fields
        self._logprobs = logprobs
        self._counts = defaultdict[int, list[int]](lambda: [0, 0])
        """Numbers of tokens of each choice: those of its prompt, and those that were generated."""
        self._with_new_line = set[int]()
        """Choices whose text contains a line break."""

    def begin(self, index: int, prompt_tokens: int) -> Iterator[str]:
        self._counts[index] = [prompt_tokens, 0]
        yield from ()

    def delta(self, index: int, delta: Delta) -> Iterator[str]:
        if self._settings["n_predict"] == 0:
            return
        self._counts[index][1] += delta.tokens
        shown = {"timings": self._running.timings(index, delta)} if self._has_timings else {}
        if delta.text or delta.ids or delta.logprobs:
            prompt, predicted = self._counts[index]
            part = self._part(index, delta, stop=False, tokens_predicted=predicted, tokens_evaluated=prompt, **shown)
            yield data_line(part.model_dump_json(exclude_unset=True))

    def end(self, index: int, report: GenerationReport) -> Iterator[str]:
        yield data_line(self._last(index, Delta(text="", tokens=0), report))

    def whole(self, parts: Sequence[Sequence[tuple[Delta, GenerationReport]]]) -> str:
        answers = [self._last(at, *part) for at, part in enumerate(chain.from_iterable(parts))]
        return f"[{','.join(answers)}]" if self._is_list or len(answers) > 1 else answers[0]

    def _part(self, index: int, delta: Delta, **fields: Any) -> LlamaCompletion:
        if self._logprobs:
            shown = [each for each in delta.logprobs if not each.ends]
            entries = zip(shown, chat_logprobs(shown, as_probs=self._as_probs), strict=True)
            fields["completion_probabilities"] = [_with_ids(each, entry) for each, entry in entries]
        if "\n" in delta.text:
            self._with_new_line.add(index)
        tokens = list(delta.ids) if self._has_tokens else []
        return LlamaCompletion(index=index, content=delta.text, tokens=tokens, id_slot=-1, **fields)

    def _last(self, index: int, delta: Delta, report: GenerationReport) -> str:
        predicted, word = report.output_tokens, report.stop_sequence
        if self._settings["n_predict"] == 0:
            delta, predicted, word = Delta(text="", tokens=0), 0, None
        part = self._part(index, delta, stop=True, tokens_predicted=0, tokens_evaluated=0)
        fields = dict[str, Any](
            tokens_predicted=predicted,
            tokens_evaluated=report.prompt_tokens,
            prompt=self._prompts[index],
            model=self._model,
            stop_type="word" if word else "limit" if report.finish_reason == "length" or not predicted else "eos",
            stopping_word=word or "",
            tokens_cached=report.prompt_tokens + predicted,
            truncated=False,
            has_new_line=index in self._with_new_line,
            generation_settings=self._settings,
            timings=timings([[report]]),
        )
        whole = part.model_copy(update=fields)
        if not self._fields:
            return whole.model_dump_json()
        values, found = whole.model_dump(mode="json"), dict[str, Any]()
        for path in self._fields:
            *parents, name = path.split("/")
            inner: Any = values
            for parent in parents:
                inner = inner.get(parent) if isinstance(inner, dict) else None
            if isinstance(inner, dict) and name in inner:
                found[path] = inner[name]
        return json_text(found)


def _with_ids(token: TokenLogprob, entry: dict[str, Any]) -> dict[str, Any]:
    name = "top_probs" if "top_probs" in entry else "top_logprobs"
    others = zip(token.top, entry[name], strict=True)
    return {"id": token.token, **entry, name: [{"id": other.token, **shown} for other, shown in others]}


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
        offsets, alternatives = [], []
        for token in tokens:
            offsets.append(self._at)
            self._at += len(self._decoder.decode(token.bytes))
            # If several tokens have the same text, the most likely one counts.
            by_text: dict[str, float] = {}
            for other in (*token.top, token):
                by_text.setdefault(other.text, wire_logprob(other.logprob))
            alternatives.append(None if token.logprob is None else by_text)
        named = [{other.text: wire_logprob(other.logprob) for other in token.named} for token in tokens]
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[None if token.logprob is None else wire_logprob(token.logprob) for token in tokens],
            top_logprobs=alternatives,
            text_offset=offsets,
            logprob_tokens=named if any(named) else None,
        )

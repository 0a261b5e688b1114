"""Prepare generation requests for llama.cpp: the tokens of the prompt, the route, and the grammar."""

from __future__ import annotations

import asyncio
import codecs
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from lmx_lab.engine.grammar.queue import GrammarQueue
from lmx_lab.engine.llama_cpp.answer import AnswerBeginning, AnswerReader
from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.grammar import GrammarChecker
from lmx_lab.engine.llama_cpp.model import HostedModel
from lmx_lab.engine.llama_cpp.request import Route, chat_body, chat_input, completion_body, route_of
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, InfillPrompt, TextPrompt, TokenPrompt
from lmx_lab.engine.templates.renderer import TemplateLimitError, TemplateRefusalError, default_sandbox
from lmx_lab.engine.text.chat_format_detection import TAIL_TOKENS, ReasoningState
from lmx_lab.engine.validation import (
    CHARACTERS_PER_TOKEN,
    check_characters,
    check_length,
    check_messages,
    check_tokens,
    no_infill_error,
    single_token,
    start_tokens,
    too_long,
)
from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings

log = logging.getLogger(__name__)
TEMPLATE_S = 5.0
"""Time limit of a chat template in llama.cpp's process, where other work may delay it. Usual templates take a
millisecond."""
TEMPLATE_BYTES = 2**30
"""Bytes by which the process may grow while it renders a template."""
COMPILE_S = 1.0
"""Limit of the CPU time to compile a grammar, during which llama.cpp computes no tokens."""
CHECK_S = 0.1
"""Interval at which these limits are checked."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """What all answers to one request have in common."""

    request: GenerationRequest
    route: Route
    tokens: list[int]
    """Tokens of the prompt, followed by those of ``start``."""
    start: AnswerBeginning | None
    """How the answer begins; None if all its tokens are generated."""
    thinking: ReasoningState
    chat: Mapping[str, Any]
    """Messages, tools and template variables of a chat; empty for other prompts."""
    grammar: str | None
    named_tokens: tuple[int, ...]
    """Ids of the request's ``logprob_tokens``."""
    context_length: int

    @property
    def max_tokens(self) -> int:
        """Maximum length of the answer: the requested one, or less if the context is too short."""
        start = len(self.start.tokens) if self.start is not None else 0
        return min(self.request.max_tokens - start, self.context_length - len(self.tokens))

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens of the prompt."""
        return tuple(self.tokens[: len(self.tokens) - len(self.start.tokens)] if self.start else self.tokens)

    @property
    def can_continue(self) -> bool:
        """Whether another request can continue an answer: llama.cpp keeps no state of it except the tokens.

        A grammar, the parser of the chat format and the random numbers of a seed would start from the beginning.
        """
        has_seed = self.request.sampling.seed is not None and self.request.sampling.temperature > 0
        return self.route == "/completion" and self.grammar is None and not has_seed

    def body(self, choice: int, hosted: HostedModel, answer: Sequence[int] = ()) -> dict[str, Any]:
        """Return the request body for one of the answers.

        Args:
            answer: Tokens of the answer that were generated before a pause.
        """
        if self.route == "/completion":
            return completion_body(
                self.request,
                [*self.tokens, *answer],
                choice=choice,
                max_tokens=self.max_tokens - len(answer),
                context_length=self.context_length,
                grammar=self.grammar,
                markers=list(hosted.chat_format.markers),
                vocabulary_size=hosted.vocabulary_size,
                timings=hosted.uses_drafts,
            )
        return chat_body(
            self.request,
            self.chat,
            choice=choice,
            max_tokens=self.max_tokens,
            context_length=self.context_length,
        )

    def answer_reader(self, hosted: HostedModel, arrived_at: float) -> AnswerReader:
        """Return a reader for one of the answers."""
        channel_format = (
            hosted.chat_format.channel_format(self.request, self.thinking) if self.route == "/completion" else None
        )
        return AnswerReader(
            self.request,
            self.route,
            channel_format,
            model=hosted.entry.id,
            named_tokens=self.named_tokens,
            prompt_tokens=len(self.tokens),
            arrived_at=arrived_at,
        )


class LlamaPreparer:
    """Prepares requests on the engine's loop; grammars are compiled on a thread."""

    def __init__(self, settings: Settings) -> None:
        self._grammars = GrammarQueue("lmx-lab-gguf-grammars", compile_s=COMPILE_S)
        # Each request has a thread, so that its slow template does not delay other requests.
        self._templates = ThreadPoolExecutor(
            max_workers=settings.slots + settings.queue_limit, thread_name_prefix="lmx-lab-gguf-templates"
        )
        self._checker: tuple[HostedModel, GrammarChecker] | None = None
        self._rendering: set[asyncio.Task[dict[str, Any]]] = set()

    def stop(self) -> None:
        """Stop compiling grammars and rendering templates, without waiting for their end."""
        self._grammars.close()
        self._templates.shutdown(wait=False, cancel_futures=True)
        for task in self._rendering:
            task.cancel()

    async def prepare(self, request: GenerationRequest, hosted: HostedModel) -> PreparedRequest:
        """Return the prepared request.

        Raises:
            InvalidRequestError, ContextLengthError, QueueFullError: see ``InferenceEngine.submit_all``.
        """
        route = route_of(request, hosted.chat_format)
        check_tokens(request, hosted.entry, hosted.vocabulary_size)
        tokens, chat, thinking = await self._encode(request, hosted, route)
        start = await _answer_beginning(request, hosted) if request.start is not None else None
        tokens += start.tokens if start is not None else []
        check_length(request, tokens, hosted.entry, hosted.context_length)
        grammar = await self._grammar(request, hosted, thinking)
        return PreparedRequest(
            request=request,
            route=route,
            tokens=tokens,
            start=start,
            thinking=thinking,
            chat=chat,
            grammar=grammar,
            named_tokens=await _named_tokens(request, hosted),
            context_length=hosted.context_length,
        )

    async def encode(self, request: GenerationRequest, hosted: HostedModel) -> list[int]:
        """Return the tokens of the prompt. Raises the same as ``prepare``."""
        tokens, _, _ = await self._encode(request, hosted, route_of(request, hosted.chat_format))
        return tokens

    async def _encode(
        self, request: GenerationRequest, hosted: HostedModel, route: Route
    ) -> tuple[list[int], dict[str, Any], ReasoningState]:
        """Return the tokens of the prompt, the input of the chat template, and whether the prompt begins reasoning."""
        match prompt := request.prompt:
            case _ if request.start is not None:
                tokens = list(request.start.prompt)
                thinking: ReasoningState = "closed"
                if isinstance(prompt, ChatPrompt):
                    table = await hosted.load_token_table()
                    thinking = hosted.chat_format.reasoning_state(table.show(tokens[-TAIL_TOKENS:]))
                return tokens, {}, thinking
            case ChatPrompt():
                check_messages(prompt.messages)
                chat = _chat_input(request, prompt, hosted, route)
                await self._try_template(chat, request, hosted)
                text = await self._render(chat, request, hosted)
                return await _tokenize(text, request, hosted), chat, hosted.chat_format.reasoning_state(text)
            case TextPrompt():
                check_characters(prompt.text, "prompt")
                return await _tokenize(prompt.text, request, hosted, special=prompt.special), {}, "closed"
            case InfillPrompt():
                return await _tokenize_infill(prompt, request, hosted), {}, "closed"
            case TokenPrompt():
                return list(prompt.tokens), {}, "closed"

    async def render(self, request: GenerationRequest, hosted: HostedModel) -> str:
        """Return the text of a chat prompt. Raises the same as ``prepare``."""
        assert isinstance(request.prompt, ChatPrompt)
        check_messages(request.prompt.messages)
        chat = _chat_input(request, request.prompt, hosted, route_of(request, hosted.chat_format))
        await self._try_template(chat, request, hosted)
        return await self._render(chat, request, hosted)

    async def _try_template(self, chat: Mapping[str, Any], request: GenerationRequest, hosted: HostedModel) -> None:
        """Render a chat in the sandbox process first. In llama.cpp, an endless template could be stopped only by ending
        the process, with the model and all other requests.

        Raises:
            InvalidRequestError: there is no template, or it exceeds a limit.
        """
        # llama.cpp has a default template for files without one, but this project does not use it.
        template = hosted.header.text("tokenizer.chat_template")
        if template is None:
            raise InvalidRequestError(
                f"{hosted.entry.id} has no chat template; send a prompt to /v1/completions instead", param="model"
            )
        variables = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, **chat}
        variables |= chat.get("chat_template_kwargs", {})
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._templates, default_sandbox().render, template, variables)
        except TemplateLimitError as exc:
            log.warning("request %s: the chat template of %s %s", request.request_id, hosted.entry.id, exc)
            raise InvalidRequestError(
                f"the chat template of {hosted.entry.id} {exc}; send less, or use another model",
                param="messages",
            ) from exc
        except TemplateRefusalError:
            # llama.cpp may support features that jinja2 does not have; if it does not, it reports the error itself.
            pass

    async def _render(self, chat: Mapping[str, Any], request: GenerationRequest, hosted: HostedModel) -> str:
        """Return the text of a chat, rendered with the model's chat template."""
        # A task, because the rendering continues after its caller is cancelled, and its limits must still be checked.
        task = asyncio.create_task(_within_limits(hosted.connection.post("/apply-template", chat), request, hosted))
        self._rendering.add(task)
        task.add_done_callback(self._forget)
        try:
            answer = await asyncio.shield(task)
        except RefusedError as exc:
            raise _template_refusal(hosted, exc.message) from exc
        return str(answer["prompt"])

    def _forget(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._rendering.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, because the caller may have been cancelled

    async def _grammar(self, request: GenerationRequest, hosted: HostedModel, thinking: ReasoningState) -> str | None:
        """Return the grammar in llama.cpp's syntax; None if llama.cpp has no grammar to enforce."""
        if route_of(request, hosted.chat_format) != "/completion":
            return None
        grammar = hosted.chat_format.grammar(request, thinking)
        if grammar is None:
            return None
        if request.start is not None:
            raise InvalidRequestError(
                "llama.cpp enforces the format of an answer from its beginning, and cannot continue this answer; load "
                'the model with engine="mlx"',
                param="token",
            )
        if self._checker is None or self._checker[0] is not hosted:
            token_table = await hosted.load_token_table()
            self._checker = hosted, GrammarChecker(token_table, self._grammars, hosted.connection)
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None
        return await self._checker[1].check(grammar, tools)


def _chat_input(request: GenerationRequest, prompt: ChatPrompt, hosted: HostedModel, route: Route) -> dict[str, Any]:
    if not prompt.messages:
        raise InvalidRequestError("messages is empty; send at least one", param="messages")
    try:
        return chat_input(request, prompt, hosted.chat_format, route)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise _template_refusal(hosted, exc) from exc


def _template_refusal(hosted: HostedModel, reason: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"the chat template of {hosted.entry.id} refuses these messages: {reason}", param="messages"
    )


async def _within_limits(rendering: Coroutine[Any, Any, T], request: GenerationRequest, hosted: HostedModel) -> T:
    """Wait for the rendering of a chat template, and return its result. If it exceeds a limit, the whole process is
    ended, because a single thread of it cannot be ended.

    Raises:
        InvalidRequestError: the process was ended.
    """
    task = asyncio.ensure_future(rendering)
    began, before, reason = time.monotonic(), 0, None
    try:
        while not (await asyncio.wait([task], timeout=CHECK_S))[0] and reason is None:
            before = before or hosted.process.own_bytes
            if time.monotonic() - began > TEMPLATE_S:
                reason = f"its chat template ran longer than the limit of {TEMPLATE_S:g} s"
            elif hosted.process.own_bytes - before > TEMPLATE_BYTES:
                reason = f"its chat template took more than the limit of {TEMPLATE_BYTES >> 30} GB"
        if reason is None:
            return task.result()
    finally:
        task.cancel()
    log.error("request %s: the process of %s is ended: %s", request.request_id, hosted.entry.id, reason)
    await hosted.process.kill_with_reason(reason, by_request=True)
    raise InvalidRequestError(
        f"the process of {hosted.entry.id} was ended: {reason}; the model is loaded again: send less, or use another "
        "model",
        param="messages",
    )


async def _named_tokens(request: GenerationRequest, hosted: HostedModel) -> tuple[int, ...]:
    """Return the ids of ``logprob_tokens``.

    Raises:
        InvalidRequestError: a text is not exactly one token.
    """
    return tuple(
        [
            named if isinstance(named, int) else await _single_token(named, hosted, "logprob_tokens")
            for named in request.logprob_tokens
        ]
    )


async def _single_token(text: str, hosted: HostedModel, param: str) -> int:
    check_characters(text, param)
    body = {"content": text, "add_special": False, "parse_special": True}
    tokens = (await hosted.connection.post("/tokenize", body))["tokens"]
    return single_token(text, [int(token) for token in tokens], hosted.entry.id, param=param)


async def _answer_beginning(request: GenerationRequest, hosted: HostedModel) -> AnswerBeginning:
    """Return how a continued answer begins.

    Raises:
        InvalidRequestError: the answer cannot begin with these tokens.
    """
    assert request.start is not None
    named = {}
    if isinstance(text := request.start.token, str):
        named[text] = await _single_token(text, hosted, "token")
    table = await hosted.load_token_table()
    tokens = start_tokens(request, token_of=named.__getitem__, show=table.show)
    special, markers = set(table.special_token_ids), hosted.chat_format.marker_tokens
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(b"" if it in special and it not in markers else table.tokens[it]) for it in tokens]
    if decoder.getstate()[0]:
        raise InvalidRequestError(
            "the chosen token is only a part of a character, after which llama.cpp cannot continue; choose another "
            'token, or load the model with engine="mlx"',
            param="token",
        )
    ends = bool(tokens) and tokens[-1] in table.eos_tokens and not request.ignore_eos
    return AnswerBeginning(tokens=tokens, texts=texts, ends=ends)


async def _tokenize_infill(prompt: InfillPrompt, request: GenerationRequest, hosted: HostedModel) -> list[int]:
    marks = await hosted.load_infill_tokens()
    if marks is None:
        raise no_infill_error(hosted.entry.id)
    check_characters(prompt.prefix, "prompt")
    check_characters(prompt.suffix, "suffix")
    beginning = await _tokenize("", request, hosted)
    before, after = [await _tokenize(text, request, hosted, special=False) for text in (prompt.prefix, prompt.suffix)]
    return [*beginning, marks.prefix, *before, marks.suffix, *after, marks.middle]


async def _tokenize(text: str, request: GenerationRequest, hosted: HostedModel, *, special: bool = True) -> list[int]:
    """Return the tokens of a text in a prompt.

    Args:
        special: Whether special tokens are added at its ends.

    Raises:
        ContextLengthError: the text is so long that at most its beginning was tokenized.
    """
    if len(text) > hosted.context_length * CHARACTERS_PER_TOKEN:
        bound = await hosted.token_bound()
        if bound is not None and (least := bound.min_tokens(text)) > hosted.context_length:
            raise too_long(request, f"more than {least - 1}", hosted.entry, hosted.context_length)
    tokens = await hosted.tokenize(text, at_most=hosted.context_length, parse_special=True, add_special=special)
    if len(tokens) > hosted.context_length and len(text) > hosted.context_length * CHARACTERS_PER_TOKEN:
        raise too_long(request, f"more than {len(tokens) - 1}", hosted.entry, hosted.context_length)
    return tokens

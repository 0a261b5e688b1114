"""Prepare generation requests for llama.cpp: the tokens of the prompt, the route, and the grammar."""

from __future__ import annotations

import asyncio
import codecs
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lmx_lab.engine.admission import Permit
from lmx_lab.engine.answers import Generation
from lmx_lab.engine.grammar.compile import GrammarQueue
from lmx_lab.engine.llama_cpp.answer import AnswerReader, LlamaGeneration
from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.grammar import GrammarChecker
from lmx_lab.engine.llama_cpp.model import HostedModel
from lmx_lab.engine.llama_cpp.request import Route, chat_input, route_of
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, InfillPrompt, TextPrompt, TokenPrompt
from lmx_lab.engine.stream import Mailbox
from lmx_lab.engine.text.chat_format_detection import TAIL_TOKENS, ReasoningState
from lmx_lab.engine.text.splitter import TextSplitter
from lmx_lab.engine.tokenizing.templates import TemplateLimitError, TemplateRefusalError, default_sandbox
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
from lmx_lab.values.outputs import Delta

log = logging.getLogger(__name__)
TEMPLATE_S = 5.0
"""Time limit of a chat template in llama.cpp's process, where other work may delay it. Usual templates take a
millisecond."""
TEMPLATE_BYTES = 2**30
"""Bytes by which the process may grow while it renders a template."""
CHECK_S = 0.1
"""Interval at which these limits are checked."""
T = TypeVar("T")


class LlamaPreparer:
    """Prepares requests on the engine's loop; grammars are compiled on a thread."""

    def __init__(self, settings: Settings) -> None:
        # While a grammar is compiled, llama.cpp computes no tokens.
        self._grammars = GrammarQueue("lmx-lab-gguf-grammars", compile_s=1.0)
        # Each request has a thread, so that its slow template does not delay other requests.
        self._templates = ThreadPoolExecutor(
            max_workers=settings.slots + settings.queue_limit, thread_name_prefix="lmx-lab-gguf-templates"
        )
        self._rendering: set[asyncio.Task[dict[str, Any]]] = set()

    def stop(self) -> None:
        """Stop compiling grammars and rendering templates, without waiting for their end."""
        self._grammars.close()
        self._templates.shutdown(wait=False, cancel_futures=True)
        for task in self._rendering:
            task.cancel()

    async def prepare(
        self,
        request: GenerationRequest,
        permits: Sequence[Permit],
        hosted: HostedModel,
        *,
        reader: asyncio.AbstractEventLoop,
        arrived_at: float,
        timeout_s: float,
    ) -> list[LlamaGeneration]:
        """Return a generation for each permit.

        Raises:
            InvalidRequestError, ContextLengthError, QueueFullError: see ``InferenceEngine.submit_all``.
        """
        chat_format, limit = hosted.chat_format, hosted.context_length
        route = route_of(request, chat_format)
        check_tokens(request, hosted.entry, hosted.vocabulary_size)
        tokens, chat, thinking = await self._encode(request, hosted, route)
        start, texts, ends = await _answer_beginning(request, hosted) if request.start is not None else ([], [], False)
        tokens += start
        check_length(request, tokens, hosted.entry, limit)
        grammar = await self._grammar(request, hosted, thinking)
        if request.min_tokens and (grammar is not None or route != "/completion"):
            raise InvalidRequestError(
                "llama.cpp does not support min_tokens together with tools or a format of the answer; leave one of "
                'them out, or load the model with engine="mlx"',
                param="min_tokens",
            )
        named_tokens = [
            named if isinstance(named, int) else await _single_token(named, hosted, "logprob_tokens")
            for named in request.logprob_tokens
        ]
        channel_format = chat_format.channel_format(request, thinking) if route == "/completion" else None
        plain = channel_format is None and not request.stop and request.top_logprobs is None
        generations = []
        for choice, permit in enumerate(permits):
            generation = Generation(
                request=request,
                model=hosted.entry.id,
                prompt=tokens,
                start=start,
                max_tokens=min(request.max_tokens - len(start), limit - len(tokens)),
                choice=choice,
                named_tokens=tuple(named_tokens),
                splitter=TextSplitter("".join, request.stop, channel_format, min_tokens=request.min_tokens),
                mailbox=Mailbox(reader, arrived_at),
                permit=permit,
                arrived_at=arrived_at,
                timeout_s=timeout_s,
                row=AnswerReader(route, chat, grammar, plain=plain),
            )
            if start and plain:
                generation.start_delta = Delta(text="".join(texts), tokens=len(start), ids=tuple(start))
                generation.start_finish = "stop" if ends else generation.start_finish
            elif start:
                generation.read_start(ends=ends, tokens=texts)
            generations.append(generation)
        return generations

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
                if (marks := await hosted.load_infill_tokens()) is None:
                    raise no_infill_error(hosted.entry.id)
                check_characters(prompt.prefix, "prompt")
                check_characters(prompt.suffix, "suffix")
                beginning = await _tokenize("", request, hosted)
                before, after = [
                    await _tokenize(text, request, hosted, special=False) for text in (prompt.prefix, prompt.suffix)
                ]
                return [*beginning, marks.prefix, *before, marks.suffix, *after, marks.middle], {}, "closed"
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
            log.warning("request %s: the chat template of %s %s", request.caller.request_id, hosted.entry.id, exc)
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
        if hosted.grammars is None:
            token_table = await hosted.load_token_table()
            hosted.grammars = hosted.grammars or GrammarChecker(token_table, self._grammars, hosted.connection)
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None
        return await hosted.grammars.check(grammar, tools)


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
    log.error("request %s: the process of %s is ended: %s", request.caller.request_id, hosted.entry.id, reason)
    await hosted.process.kill_with_reason(reason, by_request=True)
    raise InvalidRequestError(
        f"the process of {hosted.entry.id} was ended: {reason}; the model is loaded again: send less, or use another "
        "model",
        param="messages",
    )


async def _single_token(text: str, hosted: HostedModel, param: str) -> int:
    check_characters(text, param)
    body = {"content": text, "add_special": False, "parse_special": True}
    tokens = (await hosted.connection.post("/tokenize", body))["tokens"]
    return single_token(text, [int(token) for token in tokens], hosted.entry.id, param=param)


async def _answer_beginning(request: GenerationRequest, hosted: HostedModel) -> tuple[list[int], list[str], bool]:
    """Return the first tokens of a continued answer, the text of each as llama.cpp would stream it, and whether they
    end the answer. A special token has no text, unless it is a marker.

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
    return tokens, texts, ends


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

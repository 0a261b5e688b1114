"""Convert prompts for a hosted model to tokens, and check what llama.cpp does not support."""

from __future__ import annotations

import asyncio
import codecs
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lmx_lab.engine.llama_cpp.answer import AnswerReader, LlamaGeneration
from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.grammar import GrammarChecker
from lmx_lab.engine.llama_cpp.model import HostedModel
from lmx_lab.engine.llama_cpp.request import chat_input, route_of
from lmx_lab.engine.preparer import ends_answer
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest
from lmx_lab.engine.text.chat_format_detection import ChatFormat, ReasoningState
from lmx_lab.engine.text.splitter import Decode
from lmx_lab.engine.tokenizing.templates import TemplateLimitError, TemplateRefusalError, render
from lmx_lab.engine.validation import (
    CHARACTERS_PER_TOKEN,
    MAX_CHARACTERS_PER_TOKEN,
    check_messages,
    check_size,
    too_long,
)
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.tokenizer_files import InfillTokens

log = logging.getLogger(__name__)
TEMPLATE_S = 5.0
"""Time limit of a chat template in llama.cpp's process, where other work may delay it. Usual templates take a
millisecond."""
TEMPLATE_BYTES = 2**30
"""Bytes by which the process may grow while it renders a template."""
CHECK_S = 0.1
"""Interval at which these limits are checked."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LlamaTokenizer:
    """The ``Tokenizer`` of a hosted model, which asks its process."""

    hosted: HostedModel
    rendering: set[asyncio.Task[dict[str, Any]]]
    """The chats that processes of the engine render."""
    bytes_of: None = None

    @property
    def entry(self) -> ModelEntry:
        return self.hosted.entry

    @property
    def vocabulary_size(self) -> int:
        return self.hosted.vocabulary_size

    @property
    def context_length(self) -> int:
        return self.hosted.context_length

    @property
    def chat_format(self) -> ChatFormat:
        return self.hosted.chat_format

    def check(self, request: GenerationRequest) -> None:
        """See ``Tokenizer``."""
        if self.divides(request) and request.min_tokens:
            raise _no_min_tokens_error()

    async def encode(self, request: GenerationRequest, text: str, *, special: bool, param: str) -> list[int]:
        """See ``Tokenizer``."""
        hosted, context = self.hosted, self.hosted.context_length
        longest = context * CHARACTERS_PER_TOKEN
        given = text if len(text) <= context * MAX_CHARACTERS_PER_TOKEN else text[:longest]
        tokens = await hosted.tokenize(given, at_most=context, parse_special=True, add_special=special)
        if len(tokens) > context and len(text) > longest:
            raise too_long(request, f"more than {len(tokens) - 1}", hosted.entry, context)
        check_size(text, context, hosted.entry.id, param)
        return tokens

    async def encode_chat(self, request: GenerationRequest, chat: ChatPrompt) -> tuple[list[int], str]:
        """See ``Tokenizer``."""
        text = await self.render(request, chat)
        return await self.encode(request, text, special=True, param="messages"), text

    async def encode_name(self, text: str, param: str) -> list[int]:
        """See ``Tokenizer``."""
        body = {"content": text, "add_special": False, "parse_special": True}
        return [int(token) for token in (await self.hosted.connection.post("/tokenize", body))["tokens"]]

    async def show(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return (await self.hosted.load_token_table()).show(tokens)

    async def infill_tokens(self) -> InfillTokens | None:
        """See ``Tokenizer``."""
        return await self.hosted.load_infill_tokens()

    def reasoning(self, request: GenerationRequest, tail: str) -> ReasoningState:
        """See ``Tokenizer``."""
        return self.hosted.chat_format.reasoning_state(tail)

    def divides(self, request: GenerationRequest) -> bool:
        """See ``Tokenizer``."""
        return route_of(request, self.hosted.chat_format) != "/completion"

    async def enforce(self, request: GenerationRequest, grammar: str, count: int) -> str:
        """See ``Tokenizer``. Returns the grammar in llama.cpp's syntax."""
        hosted = self.hosted
        if request.start is not None:
            raise InvalidRequestError(
                "llama.cpp enforces the format of an answer from its beginning, and cannot continue this answer; load "
                'the model with engine="mlx"',
                param="token",
            )
        if hosted.grammars is None:
            token_table = await hosted.load_token_table()
            hosted.grammars = hosted.grammars or GrammarChecker(token_table, hosted.connection)
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None
        enforced = await hosted.grammars.check(grammar, tools)
        if request.min_tokens:
            raise _no_min_tokens_error()
        return enforced

    @property
    def decode(self) -> Decode:
        """See ``Tokenizer``. The process decodes the tokens."""
        return "".join

    def row(self, request: GenerationRequest, prompt: list[int], choice: int) -> AnswerReader:
        """See ``Tokenizer``."""
        route, asked = route_of(request, self.hosted.chat_format), request.prompt
        if route == "/completion" or not isinstance(asked, ChatPrompt):
            return AnswerReader(route, {})
        return AnswerReader(route, self._chat_input(request, asked))

    async def begin(self, generation: LlamaGeneration) -> None:
        """See ``Tokenizer``. Reads the texts that llama.cpp would stream: a special token has none, unless it is a
        marker.

        Raises:
            InvalidRequestError: the answer cannot begin with these tokens.
        """
        table, markers = await self.hosted.load_token_table(), self.hosted.chat_format.marker_tokens
        special, decoder = set(table.special_token_ids), codecs.getincrementaldecoder("utf-8")("replace")
        texts = [
            decoder.decode(b"" if token in special and token not in markers else table.tokens[token])
            for token in generation.start
        ]
        if decoder.getstate()[0]:
            raise InvalidRequestError(
                "the chosen token is only a part of a character, after which llama.cpp cannot continue; choose another "
                'token, or load the model with engine="mlx"',
                param="token",
            )
        generation.read_start(ends=ends_answer(generation, table.eos_tokens), tokens=texts)

    async def render(self, request: GenerationRequest, chat: ChatPrompt) -> str:
        """Return the text of a chat, rendered with the model's chat template.

        It is rendered in the sandbox process first. In llama.cpp, an endless template could be stopped only by ending
        the process, with the model and all other requests.

        Raises:
            InvalidRequestError: there is no template, it refuses the messages, or it exceeds a limit.
        """
        hosted = self.hosted
        check_messages(chat.messages)
        body = self._chat_input(request, chat)
        # llama.cpp has a default template for files without one, but this project does not use it.
        template = hosted.header.text("tokenizer.chat_template")
        if template is None:
            raise InvalidRequestError(
                f"{hosted.entry.id} has no chat template; send a prompt to /v1/completions instead", param="model"
            )
        variables = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, **body}
        variables |= body.get("chat_template_kwargs", {})
        try:
            await render(template, variables)
        except TemplateLimitError as exc:
            log.warning("request %s: the chat template of %s %s", request.caller.request_id, hosted.entry.id, exc)
            raise InvalidRequestError(
                f"the chat template of {hosted.entry.id} {exc}; send less, or use another model",
                param="messages",
            ) from exc
        except TemplateRefusalError:
            # llama.cpp may support features that jinja2 does not have; if it does not, it reports the error itself.
            pass
        # A task, because the rendering continues after its caller is cancelled, and its limits must still be checked.
        task = asyncio.create_task(_within_limits(hosted.connection.post("/apply-template", body), request, hosted))
        self.rendering.add(task)
        task.add_done_callback(self._forget)
        try:
            answer = await asyncio.shield(task)
        except RefusedError as exc:
            raise self._template_refusal(exc.message) from exc
        return str(answer["prompt"])

    def _forget(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self.rendering.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, because the caller may have been cancelled

    def _chat_input(self, request: GenerationRequest, chat: ChatPrompt) -> Mapping[str, Any]:
        if not chat.messages:
            raise InvalidRequestError("messages is empty; send at least one", param="messages")
        chat_format = self.hosted.chat_format
        try:
            return chat_input(request, chat, chat_format, route_of(request, chat_format))
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise self._template_refusal(exc) from exc

    def _template_refusal(self, reason: object) -> InvalidRequestError:
        return InvalidRequestError(
            f"the chat template of {self.hosted.entry.id} refuses these messages: {reason}", param="messages"
        )


def _no_min_tokens_error() -> InvalidRequestError:
    return InvalidRequestError(
        "llama.cpp does not support min_tokens together with tools or a format of the answer; leave one of them out, "
        'or load the model with engine="mlx"',
        param="min_tokens",
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

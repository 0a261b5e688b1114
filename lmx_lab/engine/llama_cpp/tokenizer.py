"""Convert texts and chats to tokens with the process of a model, and check what llama.cpp does not support."""

from __future__ import annotations

import asyncio
import codecs
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lmx_lab.engine.grammar.build import Marker
from lmx_lab.engine.grammar.worker import TokenTable
from lmx_lab.engine.llama_cpp.answer import AnswerReader, LlamaGeneration, TokenIndex
from lmx_lab.engine.llama_cpp.connection import LlamaConnection, RefusedError
from lmx_lab.engine.llama_cpp.grammar import GrammarChecker, read_token_table
from lmx_lab.engine.llama_cpp.process import LlamaProcess
from lmx_lab.engine.llama_cpp.request import chat_input, route_of
from lmx_lab.engine.preparer import ends_answer
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest
from lmx_lab.engine.text.chat_format_detection import (
    HARMONY,
    HARMONY_TOKENS,
    MORE_REASONING_MARKERS,
    ChatFormat,
    ReasoningState,
)
from lmx_lab.engine.text.splitter import Decode
from lmx_lab.engine.text.tool_prompt import END, START
from lmx_lab.engine.tokenizing.encoder import LIMIT_S, SHORT_CHARACTERS
from lmx_lab.engine.tokenizing.templates import TemplateLimitError, TemplateRefusalError, render
from lmx_lab.engine.validation import (
    CHARACTERS_PER_TOKEN,
    MAX_CHARACTERS_PER_TOKEN,
    check_size,
    too_long,
)
from lmx_lab.errors import EngineError, InvalidRequestError, QueueFullError
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.gguf.header import GgufHeader, read_header
from lmx_lab.weights.tokenizer_files import InfillTokens, gguf_infill_tokens

log = logging.getLogger(__name__)
GROWTH = 4
"""Factor by which more of a text is tokenized if its beginning does not show that it is too long."""
TEMPLATE_S = 5.0
"""Time limit of a chat template in llama.cpp's process, where other work may delay it. Usual templates take a
millisecond."""
TEMPLATE_BYTES = 2**30
"""Bytes by which the process may grow while it renders a template."""
CHECK_S = 0.1
"""Interval at which these limits are checked."""
ALL_MARKERS = (*(marker for pair in MORE_REASONING_MARKERS for marker in pair), START, END)


class LlamaTokenizer:
    """The ``Tokenizer`` of a model in its process, and its vocabulary. Belongs to the manager's loop.

    Raises, in all methods that ask the process:
        EngineError: it refuses, or does not answer.
    """

    bytes_of = None

    def __init__(
        self,
        entry: ModelEntry,
        header: GgufHeader,
        process: LlamaProcess,
        connection: LlamaConnection,
        *,
        context_length: int,
        vocabulary_size: int,
    ) -> None:
        self.entry = entry
        self.header = header
        self.process = process
        self.connection = connection
        self.context_length = context_length
        self.vocabulary_size = vocabulary_size
        self.chat_format = ChatFormat()
        self._token_table: TokenTable | None = None
        self._token_index: TokenIndex | None = None
        self._infill: tuple[InfillTokens | None] | None = None
        """The tokens with which the model fills a gap; None until the first request needs them."""
        self._grammars: GrammarChecker | None = None
        """Created with the first grammar."""
        self._long_texts = asyncio.Lock()
        """Locked while a long text is tokenized, so that this keeps one core busy at most."""
        self._rendering: set[asyncio.Task[dict[str, Any]]] = set()
        """The chats that the process renders."""

    def close(self) -> None:
        """Stop rendering, and end the process of the grammars, which would otherwise live until the next garbage
        collection.
        """
        self._grammars = None
        for rendering in self._rendering:
            rendering.cancel()

    # Vocabulary

    async def load_token_table(self) -> TokenTable:
        """Return the vocabulary for grammars. It is read when it is first needed."""
        if self._token_table is None:
            read = functools.partial(read_header, self.entry.path, arrays=True)
            self._token_table = await asyncio.to_thread(lambda: read_token_table(read()))
        return self._token_table

    async def load_token_index(self) -> TokenIndex:
        """Return the vocabulary by its bytes. It is created when it is first needed."""
        if self._token_index is None:
            self._token_index = TokenIndex((await self.load_token_table()).tokens)
        return self._token_index

    async def infill_tokens(self) -> InfillTokens | None:
        """See ``Tokenizer``."""
        if self._infill is None:
            self._infill = (await in_thread(functools.partial(gguf_infill_tokens, self.entry)),)
        return self._infill[0]

    async def read_chat_format(self) -> None:
        """Ask the process for the chat template and its markers. Called once, after the load."""
        props = await self.connection.get("/props")
        markers: dict[str, Marker] = {}
        for name in ALL_MARKERS:
            tokens = await self.encode_name(name, "")
            if len(tokens) == 1:
                markers[name] = (tokens[0],)
        self.chat_format = detect_chat_format(props["chat_template"], props["chat_template_caps"], markers)

    # Texts

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return await self.connection.post(path, body)
        except RefusedError as exc:
            raise EngineError(f"llama.cpp could not prepare this request: {exc.message}") from exc

    async def tokenize(self, text: str, *, at_most: int, parse_special: bool, add_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special: Whether to add special tokens at its ends, if the model has any.
            at_most: Number of tokens that the caller needs. A longer text is tokenized only far enough to show that
                it has more tokens, because megabytes would take seconds.
            parse_special: Whether the text of a special token becomes that token.

        Raises:
            QueueFullError: other long texts were tokenized for ``LIMIT_S``.
        """
        characters = at_most * CHARACTERS_PER_TOKEN
        deadline = time.monotonic() + LIMIT_S
        while True:
            body = {"content": text[:characters], "add_special": add_special, "parse_special": parse_special}
            if min(len(text), characters) <= SHORT_CHARACTERS:
                answer = await self._ask("/tokenize", body)
            else:
                try:
                    await asyncio.wait_for(self._long_texts.acquire(), max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    raise QueueFullError(
                        f"the text was not tokenized within {LIMIT_S:g} s, because other texts were; try again in 2 s, "
                        "or send less",
                        retry_after_s=2,
                    ) from None
                # A task, because llama.cpp tokenizes the text to its end even if the caller is cancelled.
                task = asyncio.create_task(self._ask("/tokenize", body))
                task.add_done_callback(self._end_long_text)
                answer = await asyncio.shield(task)
            tokens = [int(token) for token in answer["tokens"]]
            if len(tokens) > at_most or characters >= len(text):
                return tokens
            characters *= GROWTH

    def _end_long_text(self, task: asyncio.Task[Any]) -> None:
        self._long_texts.release()
        if not task.cancelled():
            task.exception()  # retrieved, because the caller may have been cancelled

    def check(self, request: GenerationRequest) -> None:
        """See ``Tokenizer``."""
        if self.divides(request) and request.min_tokens:
            raise _no_min_tokens_error()

    async def encode(self, request: GenerationRequest, text: str, *, special: bool, param: str) -> list[int]:
        """See ``Tokenizer``."""
        context = self.context_length
        longest = context * CHARACTERS_PER_TOKEN
        given = text if len(text) <= context * MAX_CHARACTERS_PER_TOKEN else text[:longest]
        tokens = await self.tokenize(given, at_most=context, parse_special=True, add_special=special)
        if len(tokens) > context and len(text) > longest:
            raise too_long(request, f"more than {len(tokens) - 1}", self.entry, context)
        check_size(text, context, self.entry.id, param)
        return tokens

    async def encode_chat(self, request: GenerationRequest, chat: ChatPrompt) -> tuple[list[int], str]:
        """See ``Tokenizer``."""
        text = await self.render(request, chat)
        return await self.encode(request, text, special=True, param="messages"), text

    async def encode_name(self, text: str, param: str) -> list[int]:
        """See ``Tokenizer``."""
        body = {"content": text, "add_special": False, "parse_special": True}
        return [int(token) for token in (await self._ask("/tokenize", body))["tokens"]]

    async def decoded(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return str((await self._ask("/detokenize", {"tokens": list(tokens)}))["content"])

    async def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """See ``Tokenizer``."""
        known = (await self.load_token_table()).tokens
        return [known[token] for token in tokens]

    async def show(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return (await self.load_token_table()).show(tokens)

    def reasoning(self, request: GenerationRequest, tail: str) -> ReasoningState:
        """See ``Tokenizer``."""
        return self.chat_format.reasoning_state(tail)

    def divides(self, request: GenerationRequest) -> bool:
        """See ``Tokenizer``."""
        return route_of(request, self.chat_format) != "/completion"

    async def enforce(self, request: GenerationRequest, grammar: str, count: int) -> str:
        """See ``Tokenizer``. Returns the grammar in llama.cpp's syntax."""
        if request.start is not None:
            raise InvalidRequestError(
                "llama.cpp enforces the format of an answer from its beginning, and cannot continue this answer; load "
                'the model with engine="mlx"',
                param="token",
            )
        if self._grammars is None:
            token_table = await self.load_token_table()
            self._grammars = self._grammars or GrammarChecker(token_table, self.connection)
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None
        enforced = await self._grammars.check(grammar, tools)
        if request.min_tokens:
            raise _no_min_tokens_error()
        return enforced

    @property
    def decode(self) -> Decode:
        """See ``Tokenizer``. The process decodes the tokens."""
        return "".join

    def row(self, request: GenerationRequest, prompt: list[int], choice: int) -> AnswerReader:
        """See ``Tokenizer``."""
        route, asked = route_of(request, self.chat_format), request.prompt
        if route == "/completion" or not isinstance(asked, ChatPrompt):
            return AnswerReader(route, {})
        return AnswerReader(route, self._chat_input(request, asked))

    async def begin(self, generation: LlamaGeneration) -> None:
        """See ``Tokenizer``. Reads the texts that llama.cpp would stream: a special token has none, unless it is a
        marker.

        Raises:
            InvalidRequestError: the answer cannot begin with these tokens.
        """
        table, markers = await self.load_token_table(), self.chat_format.marker_tokens
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
        body = self._chat_input(request, chat)
        # llama.cpp has a default template for files without one, but this project does not use it.
        template = self.header.text("tokenizer.chat_template")
        if template is None:
            raise InvalidRequestError(
                f"{self.entry.id} has no chat template; send a prompt to /v1/completions instead", param="model"
            )
        variables = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, **body}
        variables |= body.get("chat_template_kwargs", {})
        try:
            await render(template, variables)
        except TemplateLimitError as exc:
            log.warning("request %s: the chat template of %s %s", request.caller.request_id, self.entry.id, exc)
            raise InvalidRequestError(
                f"the chat template of {self.entry.id} {exc}; send less, or use another model",
                param="messages",
            ) from exc
        except TemplateRefusalError:
            # llama.cpp may support features that jinja2 does not have; if it does not, it reports the error itself.
            pass
        # A task, because the rendering continues after its caller is cancelled, and its limits must still be checked.
        task = asyncio.create_task(self._apply_template(body, request.caller.request_id))
        self._rendering.add(task)
        task.add_done_callback(self._forget)
        try:
            answer = await asyncio.shield(task)
        except RefusedError as exc:
            raise self._template_refusal(exc.message) from exc
        return str(answer["prompt"])

    async def _apply_template(self, body: Mapping[str, Any], request_id: str | None) -> Any:
        """Let llama.cpp render a chat. If its template exceeds a limit, the whole process is ended, because a single
        thread of it cannot be ended.

        Raises:
            RefusedError: the template refuses the messages.
            InvalidRequestError: the process was ended.
        """
        task = asyncio.create_task(self.connection.post("/apply-template", body))
        began, before, reason = time.monotonic(), 0, None
        try:
            while not (await asyncio.wait([task], timeout=CHECK_S))[0] and reason is None:
                before = before or self.process.own_bytes
                if time.monotonic() - began > TEMPLATE_S:
                    reason = f"its chat template ran longer than the limit of {TEMPLATE_S:g} s"
                elif self.process.own_bytes - before > TEMPLATE_BYTES:
                    reason = f"its chat template took more than the limit of {TEMPLATE_BYTES >> 30} GB"
            if reason is None:
                return task.result()
        finally:
            task.cancel()
        log.error("request %s: the process of %s is ended: %s", request_id, self.entry.id, reason)
        await self.process.kill_with_reason(reason, by_request=True)
        raise InvalidRequestError(
            f"the process of {self.entry.id} was ended: {reason}; the model is loaded again: send less, or use another "
            "model",
            param="messages",
        )

    def _forget(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._rendering.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, because the caller may have been cancelled

    def _chat_input(self, request: GenerationRequest, chat: ChatPrompt) -> Mapping[str, Any]:
        if not chat.messages:
            raise InvalidRequestError("messages is empty; send at least one", param="messages")
        chat_format = self.chat_format
        try:
            return chat_input(request, chat, chat_format, route_of(request, chat_format))
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise self._template_refusal(exc) from exc

    def _template_refusal(self, reason: object) -> InvalidRequestError:
        return InvalidRequestError(
            f"the chat template of {self.entry.id} refuses these messages: {reason}", param="messages"
        )


def detect_chat_format(template: str, caps: Mapping[str, Any], markers: Mapping[str, Marker]) -> ChatFormat:
    """Detect how a GGUF model writes reasoning and tool calls.

    Args:
        caps: ``chat_template_caps`` of llama.cpp's ``/props``.
        markers: The strings of ``ALL_MARKERS`` that are one token of this model.
    """
    # The prompt may open the reasoning, so the closing marker need not be in the template.
    markers_of_template = next((pair for pair in MORE_REASONING_MARKERS if pair[0] in template), None)
    harmony = all(token in template for token in HARMONY_TOKENS[1:])
    return ChatFormat(
        reasoning_markers=None if harmony else markers_of_template,
        supports_tools=bool(caps.get("supports_tools")),
        supports_system=bool(caps.get("supports_system_role", True)),
        transitions=HARMONY if harmony else {},
        markers={name: markers.get(name, (name,)) for name in (*(markers_of_template or ()), START, END)},
    )


def _no_min_tokens_error() -> InvalidRequestError:
    return InvalidRequestError(
        "llama.cpp does not support min_tokens together with tools or a format of the answer; leave one of them out, "
        'or load the model with engine="mlx"',
        param="min_tokens",
    )

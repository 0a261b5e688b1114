"""A generation from what was asked to what llama.cpp can begin with: tokens, a route, a grammar."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from lmx_lab.engine.grammar.sandbox import GrammarSandbox
from lmx_lab.engine.llama_cpp.answer import Answer
from lmx_lab.engine.llama_cpp.connection import RefusedError
from lmx_lab.engine.llama_cpp.grammar import Forms
from lmx_lab.engine.llama_cpp.model import Hosted
from lmx_lab.engine.llama_cpp.request import Route, chat_body, chat_input, completion_body, route_of
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from lmx_lab.engine.text.chat_format_detection import ReasoningState
from lmx_lab.engine.validation import (
    AMPLE_CHARACTERS,
    check_characters,
    check_length,
    check_messages,
    check_tokens,
    too_long,
)
from lmx_lab.errors import InvalidRequestError

TEMPLATE_S = 10.0
"""For a chat template in llama.cpp's process, where other work may delay it; a usual one takes a millisecond."""
TEMPLATE_BYTES = 2**30
"""By which the process may grow meanwhile."""
LOOK_S = 0.1
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What all answers to one request have in common."""

    request: GenerationRequest
    route: Route
    tokens: list[int]
    thinking: ReasoningState
    given: Mapping[str, Any]
    """Of the chat route."""
    grammar: str | None
    context_length: int

    @property
    def max_tokens(self) -> int:
        """What was asked for, or what the context has room for."""
        return min(self.request.max_tokens, self.context_length - len(self.tokens))

    @property
    def length(self) -> int:
        """Tokens of prompt and answer when it has run to its end."""
        return len(self.tokens) + self.max_tokens

    def body(self, choice: int, hosted: Hosted) -> dict[str, Any]:
        """The question for one of the answers."""
        if self.route == "/completion":
            return completion_body(
                self.request,
                self.tokens,
                choice=choice,
                max_tokens=self.max_tokens,
                context_length=self.context_length,
                grammar=self.grammar,
                markers=list(hosted.chat_format.markers),
            )
        return chat_body(
            self.request,
            self.given,
            choice=choice,
            max_tokens=self.max_tokens,
            context_length=self.context_length,
        )

    def answer(self, hosted: Hosted, arrived_at: float) -> Answer:
        shape = hosted.chat_format.channel_format(self.request, self.thinking) if self.route == "/completion" else None
        return Answer(
            self.request,
            self.route,
            shape,
            model=hosted.entry.id,
            prompt_tokens=len(self.tokens),
            arrived_at=arrived_at,
        )


class Intake:
    """Belongs to the engine's loop; grammars are tried on a thread."""

    def __init__(self) -> None:
        self._trials = GrammarSandbox()
        self._compiling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmx-lab-gguf-grammars")
        self._forms: tuple[Hosted, Forms] | None = None
        self._rendering: set[asyncio.Task[dict[str, Any]]] = set()

    def stop(self) -> None:
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._trials.close()
        for task in self._rendering:
            task.cancel()

    async def prepared(self, request: GenerationRequest, hosted: Hosted) -> Prepared:
        """
        Raises:
            InvalidRequestError, ContextLengthError, QueueFullError: as ``Engine.submit``.
        """
        route = route_of(request, hosted.chat_format)
        given: dict[str, Any] = {}
        thinking: ReasoningState = "closed"
        match prompt := request.prompt:
            case ChatPrompt():
                check_messages(prompt.messages)
                given = _given(request, prompt, hosted, route)
                text = await self._templated(given, hosted)
                thinking = hosted.chat_format.reasoning_state(text)
                tokens = await _tokenized(text, request, hosted)
            case TextPrompt():
                check_characters(prompt.text, "prompt")
                tokens = await _tokenized(prompt.text, request, hosted)
            case TokenPrompt():
                tokens = list(prompt.tokens)
        check_length(request, tokens, hosted.entry, hosted.context_length)
        check_tokens(request, hosted.entry, hosted.vocabulary_size)
        grammar = await self._grammar(request, hosted, thinking)
        return Prepared(
            request=request,
            route=route,
            tokens=tokens,
            thinking=thinking,
            given=given,
            grammar=grammar,
            context_length=hosted.context_length,
        )

    async def _templated(self, given: Mapping[str, Any], hosted: Hosted) -> str:
        if not hosted.templated:
            raise InvalidRequestError(
                f"{hosted.entry.id} has no chat template: it takes plain prompts only", param="model"
            )
        # It goes on when its caller has left, and has to be watched then, too.
        task = asyncio.create_task(_within_limits(hosted.connection.ask("/apply-template", given), hosted))
        self._rendering.add(task)
        task.add_done_callback(self._rendered)
        try:
            answer = await asyncio.shield(task)
        except RefusedError as exc:
            raise _unreadable(hosted, exc.message) from exc
        return str(answer["prompt"])

    def _rendered(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._rendering.discard(task)
        if not task.cancelled():
            # Whoever waited has it; without this the loop would complain where nobody did.
            task.exception()

    async def _grammar(self, request: GenerationRequest, hosted: Hosted, thinking: ReasoningState) -> str | None:
        """The grammar in llama.cpp's spelling, which enforces it."""
        if route_of(request, hosted.chat_format) != "/completion":
            return None
        grammar = hosted.chat_format.grammar(request, thinking)
        if grammar is None:
            return None
        if self._forms is None or self._forms[0] is not hosted:
            words = await hosted.read_words()
            self._forms = hosted, Forms(words, self._trials, self._compiling, hosted.connection)
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None
        return await self._forms[1].enforced(grammar, tools)


def _given(request: GenerationRequest, prompt: ChatPrompt, hosted: Hosted, route: Route) -> dict[str, Any]:
    if not prompt.messages:
        raise InvalidRequestError("messages is empty; send at least one", param="messages")
    try:
        return chat_input(request, prompt, hosted.chat_format, route)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise _unreadable(hosted, exc) from exc


def _unreadable(hosted: Hosted, why: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"the chat template of {hosted.entry.id} refuses these messages: {why}", param="messages"
    )


async def _within_limits(rendering: Coroutine[Any, Any, T], hosted: Hosted) -> T:
    """What comes of a chat template; where it takes too much, the whole process is ended: its thread cannot be.

    Raises:
        InvalidRequestError: it was ended.
    """
    task = asyncio.ensure_future(rendering)
    began, before, why = time.monotonic(), 0, None
    try:
        while not (await asyncio.wait([task], timeout=LOOK_S))[0] and why is None:
            before = before or hosted.process.own_bytes
            if time.monotonic() - began > TEMPLATE_S:
                why = f"its chat template ran for more than {TEMPLATE_S:g} s, its limit"
            elif hosted.process.own_bytes - before > TEMPLATE_BYTES:
                why = f"its chat template took more than {TEMPLATE_BYTES >> 30} GB, its limit"
        if why is None:
            return task.result()
    finally:
        task.cancel()
    await hosted.process.end_for(why)
    raise InvalidRequestError(
        f"{hosted.entry.id} was ended: {why}; load a model again, and send less, or take another one", param="messages"
    )


async def _tokenized(text: str, request: GenerationRequest, hosted: Hosted) -> list[int]:
    """
    Raises:
        ContextLengthError: it does not fit, and how long it is nobody knows.
    """
    tokens = await hosted.tokenized(text, most=hosted.context_length, parse_special=True)
    if len(tokens) > hosted.context_length and len(text) > hosted.context_length * AMPLE_CHARACTERS:
        raise too_long(request, f"more than {len(tokens) - 1}", hosted.entry, hosted.context_length)
    return tokens

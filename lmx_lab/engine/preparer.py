"""Prepare requests for any engine: the tokens of the prompt, how the answer begins, its format and its limits.

The methods of ``Tokenizer`` are the steps that depend on the vocabulary or the engine of a model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from llguidance import LLMatcher

from lmx_lab.engine.answers import Generation
from lmx_lab.engine.requests import AnswerStart, ChatPrompt, GenerationRequest, InfillPrompt, TextPrompt, TokenPrompt
from lmx_lab.engine.scheduler import Permit
from lmx_lab.engine.stream import Mailbox
from lmx_lab.engine.text.chat_format_detection import CONTINUED, TAIL_TOKENS, ChatFormat, ReasoningState
from lmx_lab.engine.text.splitter import Decode, TextSplitter
from lmx_lab.engine.tokenizing.encoder import SHORT_CHARACTERS
from lmx_lab.engine.tokenizing.templates import TemplateBusyError, TemplateLimitError, render_request, write_chat
from lmx_lab.engine.validation import (
    check_characters,
    check_length,
    check_messages,
    check_tokens,
)
from lmx_lab.errors import InvalidRequestError, LabError, counted
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.timeline import StepLog
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.tokenizer_files import InfillTokens

log = logging.getLogger(__name__)
Row = TypeVar("Row")


class Tokenizer(Protocol[Row]):
    """The operations of one model on texts and tokens. Used on an event loop, which none of the methods blocks."""

    @property
    def entry(self) -> ModelEntry: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens of prompt and answer; None without a limit."""

    @property
    def chat_format(self) -> ChatFormat: ...

    @property
    def bytes_of(self) -> Callable[[int], bytes] | None:
        """Returns the bytes that a token adds to a text; None if the engine supports no ``thinking_budget``."""

    def check(self, request: GenerationRequest) -> None:
        """Refuse what the engine does not support.

        Raises:
            InvalidRequestError: it does not support a field of the request.
        """

    async def encode(self, request: GenerationRequest, text: str, *, special: bool, param: str) -> list[int]:
        """Return the tokens of a text of the prompt.

        Args:
            special: Whether special tokens, such as one that begins every text, are added.

        Raises:
            ContextLengthError: the text is so long that at most its beginning was tokenized.
        """

    async def encode_chat(self, request: GenerationRequest, chat: ChatPrompt) -> tuple[list[int], str]:
        """Return the tokens of a chat, and at least the end of its text. Raises the same as ``encode``."""

    async def encode_name(self, text: str, param: str) -> list[int]:
        """Return the tokens of a text that should be a single one."""

    async def show(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special ones, with U+FFFD for incomplete characters."""

    async def render(self, request: GenerationRequest, chat: ChatPrompt) -> str:
        """Return the text of a chat."""

    async def decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens of the vocabulary, as the model's own tokenizer shows it."""

    async def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes that each token of the vocabulary adds to a text; those of a special token are its name."""

    async def infill_tokens(self) -> InfillTokens | None:
        """Return the tokens around the texts before and after a gap; None if the model does not fill gaps."""

    def reasoning(self, request: GenerationRequest, tail: str) -> ReasoningState:
        """Return whether the answer may begin with reasoning, from the end of the prompt of a chat."""

    async def enforce(
        self, request: GenerationRequest, grammar: str, count: int
    ) -> tuple[Sequence[LLMatcher], str | None]:
        """Return a matcher of the grammar for each answer, and the grammar as the engine enforces it itself; None if it
        enforces the matchers.

        Raises:
            InvalidRequestError: the grammar cannot be enforced.
            QueueFullError: other grammars are checked first.
        """

    @property
    def decode(self) -> Decode:
        """Decodes the tokens of an answer."""

    def row(self, request: GenerationRequest, prompt: list[int], choice: int) -> Row:
        """Return what the engine needs for an answer."""

    async def begin(self, generation: Generation[Row]) -> None:
        """Read the tokens with which an answer begins (``Generation.read_start``)."""


async def prepare(
    tokenizer: Tokenizer[Row],
    request: GenerationRequest,
    permits: Sequence[Permit],
    *,
    reader: asyncio.AbstractEventLoop,
    arrived_at: float,
    timeout_s: float,
) -> list[Generation[Row]]:
    """Return a generation for each permit.

    Args:
        reader: The event loop on which the answers are read.

    Raises:
        InvalidRequestError, ContextLengthError, QueueFullError: see ``LoadedModel.generate``.
    """
    entry, limit, chat_format = tokenizer.entry, tokenizer.context_length, tokenizer.chat_format
    tokenizer.check(request)
    check_tokens(request, entry, tokenizer.vocabulary_size)
    prompt, thinking = await encode_prompt(tokenizer, request)
    start = await _start_tokens(tokenizer, request, request.start) if request.start is not None else []
    prompt += start
    check_length(request, prompt, entry, limit)
    named = [await token_of(tokenizer, named, "logprob_tokens") for named in request.logprob_tokens]
    matchers: Sequence[LLMatcher | None] = [None] * len(permits)
    own: str | None = None
    if (grammar := chat_format.grammar(request, thinking)) is not None:
        matchers, own = await tokenizer.enforce(request, grammar, len(permits))
    channel_format = chat_format.channel_format(request, thinking)
    markers, bytes_of = chat_format.reasoning_markers, tokenizer.bytes_of
    reasoning_tokens = request.thinking_budget if thinking != "closed" else None
    left = min(request.max_tokens - len(start), (limit or 2**31) - len(prompt))
    generations = []
    for choice, permit in enumerate(permits):
        matcher, constraint = matchers[choice], None
        if matcher is not None or reasoning_tokens is not None:
            # Imported here, because numpy takes 30 ms to import, and most answers have no format.
            from lmx_lab.engine.grammar.mask import Constraint, ThinkingBudget

            budget = None
            if reasoning_tokens is not None and markers is not None and bytes_of is not None:
                end, is_open = chat_format.reasoning_end, thinking == "open"
                budget = ThinkingBudget(reasoning_tokens, markers=markers, end=end, open=is_open, bytes_of=bytes_of)
            constraint = Constraint(matcher, budget) if matcher is not None or budget is not None else None
        generation = Generation(
            request=request,
            model=entry.id,
            prompt=prompt,
            start=start,
            max_tokens=left,
            start_finish=None if left else "length",
            choice=choice,
            named_tokens=tuple(named),
            grammar=own,
            constraint=constraint,
            splitter=TextSplitter(tokenizer.decode, request.stop, channel_format, min_tokens=request.min_tokens),
            mailbox=Mailbox(reader, StepLog(arrived_at)),
            permit=permit,
            arrived_at=arrived_at,
            timeout_s=timeout_s,
            row=tokenizer.row(request, prompt, choice),
        )
        if start:
            await tokenizer.begin(generation)
        generations.append(generation)
    return generations


async def encode_prompt(tokenizer: Tokenizer[Row], request: GenerationRequest) -> tuple[list[int], ReasoningState]:
    """Return the tokens of the prompt, and whether it begins the reasoning of the answer. Raises as ``prepare``."""
    prompt, tail = request.prompt, ""
    match prompt:
        case _ if request.start is not None:
            tokens = list(request.start.prompt)
            if isinstance(prompt, ChatPrompt) and tokenizer.chat_format.reasoning_markers is not None:
                tail = await tokenizer.show(tokens[-TAIL_TOKENS:])
        case TokenPrompt():
            tokens = list(prompt.tokens)
        case TextPrompt():
            check_characters(prompt.text, "prompt")
            tokens = await tokenizer.encode(request, prompt.text, special=prompt.special, param="prompt")
            if prompt.special and len(tokens) > 1 and tokens[0] == tokens[1]:
                # A text that was written by a chat template may begin with the token that is added to every text.
                beginning = await tokenizer.encode(request, "", special=True, param="prompt")
                tokens = tokens[1:] if beginning[:1] == tokens[:1] else tokens
        case InfillPrompt():
            if (marks := await tokenizer.infill_tokens()) is None:
                raise InvalidRequestError(
                    f"{tokenizer.entry.id} cannot fill a gap before a suffix: its vocabulary has no tokens for that, "
                    "such as <|fim_prefix|>; send a prompt without a suffix, or load a code model that has them",
                    param="suffix",
                )
            check_characters(prompt.prefix, "prompt")
            check_characters(prompt.suffix, "suffix")
            beginning = await tokenizer.encode(request, "", special=True, param="prompt")
            before = await tokenizer.encode(request, prompt.prefix, special=False, param="prompt")
            after = await tokenizer.encode(request, prompt.suffix, special=False, param="suffix")
            tokens = [*beginning, marks.prefix, *before, marks.suffix, *after, marks.middle]
        case ChatPrompt():
            check_messages(prompt.messages)
            tokens, tail = await tokenizer.encode_chat(request, prompt)
            if prompt.continues:
                return tokens, tokenizer.chat_format.state_within(str(prompt.messages[-1]["content"]))
    return tokens, tokenizer.reasoning(request, tail) if isinstance(prompt, ChatPrompt) else "closed"


async def render_chat_template(
    tokenizer: Any, chat_format: ChatFormat, entry: ModelEntry, request: GenerationRequest, chat: ChatPrompt
) -> str:
    """Return the text of a chat, rendered with the chat template of a model in the sandbox. It has the calls of earlier
    answers as the model wrote them, as far as that is known.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``, or the tokenizer of a GGUF file.

    Raises:
        InvalidRequestError: the model has no chat template; the template raises an error or exceeds its limits.
    """
    apply, text = partial(_apply_template, tokenizer, chat_format, entry, request), None
    if any(message.get("tool_calls") for message in chat.messages):
        text = await _with_written_calls(apply, chat_format, request, chat)
    if text is None:
        text = await apply(chat)
    if not chat.continues:
        return text
    beginning, found, _ = text.rpartition(CONTINUED)
    if not found:
        raise InvalidRequestError(
            f"the chat template of {entry.id} does not write the last message, so it cannot be continued; end with a "
            "message of the user",
            param="messages",
        )
    return beginning


async def _with_written_calls(
    apply: Callable[[ChatPrompt], Awaitable[str]], chat_format: ChatFormat, request: GenerationRequest, chat: ChatPrompt
) -> str | None:
    """Return the text of a chat with the calls that are known as the model wrote them; None if none can be replaced."""
    left: set[int] = set()
    # A second time without the calls that the template writes in another way.
    for _ in range(2):
        mark = partial(chat_format.mark_calls, request, chat, without=frozenset(left))
        if (marked := await in_thread(mark, name="lmx-lab-template")) is None:
            return None
        try:
            text = await apply(replace(chat, messages=tuple(marked.messages)))
        except InvalidRequestError:
            return None
        restore = partial(marked.restore, text, chat_format.call_markers)
        text, missing = await in_thread(restore, name="lmx-lab-template")
        if not missing:
            return text
        left |= missing
    return None


async def _apply_template(
    tokenizer: Any, chat_format: ChatFormat, entry: ModelEntry, request: GenerationRequest, chat: ChatPrompt
) -> str:
    """Return the text that the template writes. Arguments and errors as in ``render_chat_template``.

    A template that refuses the messages gets them again as the strictest templates require them.
    """

    def write(*, strict: bool) -> bytes | str:
        if not tokenizer.has_chat_template:
            raise InvalidRequestError(
                f"{entry.id} has no chat template; send a prompt to /v1/completions instead", param="model"
            )
        given = chat_format.template_input(request, chat, strict=strict)
        messages = given.pop("messages")
        is_open = not chat.continues
        return write_chat(tokenizer, messages, add_generation_prompt=is_open, **given, **chat.template_options)

    # A thread would take longer than writing a few short messages.
    few = chat.messages if len(chat.messages) <= 16 and chat.tools is None else ()
    is_short = bool(few) and sum(len(str(message)) for message in few) <= SHORT_CHARACTERS
    text, refusal = None, None
    for strict in (False, True):
        try:
            if is_short:
                written = write(strict=strict)
            else:
                # Each request has its own thread, because many messages take a long time.
                written = await in_thread(partial(write, strict=strict), name="lmx-lab-template")
            text = await render_request(written)
            break
        except LabError:
            raise
        except TemplateLimitError as exc:
            log.warning("request %s: the chat template of %s %s", request.caller.request_id, entry.id, exc)
            raise InvalidRequestError(
                f"the chat template of {entry.id} {exc}; send less, or use another model",
                param="messages",
            ) from exc
        # A template is a program that belongs to the model, and may raise any error. The error about the messages as
        # they were sent is shown.
        except Exception as exc:
            refusal = refusal or exc
            if isinstance(exc, TemplateBusyError):
                break
    if text is None:
        raise InvalidRequestError(
            f"the chat template of {entry.id} refuses these messages: {refusal}", param="messages"
        ) from refusal
    return text


async def token_of(tokenizer: Tokenizer[Row], named: int | str, param: str) -> int:
    """Return the id of a token that a request names by its id or by its text.

    Raises:
        InvalidRequestError: the text is not exactly one token.
    """
    if isinstance(named, int):
        return named
    check_characters(named, param)
    tokens = await tokenizer.encode_name(named, param)
    if len(tokens) != 1:
        raise InvalidRequestError(
            f"{param} has {named[:80]!r}, which is {len(tokens)} tokens of {tokenizer.entry.id} ({str(tokens)[:80]}); "
            "name a text of one token, often with a space before it, or a token id",
            param=param,
        )
    return tokens[0]


async def _start_tokens(tokenizer: Tokenizer[Row], request: GenerationRequest, start: AnswerStart) -> list[int]:
    """Return the tokens with which the answer begins.

    Raises:
        InvalidRequestError: the answer cannot begin with these tokens.
    """
    tokens = list(start.answer)
    if start.token is not None:
        if request.tools is not None and request.tools.forced:
            raise InvalidRequestError(
                "the request forces a tool call, whose tokens its grammar chooses; continue an answer to a request "
                "without tool_choice",
                param="token",
            )
        # A character has at most four bytes.
        if tokens and (await tokenizer.show(tokens[-4:])).endswith("\ufffd"):
            raise InvalidRequestError(
                f"position {len(tokens)} is inside a character that consists of several tokens; continue the answer at "
                "the first token of the character",
                param="at",
            )
        tokens.append(await token_of(tokenizer, start.token, "token"))
    if len(tokens) > request.max_tokens:
        raise InvalidRequestError(
            f"the answer begins with {counted(len(tokens), 'token')}, and max_tokens is {request.max_tokens}; raise "
            "max_tokens",
            param="max_tokens",
        )
    return tokens


def ends_answer(generation: Generation[Row], ends: Collection[int]) -> bool:
    """Return whether the beginning of an answer ends it with one of these tokens."""
    return generation.start[-1] in ends and not generation.request.ignore_eos

"""Prepare requests for the echo engine: the tokens of the prompt, the text of the answer, and the grammar."""

from __future__ import annotations

import json

from llguidance import LLMatcher

from lmx_lab.engine.echo.model import BEGIN, END, LONGEST_PIECE, MESSAGE, EchoModel
from lmx_lab.engine.echo.queue import PreparedEcho
from lmx_lab.engine.echo.script import END_OF_THOUGHTS, THINK, ScriptAnswer
from lmx_lab.engine.grammar.compile import GrammarCompiler
from lmx_lab.engine.grammar.mask import Constraint, ThinkingBudget
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, InfillPrompt, TextPrompt, TokenPrompt, ToolUse
from lmx_lab.engine.text.chat_format_detection import ChatFormat, ReasoningState
from lmx_lab.engine.text.tool_prompt import START, write_tools_as_text
from lmx_lab.engine.validation import (
    check_characters,
    check_length,
    check_messages,
    check_tokens,
    no_steering_error,
    single_token,
    start_tokens,
    too_long,
)
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.models import ModelEntry

THOUGHTS = (THINK, END_OF_THOUGHTS)


class EchoPreparer:
    """Prepares requests on the engine's loop."""

    def __init__(self, model: EchoModel, entry: ModelEntry, context_length: int, *, tokens_per_s: float | None) -> None:
        self._model = model
        self._entry = entry
        self._context_length = context_length
        self._tokens_per_s = tokens_per_s
        vocabulary = model.vocabulary
        self._grammars = GrammarCompiler(lambda: vocabulary.token_table)
        self._chat_format = ChatFormat(
            reasoning_markers=THOUGHTS, reasoning_end=tuple(vocabulary.encode(END_OF_THOUGHTS))
        )

    async def prepare(
        self, request: GenerationRequest, choices: int, script: ScriptAnswer | None, *, timeout_s: float
    ) -> tuple[PreparedEcho, list[Constraint | None]]:
        """Return the prepared request, and the constraint of each of its answers.

        Args:
            script: The answer from the script; None repeats the last message.

        Raises:
            InvalidRequestError, ContextLengthError, QueueFullError: see ``InferenceEngine.submit_all``.
        """
        entry, vocabulary, limit = self._entry, self._model.vocabulary, self._context_length
        check_tokens(request, entry, vocabulary.size)
        if request.steer:
            raise no_steering_error("the echo engine")
        start = self._start_tokens(request)
        prompt = [*self.encode(request), *start]
        check_length(request, prompt, entry, limit)
        if script is not None:
            _check_calls(script, _tools(request))
        text = self._text(request, script)
        thinks = (
            isinstance(request.prompt, ChatPrompt)
            and request.prompt.template_options.get("enable_thinking") is not False
            and vocabulary.decode(text[:16]).startswith(THINK)
        )
        thinking: ReasoningState = "possible" if thinks else "closed"
        grammar = self._chat_format.grammar(request, thinking)
        matchers: list[LLMatcher] | list[None] = [None] * choices
        if grammar is not None:
            matchers = await self._grammars.matchers(grammar, choices, _tools(request))
        pace = script.tokens_per_s if script is not None and script.tokens_per_s is not None else self._tokens_per_s
        prepared = PreparedEcho(
            request=request,
            prompt=prompt,
            text=text,
            named_tokens=tuple(
                named if isinstance(named, int) else single_token(named, vocabulary.encode(named), entry.id)
                for named in request.logprob_tokens
            ),
            channel_format=self._chat_format.channel_format(request, thinking),
            start=start,
            max_tokens=min(request.max_tokens - len(start), limit - len(prompt)),
            interval_s=1 / pace if pace is not None else 0.0,
            timeout_s=timeout_s,
            script=script,
        )
        return prepared, [self._constraint(request, thinking, matcher) for matcher in matchers]

    def encode(self, request: GenerationRequest) -> list[int]:
        """Return the tokens of the prompt. Raises the same as ``prepare``."""
        encode, limit = self._model.vocabulary.encode, self._context_length
        match request.prompt:
            case _ if request.start is not None:
                return list(request.start.prompt)
            case TokenPrompt(tokens=tokens):
                return list(tokens)
            case TextPrompt(text=text):
                check_characters(text, "prompt")
                return self._encoded(request, text, limit)
            case InfillPrompt() as gap:
                check_characters(gap.prefix, "prompt")
                check_characters(gap.suffix, "suffix")
                before, after = (self._encoded(request, text, limit) for text in (gap.prefix, gap.suffix))
                return [BEGIN, *before, MESSAGE, *after, MESSAGE]
            case ChatPrompt() as chat:
                check_messages(chat.messages)
                for message in chat.messages:
                    if not isinstance(message.get("role"), str) or "content" not in message:
                        raise InvalidRequestError("a message needs a role and a content", param="messages")
                if not chat.messages:
                    return []
                messages = write_tools_as_text(chat.messages, chat.tools)
                prompt = [BEGIN]
                for message in messages:
                    text = f"{message['role']}\n{message['content'] or ''}"
                    prompt += [MESSAGE, *self._encoded(request, text, limit), END]
                return [*prompt, MESSAGE, *encode("assistant\n")]

    def _start_tokens(self, request: GenerationRequest) -> list[int]:
        """Return the tokens with which the answer begins; raises the same as ``validation.start_tokens``."""
        vocabulary, model = self._model.vocabulary, self._entry.id

        def token_of(text: str) -> int:
            check_characters(text, "token")
            return single_token(text, vocabulary.encode(text), model, param="token")

        return start_tokens(request, token_of=token_of, show=vocabulary.show)

    def _encoded(self, request: GenerationRequest, text: str, limit: int) -> list[int]:
        """Return the tokens of a text. If the text is far too long, only its beginning is tokenized.

        Raises:
            ContextLengthError: the text is far too long.
        """
        enough = (limit + 1) * LONGEST_PIECE
        tokens = self._model.vocabulary.encode(text[:enough])
        if len(text) > enough:
            raise too_long(request, f"more than {len(tokens)}", self._entry, limit)
        return tokens

    def _text(self, request: GenerationRequest, script: ScriptAnswer | None) -> list[int]:
        """Return the tokens of the answer, which are those of the script's answer or of the last message."""
        encode = self._model.vocabulary.encode
        if script is not None:
            return encode(script.as_model_text)
        match request.prompt:
            case TokenPrompt(tokens=tokens):
                return list(tokens)
            case TextPrompt(text=text) | InfillPrompt(prefix=text):
                return encode(text)
            case ChatPrompt() as chat:
                content = str(chat.messages[-1]["content"] or "")
                if chat.tools is not None and chat.tools.forced and START not in content:
                    name = chat.tools.only or chat.tools.tools[0].name
                    # The grammar chooses the arguments.
                    return encode(f'{START}\n{{"name": {json.dumps(name)}, "arguments": {{')
                return encode(content)

    def _constraint(
        self, request: GenerationRequest, thinking: ReasoningState, matcher: LLMatcher | None
    ) -> Constraint | None:
        budget = None
        if request.thinking_budget is not None and thinking != "closed":
            known = self._model.vocabulary.bytes
            budget = ThinkingBudget(
                request.thinking_budget,
                markers=THOUGHTS,
                end=self._chat_format.reasoning_end,
                open=thinking == "open",
                bytes_of=known.__getitem__,
            )
        return Constraint(matcher, budget) if matcher is not None or budget is not None else None


def _tools(request: GenerationRequest) -> ToolUse | None:
    return request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None


def _check_calls(script: ScriptAnswer, tools: ToolUse | None) -> None:
    """Check that the request offers the tools that the script calls.

    Raises:
        InvalidRequestError: a tool is missing.
    """
    offered = [tool.name for tool in tools.tools if tools.only in (None, tool.name)] if tools is not None else []
    for name, _ in script.calls:
        if name not in offered:
            raise InvalidRequestError(
                f"{script.location} of the echo script calls the tool {name!r}; this request offers "
                f"{', '.join(offered) or 'no tools'}",
                param="tools",
            )

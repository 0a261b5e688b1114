"""Provide the echo engine, which repeats messages, or answers from a script. It computes on the manager's loop."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version

import numpy as np
from llguidance import LLMatcher

from lmx_lab.engine.answers import Answers, Generation, shared_length
from lmx_lab.engine.echo.model import (
    BEGIN,
    DIMENSIONS,
    END,
    LONGEST_PIECE,
    MESSAGE,
    AnswerSampler,
    EchoModel,
    vector,
)
from lmx_lab.engine.echo.script import END_OF_THOUGHTS, THINK, Script, ScriptAnswer, read_script
from lmx_lab.engine.grammar.compile import GrammarCompiler
from lmx_lab.engine.memory import total_bytes
from lmx_lab.engine.model import EngineHost, EngineMemory, LoadedModel, Prepare
from lmx_lab.engine.preparer import Tokenizer, ends_answer
from lmx_lab.engine.requests import (
    SHARED,
    ChatPrompt,
    GenerationRequest,
    InfillPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from lmx_lab.engine.scheduler import Permit, Turns
from lmx_lab.engine.text.chat_format_detection import ChatFormat, ReasoningState
from lmx_lab.engine.text.splitter import Decode
from lmx_lab.engine.text.tool_prompt import START, write_tools_as_text
from lmx_lab.engine.texts import TextJob, TextTokens
from lmx_lab.engine.validation import (
    check_characters,
    check_options,
    check_samplers,
    check_text,
    check_token_ids,
    no_steering_error,
    readable_tokens,
    too_long,
)
from lmx_lab.errors import EngineError, InvalidRequestError, LabError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import LoadSpec, ModelEntry
from lmx_lab.values.outputs import InputType, PromptProgress, PromptScores, Vectors
from lmx_lab.values.plan import LoadPlan
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.tokenizer_files import InfillTokens

log = logging.getLogger(__name__)
KEPT_SEQUENCES = 16
"""Number of ended requests whose tokens count as cached for requests that begin with the same tokens."""


def read_model(entry: ModelEntry, settings: Settings) -> tuple[EchoModel, Script]:
    """Create the model, and read the script that is loaded with it.

    Raises:
        UnusableModelError: the script is invalid, or the entry has another format.
    """
    if entry.format != "echo":
        raise UnusableModelError(f"{entry.id} is a model with files; the echo engine runs none", param="model")
    return EchoModel(), read_script(settings.echo_script) if settings.echo_script is not None else Script()


@dataclass(kw_only=True, frozen=True)
class EchoTokenizer:
    """The ``Tokenizer`` of a request to the echo engine."""

    model: EchoModel
    entry: ModelEntry
    context_length: int
    vocabulary_size: int
    chat_format: ChatFormat
    bytes_of: Callable[[int], bytes]
    decode: Decode
    tokens_per_s: float | None
    grammars: GrammarCompiler
    script: ScriptAnswer | None = None
    """The answer from the script; None repeats the last message."""

    def check(self, request: GenerationRequest) -> None:
        """See ``Tokenizer``. The request must offer the tools that the script calls."""
        if request.steer:
            raise no_steering_error("the echo engine")
        check_samplers(request.sampling, "the echo engine")
        if self.script is not None:
            tools = request.tools
            offered = [tool.name for tool in tools.tools if tools.only in (None, tool.name)] if tools else []
            for name, _ in self.script.calls:
                if name not in offered:
                    raise InvalidRequestError(
                        f"{self.script.location} of the echo script calls the tool {name!r}; this request offers "
                        f"{', '.join(offered) or 'no tools'}",
                        param="tools",
                    )

    async def encode(self, request: GenerationRequest, text: str, *, special: bool, param: str) -> list[int]:
        """See ``Tokenizer``. If the text is far too long, only its beginning is tokenized."""
        limit = readable_tokens(request, self.context_length)
        enough = (limit + 1) * LONGEST_PIECE
        tokens = self.model.vocabulary.encode(text[:enough])
        if len(text) > enough:
            raise too_long(request, f"more than {len(tokens)}", self.entry, limit)
        return tokens

    async def encode_chat(self, request: GenerationRequest, chat: ChatPrompt) -> tuple[list[int], str]:
        """See ``Tokenizer``. No template is used."""
        for message in chat.messages:
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise InvalidRequestError("a message needs a role and a content", param="messages")
        if not chat.messages:
            return [], ""
        prompt = [BEGIN]
        for message in write_tools_as_text(chat.messages, chat.tools):
            text = f"{message['role']}\n{message['content'] or ''}"
            prompt += [MESSAGE, *await self.encode(request, text, special=False, param="messages"), END]
        if chat.continues:
            return prompt[:-1], ""
        return [*prompt, MESSAGE, *self.model.vocabulary.encode("assistant\n")], ""

    async def encode_name(self, text: str, param: str) -> list[int]:
        return self.model.vocabulary.encode(text)

    async def show(self, tokens: Sequence[int]) -> str:
        return self.model.vocabulary.show(tokens)

    decoded = show

    async def render(self, request: GenerationRequest, chat: ChatPrompt) -> str:
        return self.model.vocabulary.show((await self.encode_chat(request, chat))[0])

    async def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        return [self.model.vocabulary.bytes[token] for token in tokens]

    async def infill_tokens(self) -> InfillTokens:
        return InfillTokens(prefix=BEGIN, suffix=MESSAGE, middle=MESSAGE, ends=frozenset())

    def reasoning(self, request: GenerationRequest, tail: str) -> ReasoningState:
        """See ``Tokenizer``. The text of the answer is known."""
        thinks = (
            isinstance(request.prompt, ChatPrompt)
            and request.prompt.template_options.get("enable_thinking") is not False
            and self._text(request.prompt).startswith(THINK)
        )
        return "possible" if thinks else "closed"

    async def enforce(self, request: GenerationRequest, grammar: str, count: int) -> tuple[list[LLMatcher], str | None]:
        return await self.grammars.matchers(grammar, count, request.tools), None

    def row(self, request: GenerationRequest, prompt: list[int], choice: int) -> EchoRow:
        script, pace, asked = self.script, self.tokens_per_s, request.prompt
        if script is None and isinstance(asked, TokenPrompt):
            text = list(asked.tokens)
        else:
            text = self.model.vocabulary.encode(self._text(asked))
        if script is not None and script.tokens_per_s is not None:
            pace = script.tokens_per_s
        return EchoRow(
            sampler=AnswerSampler(
                self.model,
                text,
                request.sampling,
                choice=choice,
                ignore_eos=request.ignore_eos,
                min_tokens=request.min_tokens,
            ),
            interval_s=1 / pace if pace is not None else 0.0,
            delay_s=script.delay_s if script is not None else 0.0,
        )

    async def begin(self, generation: Generation[EchoRow]) -> None:
        for token in generation.start:
            generation.row.sampler.record(token)
        generation.read_start(ends=ends_answer(generation, (END,)))

    def _text(self, prompt: Prompt) -> str:
        """Return the text of the answer: that of the script, or that of the last message.

        An answer that continues the last message repeats the message before it.
        """
        if self.script is not None:
            return self.script.as_model_text
        if isinstance(prompt, TextPrompt | InfillPrompt):
            return prompt.text if isinstance(prompt, TextPrompt) else prompt.prefix
        assert isinstance(prompt, ChatPrompt)
        if prompt.continues:
            *earlier, last = [str(message["content"] or "") for message in prompt.messages]
            return (earlier[-1] if earlier else "").removeprefix(last)
        content = str(prompt.messages[-1]["content"] or "") if prompt.messages else ""
        if prompt.tools is not None and prompt.tools.forced and START not in content:
            name = prompt.tools.only or prompt.tools.tools[0].name
            # The grammar chooses the arguments.
            return f'{START}\n{{"name": {json.dumps(name)}, "arguments": {{'
        return content


@dataclass(kw_only=True, eq=False)
class EchoRow:
    """The data of an answer that only the echo engine needs."""

    sampler: AnswerSampler
    interval_s: float
    """Time between two tokens."""
    delay_s: float
    """Additional time before the first token."""
    due_at: float = 0.0
    """When the next token is due (``time.perf_counter``)."""
    tokens: list[int] = field(default_factory=list)
    """The tokens that were generated."""


class EchoRounds:
    """The ``Computation`` of the echo engine, which computes its answers in rounds. Belongs to the engine's loop.

    A round is one callback of the loop. If a speed is set, answers with the same speed share their rounds. While no
    request is running or queued, no callback is scheduled.

    """

    def __init__(self, model: EchoModel, *, slots: int, turns: Turns) -> None:
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._rounds = 0
        """Number of rounds so far, which answers that advance together have in common."""
        self._sequences: list[tuple[str, list[int]]] = []
        """The scopes and the tokens of ended requests."""
        self.answers: Answers[EchoRow] = Answers(self, slots=slots, turns=turns)

    def schedule(self, delay_s: float = 0.0) -> None:
        """Perform the next round after this time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._round) if delay_s > 0 else self._loop.call_soon(self._round)

    def _round(self) -> None:
        """Start queued generations, generate the tokens that are due, and schedule the next round."""
        answers, now, due_at = self.answers, time.perf_counter(), math.inf
        self._rounds += 1
        answers.update(now)
        for generation in answers.scheduler.running:
            # An error ends only this generation.
            try:
                if generation.row.due_at <= now:
                    self._generate(generation)
            except LabError as exc:
                answers.end(generation, exc)
            except Exception as exc:
                log.exception("a generation failed")
                answers.end(generation, EngineError(f"the generation failed: {type(exc).__name__}: {exc}"))
            else:
                if generation.finish is not None:
                    answers.end(generation, generation.failure or generation.report(time.perf_counter()))
                else:
                    due_at = min(due_at, generation.row.due_at)
        answers.deliver()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.perf_counter()
        if (next_at := answers.next_at(now)) is not None:
            self.schedule(min(next_at, due_at) - now)

    # Computation

    judge = None

    def begin(self, generation: Generation[EchoRow]) -> None:
        """See ``Computation``. The prompt is computed immediately."""
        answers, prompt, row = self.answers, generation.prompt, generation.row
        answers.scheduler.prefilled(generation)
        # The tokens that the prompt shares with the beginning of an ended request; never the last one.
        scopes = (generation.request.scope, SHARED)
        shared = max((shared_length(prompt, other) for scope, other in self._sequences if scope in scopes), default=0)
        generation.cached_tokens = min(shared, len(prompt) - 1)
        generation.computed_tokens = len(prompt) - generation.cached_tokens
        answers.post(generation, PromptProgress(done=len(prompt), total=len(prompt)))
        if generation.request.score_prompt:
            scores = self._model.prompt_scores(prompt, generation.request.top_logprobs or 0)
        now = generation.decoding_at = time.perf_counter()
        row.due_at = _on_grid(now + row.delay_s + row.interval_s, row.interval_s)
        generation.mailbox.steps.add(
            "prefill",
            generation.admitted_at,
            now,
            tokens=generation.computed_tokens,
            step=self._rounds,
            requests=len(answers.scheduler.running),
        )
        if generation.request.score_prompt:
            answers.scored(generation, PromptScores(tokens=scores), now)

    def can_pause(self, generation: Generation[EchoRow]) -> bool:
        return True

    def pause(self, generation: Generation[EchoRow]) -> None:
        """See ``Computation``."""

    def resume(self, generation: Generation[EchoRow]) -> None:
        """See ``Computation``. The next token is due."""
        self.answers.scheduler.prefilled(generation)
        now = time.perf_counter()
        generation.mailbox.steps.start(now)
        generation.row.due_at = max(generation.row.due_at, now)

    def remove(self, generation: Generation[EchoRow]) -> None:
        ended = [*generation.prompt, *generation.row.tokens]
        self._sequences = [(generation.request.scope, ended), *self._sequences[: KEPT_SEQUENCES - 1]]
        self.schedule()

    def remaining_s(self, generation: Generation[EchoRow]) -> float:
        return (generation.max_tokens - generation.output_tokens) * generation.row.interval_s

    def _generate(self, generation: Generation[EchoRow]) -> None:
        """Generate the next token."""
        started, answers, row = time.perf_counter(), self.answers, generation.row
        request, constraint, vocabulary = generation.request, generation.constraint, self._model.vocabulary
        mask = None
        if constraint is not None and (mask := constraint.mask(vocabulary.size)) is None:
            if constraint.failure is not None:
                raise constraint.failure
            if constraint.complete:
                answers.post(generation, generation.complete("stop"))
                return
        scores = row.sampler.scores(constrained=mask is not None) if request.top_logprobs is not None else None
        token = row.sampler.next(mask, forced=constraint.forced if constraint is not None else None)
        if constraint is not None:
            constraint.advance(token)
        row.tokens.append(token)
        ends, entry = token == END and not request.ignore_eos, None
        if scores is not None:
            entry = row.sampler.logprob(
                scores,
                token,
                request.top_logprobs or 0,
                generation.named_tokens,
                after_sampling=request.after_sampling,
            )
            if token == END:
                entry = replace(entry, bytes=b"", ends=ends)
        now = time.perf_counter()
        answers.post(generation, generation.add(token, now, ids=(token,), entry=None if ends else entry))
        if generation.finish is None:
            if ends:
                answers.post(generation, generation.complete("stop", entry))
            elif generation.output_tokens >= generation.max_tokens:
                answers.post(generation, generation.complete("length"))
            else:
                row.due_at = _on_grid(row.due_at + row.interval_s, row.interval_s)
        generation.mailbox.steps.add(
            "decode", started, now, tokens=1, step=self._rounds, requests=len(answers.scheduler.running)
        )


def _on_grid(due_at: float, interval_s: float) -> float:
    """Return the time of the first round of this speed at or after a time."""
    return math.ceil(due_at / interval_s - 1e-6) * interval_s if interval_s else due_at


class EchoLoaded(LoadedModel[EchoRow]):
    """The model of the echo engine in memory, which chats, embeds and ranks."""

    def __init__(
        self,
        entry: ModelEntry,
        spec: LoadSpec,
        settings: Settings,
        host: EngineHost,
        *,
        model: EchoModel,
        script: Script,
    ) -> None:
        context_length, vocabulary = spec.context_length or entry.context_length, model.vocabulary
        assert context_length is not None
        self._model = model
        self._script = script
        self._pace = settings.echo_tokens_per_s
        self._rounds = EchoRounds(model, slots=settings.slots, turns=host.turns)
        self._echo_tokenizer = EchoTokenizer(
            model=model,
            entry=entry,
            context_length=context_length,
            vocabulary_size=vocabulary.size,
            chat_format=ChatFormat(
                reasoning_markers=(THINK, END_OF_THOUGHTS), reasoning_end=tuple(vocabulary.encode(END_OF_THOUGHTS))
            ),
            bytes_of=vocabulary.bytes.__getitem__,
            decode=vocabulary.decode,
            tokens_per_s=self._pace,
            grammars=GrammarCompiler(lambda: model.vocabulary.token_table),
        )
        super().__init__(
            entry,
            spec,
            settings,
            host,
            fingerprint=f"echo-{version('lmx-lab')}",
            tokenizer=self._echo_tokenizer,
            answers=self._rounds.answers,
            dimensions=DIMENSIONS,
            context_length=context_length,
            slots=settings.slots if entry.kind == "chat" else None,
        )

    @property
    def memory_bytes(self) -> int:
        return self._model.memory_bytes

    async def _close(self, error: LabError) -> int:
        await self.end(error)
        return self.memory_bytes

    async def _prepare(
        self,
        prepare: Prepare[EchoRow],
        tokenizer: Tokenizer[EchoRow],
        request: GenerationRequest,
        permits: Sequence[Permit],
    ) -> list[Generation[EchoRow]]:
        """See ``LoadedModel``. The answer is taken from the script first, and put back if the request is refused."""
        script = self._script.take()
        if script is not None and script.error is not None and not script.as_model_text:
            await asyncio.sleep(script.delay_s)
            raise script.failure()
        try:
            generations = await prepare(replace(self._echo_tokenizer, script=script))
            permits[0].check()
            self.check()
        except BaseException:
            self._script.give_back(script)
            raise
        for generation in generations:
            generation.peak_memory_bytes = self.memory_bytes
            if script is not None and script.error is not None:
                generation.failure = script.failure()
        return generations

    async def _add(self, generations: Sequence[Generation[EchoRow]]) -> None:
        self._rounds.answers.add(generations)
        self._rounds.schedule()

    async def _read_texts(
        self, texts: Sequence[str | Sequence[int]], *, input_type: InputType | None, truncate: bool, param: str
    ) -> list[TextTokens]:
        vocabulary, limit, read = self._model.vocabulary, self.entry.context_length or 0, []
        for at, text in enumerate(texts):
            place, count = param if param == "query" else f"{param}.{at}", None
            if isinstance(text, str):
                check_characters(text, place)
                # Only as much as is needed to detect that a text is too long, because encoding holds the GIL.
                enough = (limit + 1) * LONGEST_PIECE
                tokens = vocabulary.encode(text[:enough])
                if len(text) > enough:
                    count = f"more than {limit}"
            else:
                tokens = list(text)
                check_token_ids(tokens, place, self.entry, vocabulary.size)
            check_text(tokens, place, self.entry, limit, truncate=truncate, count=count)
            read.append(TextTokens(tuple(tokens[:limit])))
        return read

    async def _beginnings(self, documents: Sequence[str], tokens: int) -> list[str]:
        vocabulary = self._model.vocabulary
        return [vocabulary.decode(vocabulary.encode(text[: tokens * LONGEST_PIECE])[:tokens]) for text in documents]

    async def _compute(self, job: TextJob) -> Vectors:
        rows: list[Vectors] = []
        job.start()
        job.peak_memory_bytes = self.memory_bytes
        for text in job.texts:
            rows.append(vector(self._model.vocabulary.decode(text.tokens)))
            self.encoded_tokens += len(text.tokens)
            self.worked_at = time.perf_counter()
            await asyncio.sleep(len(text.tokens) / self._pace if self._pace is not None else 0)
        return np.stack(rows)


class EchoEngine:
    """``Engine`` for the built-in entry ``echo``."""

    blas = None

    def __init__(self, settings: Settings, host: EngineHost) -> None:
        self._settings = settings
        self._host = host
        self._total_bytes = total_bytes()

    @property
    def memory(self) -> EngineMemory:
        return EngineMemory(total=self._total_bytes, limit=self._host.budget.limit_bytes)

    async def plan(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> LoadPlan:
        check_options(replace(entry, context_length=2**20), spec)
        return LoadPlan(
            model=entry.id,
            engine="echo",
            kind=entry.kind,
            file_bytes=0,
            weights_bytes=0,
            needed_bytes=0,
            context_length=entry.context_length,
        )

    async def check(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> None:
        # Coding agents send prompts that are longer than the default context.
        check_options(replace(entry, context_length=2**20), spec)
        await in_thread(functools.partial(read_model, entry, self._settings), name="lmx-lab-check")

    async def load(self, entry: ModelEntry, spec: LoadSpec, *, room_bytes: int) -> LoadedModel[EchoRow]:
        model, script = await in_thread(functools.partial(read_model, entry, self._settings))
        return EchoLoaded(entry, spec, self._settings, self._host, model=model, script=script)

    def stop(self) -> None:
        """See ``Engine``."""

"""Chat requests and plain prompts, from what was asked to what the engine thread can begin with.

Chats become text on one thread, text becomes tokens on another, grammars are compiled on a third: none waits for the
others' long ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher

from lmx_lab.engine.grammar.compile import GrammarCompiler
from lmx_lab.engine.grammar.mask import Constraint, ThinkingBudget
from lmx_lab.engine.grammar.sandbox import GrammarSandbox
from lmx_lab.engine.mlx.model import EncodedPrompt, LoadedModel, PromptTokenizer
from lmx_lab.engine.mlx.request import Generation
from lmx_lab.engine.mlx.thread import EngineThread
from lmx_lab.engine.model_lookup import chat_model
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest
from lmx_lab.engine.stream import Mailbox
from lmx_lab.engine.validation import check_length, check_tokens
from lmx_lab.errors import InvalidRequestError, NotLoadedError, QueueFullError
from lmx_lab.settings import Settings


class Intake:
    def __init__(self, thread: EngineThread, settings: Settings) -> None:
        self._thread = thread
        self._settings = settings
        self._templates: ThreadPoolExecutor | None = None
        self._prompts: ThreadPoolExecutor | None = None
        self._compiling: ThreadPoolExecutor | None = None
        self._trials = GrammarSandbox()
        self._to_compile = 0
        self._counting = threading.Lock()
        self._tokenizing = 0

    @property
    def tokenizing(self) -> bool:
        """Whether prompts are on their way to the engine's thread."""
        return self._tokenizing > 0

    def start(self) -> None:
        self._templates = self._templates or ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmx-lab-templates")
        self._prompts = self._prompts or ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmx-lab-prompts")
        if self._compiling is None:
            self._compiling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmx-lab-grammars")
            self._trials = GrammarSandbox(lambda: self._to_compile > 1)

    def stop(self) -> None:
        executors = (self._templates, self._prompts, self._compiling)
        self._templates = self._prompts = self._compiling = None
        for executor in executors:
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)
        # What is being compiled ends with it.
        self._trials.close()

    async def generations(self, request: GenerationRequest, choices: int) -> list[Generation]:
        """What the engine thread needs for so many answers to one request.

        Raises: as ``Engine.submit``.
        """
        most = self._settings.slots + self._settings.queue_limit
        if choices > most:
            raise InvalidRequestError(f"n is {choices}; this server takes {most} (slots and queue_limit)", param="n")
        arrived_at = time.perf_counter()
        found = chat_model(self._thread, request.model)
        prompts, width = found.prompts, found.traits.vocabulary_size
        # Nobody may hold the model while something else is awaited, or it could not be unloaded.
        del found
        with self._place_in_queue():
            prompt = await self._encoded(request, prompts)
            matchers = await self._matchers(request, prompts, prompt, width=width, count=choices)
        model = chat_model(self._thread, request.model)
        if model.prompts is not prompts:
            raise NotLoadedError(f"the model was exchanged for {model.entry.id} before this request began; ask again")
        check_length(request, prompt.tokens, model.entry, model.context_length)
        check_tokens(request, model.entry, model.traits.vocabulary_size)
        return [
            Generation(
                request=request,
                prompt=prompt.tokens,
                mailbox=Mailbox(asyncio.get_running_loop()),
                model=weakref.ref(model),
                arrived_at=arrived_at,
                timeout_s=request.timeout_s or self._settings.request_timeout_s,
                choice=choice,
                shape=prompts.chat_format.channel_format(request, prompt.thinking),
                constraint=_constraint(request, prompt, matcher, model),
            )
            for choice, matcher in enumerate(matchers)
        ]

    async def _encoded(self, request: GenerationRequest, prompts: PromptTokenizer) -> EncodedPrompt:
        loop, text = asyncio.get_running_loop(), None
        if isinstance(request.prompt, ChatPrompt):
            text = await loop.run_in_executor(self._templates, prompts.rendered, request, request.prompt)
        return await loop.run_in_executor(self._prompts, prompts.encode, request, text)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids as the loaded model's tokenizer shows it."""
        prompts = chat_model(self._thread, None).prompts
        return await asyncio.get_running_loop().run_in_executor(self._prompts, prompts.decode, tokens)

    async def _matchers(
        self, request: GenerationRequest, prompts: PromptTokenizer, prompt: EncodedPrompt, *, width: int, count: int
    ) -> list[LLMatcher] | list[None]:
        """A grammar's state for each answer, if there is a grammar."""
        grammar = prompts.chat_format.grammar(request, prompt.thinking)
        if grammar is None:
            return [None] * count
        loop = asyncio.get_running_loop()
        words = None if prompts.grammars else await loop.run_in_executor(self._prompts, prompts.words, width)
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None

        def compiled() -> list[LLMatcher]:
            if prompts.grammars is None:
                assert words is not None
                prompts.grammars = GrammarCompiler(words, self._trials)
            return prompts.grammars.matchers(grammar, count, tools)

        with self._counting:
            self._to_compile += 1
        try:
            return await loop.run_in_executor(self._compiling, compiled)
        finally:
            with self._counting:
                self._to_compile -= 1

    @contextlib.contextmanager
    def _place_in_queue(self) -> Iterator[None]:
        """Prompts on their way to tokens count as waiting, or a flood of long ones would wait without a limit."""
        now, settings = self._thread.snapshot, self._settings
        generations = now.active_requests + now.queued_requests - now.encode_requests
        if generations + self._tokenizing >= settings.slots + settings.queue_limit:
            raise QueueFullError(
                f"{settings.slots + settings.queue_limit} requests run or wait, as many as slots and queue_limit "
                f"allow; try again in {now.place_free_s:.0f} s",
                retry_after_s=now.place_free_s,
            )
        with self._counting:
            self._tokenizing += 1
        try:
            yield
        finally:
            with self._counting:
                self._tokenizing -= 1


def _constraint(
    request: GenerationRequest, prompt: EncodedPrompt, matcher: LLMatcher | None, model: LoadedModel
) -> Constraint | None:
    budget, chat_format = None, model.prompts.chat_format
    if (
        request.thinking_budget is not None
        and chat_format.reasoning_markers is not None
        and prompt.thinking != "closed"
    ):
        budget = ThinkingBudget(
            request.thinking_budget,
            markers=chat_format.reasoning_markers,
            end=chat_format.reasoning_end,
            open=prompt.thinking == "open",
            bytes_of=model.vocabulary.bytes_of,
        )
    return Constraint(matcher, budget) if matcher is not None or budget is not None else None

"""Prepare chat requests and plain prompts for the engine thread.

Chats are rendered, texts are tokenized and grammars are compiled in sandboxes and on other threads, so that no loop
waits for them.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Sequence

from llguidance import LLMatcher

from lmx_lab.engine.admission import LOAD_FIRST, Permit
from lmx_lab.engine.encoders import LoadedEncoder
from lmx_lab.engine.grammar.mask import Constraint, ThinkingBudget
from lmx_lab.engine.loop_engine import deadline
from lmx_lab.engine.mlx.model import EncodedPrompt, LoadedModel, PromptTokenizer
from lmx_lab.engine.mlx.request import MlxGeneration
from lmx_lab.engine.mlx.tracing import TraceJob
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, Prompt, TraceRequest
from lmx_lab.engine.stream import Mailbox
from lmx_lab.engine.validation import check_length, check_steered_weights, check_token_ids, check_tokens
from lmx_lab.errors import NotLoadedError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.fingerprint import known_content_digest


class PromptPreparer:
    """Renders and tokenizes prompts, and compiles grammars.

    Args:
        model_of: Returns the model in memory for an entry, or raises an error if it is no longer there.
    """

    def __init__(self, settings: Settings, model_of: Callable[[ModelEntry], LoadedModel | LoadedEncoder]) -> None:
        self._settings = settings
        self._find_model = model_of

    async def prepare(
        self, entry: ModelEntry, request: GenerationRequest, permits: Sequence[Permit]
    ) -> list[MlxGeneration]:
        """Return a generation for each permit.

        Raises:
            LabError: see ``InferenceEngine.submit_all``.
        """
        arrived_at, timeout_s = time.perf_counter(), request.timeout_s or self._settings.request_timeout_s
        async with deadline(arrived_at, timeout_s):
            return await self._prepare(entry, request, permits, arrived_at=arrived_at, timeout_s=timeout_s)

    async def _prepare(
        self,
        entry: ModelEntry,
        request: GenerationRequest,
        permits: Sequence[Permit],
        *,
        arrived_at: float,
        timeout_s: float,
    ) -> list[MlxGeneration]:
        model = self._model_of(entry)
        prompts, width = model.prompts, model.traits.vocabulary_size
        # While this waits, it must not refer to the model, or the model could not be unloaded.
        del model
        check_tokens(request, entry, width)
        if any(each.weights for each in request.steer):
            loaded = self._model_of(entry).entry
            check_steered_weights(request.steer, entry, await in_thread(lambda: known_content_digest(loaded)))
        prompt = await self._encode(request, prompts)
        named = await prompts.named_tokens(request) if request.logprob_tokens else ()
        start = await prompts.start_tokens(request) if request.start is not None else []
        matchers = await self._matchers(request, prompts, prompt, width=width, count=len(permits))
        model = self._model_of(entry)
        tokens = [*prompt.tokens, *start]
        check_length(request, tokens, model.entry, model.context_length)
        generations = [
            MlxGeneration(
                request=request,
                prompt=tokens,
                start=start,
                mailbox=Mailbox(asyncio.get_running_loop(), arrived_at),
                permit=permit,
                model=weakref.ref(model),
                arrived_at=arrived_at,
                timeout_s=timeout_s,
                choice=choice,
                named_tokens=named,
                channel_format=prompts.chat_format.channel_format(request, prompt.thinking),
                constraint=_constraint(request, prompt, matcher, model),
            )
            for choice, (matcher, permit) in enumerate(zip(matchers, permits, strict=True))
        ]
        if start:
            del model
            for generation in generations:
                await prompts.call(generation.read_start)
        return generations

    async def prepare_trace(self, entry: ModelEntry, request: TraceRequest, permit: Permit) -> TraceJob:
        """Return the job of a trace.

        Raises:
            LabError: see ``InferenceEngine.submit_trace``.
        """
        arrived_at, work = time.perf_counter(), request.work
        timeout_s = request.timeout_s or self._settings.request_timeout_s
        async with deadline(arrived_at, timeout_s):
            tokens, clean = [
                [] if prompt is None else await self._trace_tokens(entry, prompt)
                for prompt in (request.prompt, request.clean)
            ]
            chosen = []
            for param in ("token", "answer", "other"):
                if (named := getattr(work, param, None)) is not None:
                    model = self._model_of(entry)
                    prompts, width = model.prompts, model.traits.vocabulary_size
                    del model
                    token = await prompts.token_id(named, param)
                    check_token_ids([token], param, entry, width)
                    chosen.append(token)
        return TraceJob(
            work=work,
            tokens=tokens,
            clean=clean,
            chosen=chosen,
            model=weakref.ref(self._model_of(entry)),
            model_id=entry.id,
            permit=permit,
            arrived_at=arrived_at,
            timeout_s=timeout_s,
        )

    async def _trace_tokens(self, entry: ModelEntry, prompt: Prompt) -> list[int]:
        """Return the tokens of a text.

        Raises:
            LabError: see ``InferenceEngine.submit_trace``.
        """
        request = GenerationRequest(prompt=prompt, max_tokens=0)
        model = self._model_of(entry)
        prompts, width, limit = model.prompts, model.traits.vocabulary_size, model.context_length
        del model
        check_tokens(request, entry, width)
        tokens = (await self._encode(request, prompts)).tokens
        check_length(request, tokens, entry, limit)
        return list(tokens)

    async def tokens_of(self, entry: ModelEntry, request: GenerationRequest) -> list[int]:
        """Return the tokens of the prompt.

        Raises:
            LabError: see ``InferenceEngine.encode``.
        """
        return list((await self._encode(request, self._model_of(entry).prompts)).tokens)

    async def render(self, entry: ModelEntry, request: GenerationRequest) -> str:
        """Return the text of a chat prompt.

        Raises:
            LabError: see ``InferenceEngine.render``.
        """
        return await self._render(request, self._model_of(entry).prompts)

    async def decode(self, tokens: Sequence[int], entry: ModelEntry | None) -> str:
        """Return the text of token ids as the model's tokenizer shows it.

        Raises:
            NotLoadedError: there is no chat model.
            InvalidRequestError: a token is not in the vocabulary.
        """
        prompts = self._prompts_with(tokens, entry)
        return await prompts.call(prompts.decode, tokens)

    async def token_bytes(self, tokens: Sequence[int], entry: ModelEntry | None) -> list[bytes]:
        """Return the bytes of each token. Raises the same as ``decode``."""
        prompts = self._prompts_with(tokens, entry)
        return await prompts.call(prompts.token_bytes, tokens)

    def _prompts_with(self, tokens: Sequence[int], entry: ModelEntry | None) -> PromptTokenizer:
        """Return the tokenizer of a model whose vocabulary contains these tokens."""
        if entry is None:
            raise NotLoadedError(f"no model is loaded; {LOAD_FIRST}")
        model = self._model_of(entry)
        check_token_ids(tokens, "tokens", entry, model.traits.vocabulary_size)
        return model.prompts

    def _model_of(self, entry: ModelEntry) -> LoadedModel:
        model = self._find_model(entry)
        if not isinstance(model, LoadedModel):
            raise NotLoadedError(f"{entry.id} is not a chat model; {LOAD_FIRST}")
        return model

    async def _render(self, request: GenerationRequest, prompts: PromptTokenizer) -> str:
        assert isinstance(request.prompt, ChatPrompt)
        return await prompts.render(request, request.prompt)

    async def _encode(self, request: GenerationRequest, prompts: PromptTokenizer) -> EncodedPrompt:
        text = None
        if isinstance(request.prompt, ChatPrompt) and request.start is None:
            text = await self._render(request, prompts)
        return await prompts.encode(request, text)

    async def _matchers(
        self, request: GenerationRequest, prompts: PromptTokenizer, prompt: EncodedPrompt, *, width: int, count: int
    ) -> list[LLMatcher] | list[None]:
        """Return the state of the request's grammar for each answer; None without a grammar."""
        grammar = prompts.chat_format.grammar(request, prompt.thinking)
        if grammar is None:
            return [None] * count
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None
        return await prompts.grammars(width).matchers(grammar, count, tools)


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

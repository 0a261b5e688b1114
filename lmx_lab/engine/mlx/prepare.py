"""Prepare chat requests and plain prompts for the engine thread."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from llguidance import LLMatcher

from lmx_lab.engine.admission import LOAD_FIRST, Permit
from lmx_lab.engine.encoders import LoadedEncoder
from lmx_lab.engine.loop_engine import deadline
from lmx_lab.engine.mlx.batch import MlxGeneration, MlxRow
from lmx_lab.engine.mlx.model import LoadedModel, PromptTokenizer
from lmx_lab.engine.mlx.tracing import TraceJob
from lmx_lab.engine.preparer import encode_prompt, ends_answer, prepare, token_of
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, Prompt, TraceRequest
from lmx_lab.engine.text.chat_format_detection import ChatFormat, ReasoningState
from lmx_lab.engine.text.splitter import Decode
from lmx_lab.engine.validation import (
    check_characters,
    check_length,
    check_messages,
    check_steered_weights,
    check_token_ids,
    check_tokens,
)
from lmx_lab.errors import NotLoadedError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.files import in_thread
from lmx_lab.weights.fingerprint import known_content_digest
from lmx_lab.weights.tokenizer_files import InfillTokens

T = TypeVar("T")


class PromptPreparer:
    """Prepares requests on the loop that sends them.

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
        tokenizer, reader = self._tokenizer(entry), asyncio.get_running_loop()
        async with deadline(arrived_at, timeout_s):
            if any(each.weights for each in request.steer):
                loaded = self.model_of(entry).entry
                digest = await in_thread(lambda: known_content_digest(loaded))
                check_steered_weights(request.steer, entry, digest)
            return await prepare(tokenizer, request, permits, reader=reader, arrived_at=arrived_at, timeout_s=timeout_s)

    async def prepare_trace(self, entry: ModelEntry, request: TraceRequest, permit: Permit) -> TraceJob:
        """Return the job of a trace.

        Raises:
            LabError: see ``InferenceEngine.submit_trace``.
        """
        arrived_at, work, tokenizer = time.perf_counter(), request.work, self._tokenizer(entry)
        timeout_s = request.timeout_s or self._settings.request_timeout_s
        async with deadline(arrived_at, timeout_s):
            tokens, clean = [
                [] if prompt is None else await self._trace_tokens(tokenizer, prompt)
                for prompt in (request.prompt, request.clean)
            ]
            chosen = []
            for param in ("token", "answer", "other"):
                if (named := getattr(work, param, None)) is not None:
                    token = await token_of(tokenizer, named, param)
                    check_token_ids([token], param, entry, tokenizer.vocabulary_size)
                    chosen.append(token)
        return TraceJob(
            work=work,
            tokens=tokens,
            clean=clean,
            chosen=chosen,
            model=weakref.ref(self.model_of(entry)),
            model_id=entry.id,
            permit=permit,
            arrived_at=arrived_at,
            timeout_s=timeout_s,
        )

    async def _trace_tokens(self, tokenizer: MlxTokenizer, prompt: Prompt) -> list[int]:
        """Return the tokens of a text.

        Raises:
            LabError: see ``InferenceEngine.submit_trace``.
        """
        request = GenerationRequest(prompt=prompt, max_tokens=0)
        check_tokens(request, tokenizer.entry, tokenizer.vocabulary_size)
        tokens, _ = await encode_prompt(tokenizer, request)
        check_length(request, tokens, tokenizer.entry, tokenizer.context_length)
        return tokens

    async def tokens_of(self, entry: ModelEntry, request: GenerationRequest) -> list[int]:
        """Return the tokens of the prompt.

        Raises:
            LabError: see ``InferenceEngine.encode``.
        """
        return (await encode_prompt(self._tokenizer(entry), request))[0]

    async def render(self, entry: ModelEntry, request: GenerationRequest) -> str:
        """Return the text of a chat prompt.

        Raises:
            LabError: see ``InferenceEngine.render``.
        """
        assert isinstance(request.prompt, ChatPrompt)
        check_messages(request.prompt.messages)
        return await self._tokenizer(entry).render(request, request.prompt)

    async def decode(self, entry: ModelEntry, tokens: Sequence[int]) -> str:
        """Return the text of token ids as the model's tokenizer shows it.

        Raises:
            NotLoadedError: the model has been unloaded, or is not a chat model.
            InvalidRequestError: a token is not in the vocabulary.
        """
        prompts = self._prompts_with(entry, tokens)
        return await prompts.call(prompts.decode, tokens)

    async def token_bytes(self, entry: ModelEntry, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token. Raises the same as ``decode``."""
        prompts = self._prompts_with(entry, tokens)
        return await prompts.call(prompts.token_bytes, tokens)

    def _prompts_with(self, entry: ModelEntry, tokens: Sequence[int]) -> PromptTokenizer:
        """Return the tokenizer of a model whose vocabulary contains these tokens."""
        model = self.model_of(entry)
        check_token_ids(tokens, "tokens", entry, model.traits.vocabulary_size)
        return model.prompts

    def model_of(self, entry: ModelEntry) -> LoadedModel:
        """Return the chat model in memory that was loaded with this entry; raises the errors of ``_find_model``."""
        model = self._find_model(entry)
        if not isinstance(model, LoadedModel):
            raise NotLoadedError(f"{entry.id} is not a chat model; {LOAD_FIRST}")
        return model

    def _tokenizer(self, entry: ModelEntry) -> MlxTokenizer:
        model = self.model_of(entry)
        return MlxTokenizer(
            entry=entry,
            vocabulary_size=model.traits.vocabulary_size,
            context_length=model.context_length,
            prompts=model.prompts,
            bytes_of=model.vocabulary.bytes_of,
            decode=model.text.decode,
            model_of=self.model_of,
        )


@dataclass(frozen=True, kw_only=True)
class MlxTokenizer:
    """The ``Tokenizer`` of a loaded model, to whose weights it does not refer: the model could not be unloaded
    otherwise while a request is prepared.
    """

    entry: ModelEntry
    vocabulary_size: int
    context_length: int | None
    prompts: PromptTokenizer
    bytes_of: Callable[[int], bytes]
    decode: Decode
    model_of: Callable[[ModelEntry], LoadedModel]

    @property
    def chat_format(self) -> ChatFormat:
        return self.prompts.chat_format

    def check(self, request: GenerationRequest) -> None:
        """See ``Tokenizer``. The vectors to add are checked on the engine thread."""

    async def encode(self, request: GenerationRequest, text: str, *, special: bool, param: str) -> list[int]:
        """See ``Tokenizer``."""
        return await self.prompts.encode(text, special=special, param=param)

    async def render(self, request: GenerationRequest, chat: ChatPrompt) -> str:
        """Return the text of a chat."""
        return await self.prompts.render(request, chat)

    async def encode_chat(self, request: GenerationRequest, chat: ChatPrompt) -> tuple[list[int], str]:
        """See ``Tokenizer``."""
        text = await self.render(request, chat)
        check_characters(text, "messages")
        return await self.encode(request, text, special=False, param="messages"), text

    async def encode_name(self, text: str, param: str) -> list[int]:
        """See ``Tokenizer``."""
        return await self.prompts.encode_all(text, special=False, param=param)

    async def show(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return await self.prompts.call(self.prompts.decode, tokens)

    async def infill_tokens(self) -> InfillTokens | None:
        """See ``Tokenizer``."""
        return self.prompts.infill

    def reasoning(self, request: GenerationRequest, tail: str) -> ReasoningState:
        """See ``Tokenizer``."""
        return self.chat_format.reasoning_state(tail)

    def divides(self, request: GenerationRequest) -> bool:
        """See ``Tokenizer``."""
        return False

    async def enforce(self, request: GenerationRequest, grammar: str, count: int) -> list[LLMatcher]:
        """See ``Tokenizer``."""
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None
        return await self.prompts.grammars(self.vocabulary_size).matchers(grammar, count, tools)

    def row(self, request: GenerationRequest, prompt: list[int], choice: int) -> MlxRow:
        """See ``Tokenizer``."""
        return MlxRow(model=weakref.ref(self.model_of(self.entry)), tokens=prompt)

    async def begin(self, generation: MlxGeneration) -> None:
        """See ``Tokenizer``."""
        ends = self.model_of(self.entry).end_tokens(generation.request)
        read = partial(generation.read_start, ends=ends_answer(generation, ends))
        await self.prompts.call(read)

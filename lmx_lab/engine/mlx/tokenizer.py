"""Convert prompts to tokens and tokens to text with a tokenizer of transformers. Does not refer to weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from llguidance import LLMatcher

from lmx_lab.engine.answers import Generation
from lmx_lab.engine.grammar.compile import GrammarCompiler, read_token_table
from lmx_lab.engine.mlx.batch import MlxRow
from lmx_lab.engine.preparer import ends_answer, render_chat_template
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, InfillPrompt
from lmx_lab.engine.text.chat_format_detection import ChatFormat, ReasoningState
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.engine.tokenizing.encoder import TextEncoder, is_panic
from lmx_lab.engine.validation import (
    CHARACTERS_PER_TOKEN,
    check_characters,
    check_samplers,
    check_size,
    readable_tokens,
    too_long,
)
from lmx_lab.errors import EngineError
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.tokenizer_files import InfillTokens, find_infill_tokens

T = TypeVar("T")


class MlxTokenizer:
    """The ``Tokenizer`` of a chat model. Has two tokenizers, because Rust tokenizers cannot be shared by threads.

    Its coroutines may be awaited on any loop. ``call`` calls other methods that take long, on a thread of its own.

    Args:
        own: The tokenizer for prompts.
        answers: The tokenizer for answers, which the engine thread uses.
        width: Number of logits for each token.
        encoder: Encodes texts; None if the tokenizer is written in Python.
    """

    def __init__(
        self,
        own: Any,
        answers: Any,
        entry: ModelEntry,
        *,
        width: int,
        context_length: int | None,
        chat_format: ChatFormat,
        encoder: TextEncoder | None,
    ) -> None:
        self.entry = entry
        self.vocabulary_size = width
        self.context_length = context_length
        self.chat_format = chat_format
        self.vocabulary = Vocabulary(answers)
        """Belongs to the engine thread."""
        self.bytes_of = self.vocabulary.bytes_of
        self.decode = AnswerText(answers).decode
        self.ends = frozenset(int(token) for token in answers.eos_token_ids)
        """The tokens that end any answer."""
        backend = getattr(own, "backend_tokenizer", None)
        self.infill = find_infill_tokens(backend.token_to_id if backend is not None else own.get_vocab().get)
        self._tokenizer = own
        self._encoder = encoder
        self._vocabulary = Vocabulary(own)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmx-lab-prompts")
        # It must not refer to this object, so that its process ends as soon as the model is unloaded.
        read = partial(read_token_table, own, width=width, markers=chat_format.marker_tokens)
        self._grammars = GrammarCompiler(read)

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the thread of this tokenizer, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def check(self, request: GenerationRequest) -> None:
        """See ``Tokenizer``. The vectors to add are checked on the engine thread."""
        check_samplers(request.sampling, "MLX")

    async def encode(self, request: GenerationRequest, text: str, *, special: bool, param: str) -> list[int]:
        """See ``Tokenizer``.

        Raises:
            InvalidRequestError: the tokenizer fails.
            ContextLengthError: the text has too many tokens, or so many characters that it is not tokenized.
            QueueFullError: other long texts are being tokenized.
        """
        context, beginning = self.context_length, text
        context = None if context is None else readable_tokens(request, context)
        if context is not None and len(text) > context * CHARACTERS_PER_TOKEN:
            beginning = text[: context * CHARACTERS_PER_TOKEN]
        ids = await self._encode(beginning, special=special, param=param)
        if beginning is not text:
            assert context is not None
            if len(ids) > context:
                raise too_long(request, f"more than {len(ids)}", self.entry, context)
            check_size(text, context, self.entry.id, param)
            ids = await self._encode(text, special=special, param=param)
        return ids

    async def _encode(self, text: str, *, special: bool, param: str) -> list[int]:
        """Return the tokens of a text of any length."""
        if self._encoder is None:
            tokens = await self.call(partial(self._tokenizer.encode, text, add_special_tokens=special))
            return [int(token) for token in tokens]
        (encoded,) = await self._encoder.encode([text], param=param, special=special)
        return encoded.ids

    async def encode_chat(self, request: GenerationRequest, chat: ChatPrompt) -> tuple[list[int], str]:
        text = await self.render(request, chat)
        check_characters(text, "messages")
        return await self.encode(request, text, special=False, param="messages"), text

    async def encode_name(self, text: str, param: str) -> list[int]:
        return await self._encode(text, special=False, param=param)

    async def render(self, request: GenerationRequest, chat: ChatPrompt) -> str:
        return await render_chat_template(self._tokenizer, self.chat_format, self.entry, request, chat)

    async def show(self, tokens: Sequence[int]) -> str:
        return await self.call(partial(_decode, self._tokenizer, tokens, clean_up_tokenization_spaces=False))

    async def decoded(self, tokens: Sequence[int]) -> str:
        return await self.show(tokens)

    async def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        return await self.call(lambda: [self._vocabulary.bytes_of(token) for token in tokens])

    async def infill_tokens(self) -> InfillTokens | None:
        return self.infill

    def reasoning(self, request: GenerationRequest, tail: str) -> ReasoningState:
        return self.chat_format.reasoning_state(tail)

    async def enforce(self, request: GenerationRequest, grammar: str, count: int) -> tuple[list[LLMatcher], str | None]:
        tools = request.prompt.tools if isinstance(request.prompt, ChatPrompt) else None
        return await self._grammars.matchers(grammar, count, tools), None

    def row(self, request: GenerationRequest, prompt: list[int], choice: int) -> MlxRow:
        is_infill = isinstance(request.prompt, InfillPrompt)
        return MlxRow(tokens=prompt, ends=self.ends | self.infill.ends if is_infill and self.infill else self.ends)

    async def begin(self, generation: Generation[MlxRow]) -> None:
        ends = ends_answer(generation, generation.row.ends)
        await self.call(partial(generation.read_start, ends=ends))


@dataclass(frozen=True, eq=False)
class AnswerText:
    """Decodes output tokens to text without special tokens."""

    tokenizer: Any

    def decode(self, tokens: Sequence[int]) -> str:
        # Cleaning up spaces would change text that has already been streamed.
        return _decode(self.tokenizer, tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _decode(tokenizer: Any, tokens: Sequence[int], **options: bool) -> str:
    """Return the text of token ids.

    Raises:
        EngineError: the tokenizer fails.
    """
    try:
        return str(tokenizer.decode(tokens, **options))
    except BaseException as exc:
        if is_panic(exc):
            raise EngineError(f"the tokenizer of the model fails with these tokens: {exc}") from None
        raise

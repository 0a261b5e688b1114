"""The model in memory: loading its files on the engine thread, and its tokenizer for everyone else."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.utils import load_config, load_model, load_tokenizer

from lmx_lab.engine.grammar.compile import Grammars, words_of
from lmx_lab.engine.grammar.sandbox import Words
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.kv_cache import Traits, measure
from lmx_lab.engine.mlx.memory_plan import UNBOUNDED_TOKENS, Footprint
from lmx_lab.engine.mlx.weights_dtype import fit_weights
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from lmx_lab.engine.templates.renderer import TemplateLimitError, rendered
from lmx_lab.engine.text.chat_format_detection import TAIL_TOKENS, Dialect, Thinking, dialect_of
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.engine.validation import CHARACTERS_PER_TOKEN, check_characters, check_messages
from lmx_lab.engine.word_cache import without_word_cache
from lmx_lab.errors import ContextLengthError, InvalidRequestError, OutOfMemoryError, UnusableModelError
from lmx_lab.values.models import ModelEntry

LEAST_CONTEXT_TOKENS = 256
"""A model that cannot answer even this much is not worth loading."""


@dataclass(frozen=True)
class EncodedPrompt:
    tokens: list[int]
    thinking: Thinking


class PromptTokenizer:
    """Prompts to token ids. Used by one thread at a time, beside the engine's (Rust tokenizers refuse to be shared);
    ``render`` by any."""

    def __init__(self, tokenizer: Any, model: str, context_length: int | None, dialect: Dialect) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._context_length = context_length
        self.dialect = dialect
        self.grammars: Grammars | None = None
        """Of the thread that compiles; made when the first is asked for."""

    def render(self, request: GenerationRequest, prompt: ChatPrompt) -> str:
        """A chat as its text, by the model's chat template. Touches no tokens.

        Args:
            prompt: The request's.

        Raises:
            InvalidRequestError: no chat template, or the template refuses these messages or goes over its limits; or
                they have half characters.
        """
        check_messages(prompt.messages)
        if not self._tokenizer.has_chat_template:
            raise InvalidRequestError(f"{self._model} has no chat template: it takes plain prompts only", param="model")
        try:
            given = self.dialect.template_input(request, prompt)
            messages = given.pop("messages")
            return rendered(self._tokenizer, messages, add_generation_prompt=True, **given, **prompt.template_options)
        except TemplateLimitError as exc:
            raise InvalidRequestError(
                f"the chat template of {self._model} {exc}, its limit; send less, or take another model",
                param="messages",
            ) from exc
        # A template is a program that comes with the model: it may raise anything, about these messages.
        except Exception as exc:
            raise InvalidRequestError(
                f"the chat template of {self._model} refuses these messages: {exc}", param="messages"
            ) from exc

    def encode(self, request: GenerationRequest, text: str | None) -> EncodedPrompt:
        """Token ids of the prompt.

        Args:
            text: Of a chat, what ``render`` gave.

        Raises:
            InvalidRequestError: the prompt is empty, or has half characters.
            ContextLengthError: the text is so long that its beginning alone does not fit.
        """
        thinking: Thinking = "closed"
        match prompt := request.prompt:
            case ChatPrompt():
                assert text is not None
                check_characters(text, "messages")
                self._check_beginning(text, "messages")
                tokens = [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
                if self.dialect.thoughts is not None:
                    thinking = self.dialect.thinking(self.decode(tokens[-TAIL_TOKENS:]))
            case TextPrompt():
                check_characters(prompt.text, "prompt")
                self._check_beginning(prompt.text, "prompt")
                tokens = [int(token) for token in self._tokenizer.encode(prompt.text)]
            case TokenPrompt():
                tokens = list(prompt.tokens)
        if not tokens:
            param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
            raise InvalidRequestError("the prompt is empty: no token came out of it", param=param)
        return EncodedPrompt(tokens, thinking)

    def words(self, width: int) -> Words:
        """The vocabulary, for grammars."""
        return words_of(self._tokenizer, width=width, markers=self.dialect.marker_tokens)

    def _check_beginning(self, text: str, param: str) -> None:
        # Others wait while a prompt becomes tokens: eight megabytes of text would take 13 s (measured).
        context = self._context_length
        if context is None or len(text) <= context * CHARACTERS_PER_TOKEN:
            return
        tokens = len(self._tokenizer.encode(text[: context * CHARACTERS_PER_TOKEN]))
        if tokens > context:
            raise ContextLengthError(
                f"the prompt has more than {tokens} tokens and {self._model} holds {context} in all, "
                "the answer included; shorten the prompt",
                param=param,
            )

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens shown."""
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text


@dataclass(frozen=True, eq=False)
class AnswerText:
    """Output tokens to text: without special tokens, nothing cleaned up."""

    tokenizer: Any

    def decode(self, tokens: Sequence[int]) -> str:
        # Cleaning up spaces would rewrite text that has already been streamed.
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A chat model in memory. ``prompts`` belongs to the prompt thread, the rest to the engine thread."""

    entry: ModelEntry
    model: Any
    tokenizer: Any
    prompts: PromptTokenizer
    context_length: int | None
    """Tokens of one request, prompt and answer: the model's limit, or less where memory does not hold as much."""
    memory_bytes: int
    traits: Traits
    vocabulary: Vocabulary
    text: AnswerText

    @property
    def eos_tokens(self) -> list[list[int]]:
        return [[int(token)] for token in sorted(self.tokenizer.eos_token_ids)]


def load_chat(entry: ModelEntry, *, limit_bytes: int, dtype: str = "auto") -> LoadedModel:
    """Read a chat model's files into memory. Engine thread only; takes seconds.

    Args:
        dtype: As in ``Settings``.

    Raises:
        UnusableModelError: mlx-lm cannot build it from these files, or it is no chat model.
        OutOfMemoryError: it did not fit.
    """
    before = memory.used_bytes()
    try:
        model, tokenizer = _read(entry, limit_bytes=limit_bytes, dtype=dtype)
        traits = measure(model, memory.used_bytes() - before)
    except Exception as exc:
        if memory.is_out_of_memory(exc):
            raise OutOfMemoryError(
                f"{entry.id} does not fit in memory ({limit_bytes / 1e9:.1f} GB allowed): {exc}"
            ) from exc
        what = f"{type(exc).__name__}: {exc}"
        raise UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {what}", param="model") from exc
    context_length = _context_length(entry, traits.footprint, limit_bytes)
    try:
        dialect = dialect_of(tokenizer)
    except TemplateLimitError as exc:
        raise UnusableModelError(
            f"{entry.id} at {entry.path} cannot be loaded: its chat template {exc}, its limit", param="model"
        ) from exc
    # A copy remembers words again.
    own = without_word_cache(copy.deepcopy(tokenizer))
    return LoadedModel(
        entry=entry,
        model=model,
        tokenizer=tokenizer,
        prompts=PromptTokenizer(own, entry.id, context_length, dialect),
        context_length=context_length,
        memory_bytes=traits.footprint.weights_bytes,
        traits=traits,
        vocabulary=Vocabulary(tokenizer),
        text=AnswerText(tokenizer),
    )


def _read(entry: ModelEntry, *, limit_bytes: int, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer; the tokenizer first, since most that goes wrong goes wrong there, and it is small."""
    config = load_config(entry.path)
    tokenizer = without_word_cache(load_tokenizer(entry.path, eos_token_ids=config.get("eos_token_id")))
    model, _ = load_model(entry.path)
    fit_weights(model, dtype, limit_bytes=limit_bytes)
    return model, tokenizer


def _context_length(entry: ModelEntry, footprint: Footprint, limit_bytes: int) -> int | None:
    """The model's own limit, or what memory holds.

    Raises:
        OutOfMemoryError: memory holds the weights and next to nothing besides.
    """
    held = footprint.longest_request(limit_bytes, chunk=memory.LARGEST_CHUNK_TOKENS)
    if held < min(LEAST_CONTEXT_TOKENS, entry.context_length or LEAST_CONTEXT_TOKENS):
        raise OutOfMemoryError(
            f"{entry.id} takes {footprint.weights_bytes / 1e9:.2f} GB, {limit_bytes / 1e9:.2f} GB are allowed: what is "
            f"left holds {held} tokens; choose a smaller or more quantized model, or raise memory_limit_bytes"
        )
    if entry.context_length is None:
        return held if held < UNBOUNDED_TOKENS else None
    return min(held, entry.context_length)


def check_fits(entry: ModelEntry, *, limit_bytes: int) -> None:
    """Refuse before allocating: on Metal, running out of memory usually ends the process.

    Raises:
        OutOfMemoryError: the weights alone exceed what may be used.
    """
    if entry.size_bytes > limit_bytes:
        raise OutOfMemoryError(
            f"{entry.id} needs {entry.size_bytes / 1e9:.2f} GB for weights, {limit_bytes / 1e9:.2f} GB are allowed: "
            "choose a smaller or more quantized model, or raise memory_limit_bytes"
        )

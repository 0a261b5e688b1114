"""Load a chat model into memory, and tokenize prompts for it."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config, load_model, load_tokenizer

from lmx_lab.engine.grammar.compile import GrammarCompiler, read_token_table
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.capture.points import HookPoints, find_parts, find_points
from lmx_lab.engine.mlx.kv_cache import UNBOUNDED_TOKENS, Footprint, Traits, measure
from lmx_lab.engine.mlx.weights import checked_classes, fit_weights
from lmx_lab.engine.requests import ChatPrompt, GenerationRequest, InfillPrompt
from lmx_lab.engine.text.chat_format_detection import ChatFormat, detect_chat_format
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.engine.tokenizing.encoder import TextEncoder, is_panic
from lmx_lab.engine.tokenizing.loading import SandboxedTokenizer, build_encoder, without_word_cache
from lmx_lab.engine.tokenizing.templates import TemplateLimitError, render_request, write_chat
from lmx_lab.engine.validation import CHARACTERS_PER_TOKEN, check_size
from lmx_lab.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    LabError,
    OutOfMemoryError,
    UnusableModelError,
)
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.files import in_thread, start_in_thread
from lmx_lab.weights.tokenizer_files import find_infill_tokens

log = logging.getLogger(__name__)
T = TypeVar("T")
MIN_CONTEXT_TOKENS = 256
"""A model is not loaded if memory allows fewer tokens than this."""


class PromptTokenizer:
    """Converts prompts to token ids. Has a separate tokenizer, because Rust tokenizers cannot be shared by threads.

    Its coroutines may be awaited on any loop. ``call`` calls its other methods that take long, on a thread of its own.

    Args:
        encoder: Encodes texts; None if the tokenizer is written in Python.
    """

    def __init__(
        self,
        tokenizer: Any,
        model: str,
        context_length: int | None,
        chat_format: ChatFormat,
        encoder: TextEncoder | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._model = model
        self._context_length = context_length
        self.chat_format = chat_format
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.infill = find_infill_tokens(backend.token_to_id if backend is not None else tokenizer.get_vocab().get)
        self._vocabulary = Vocabulary(tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lmx-lab-prompts")
        self._grammars: GrammarCompiler | None = None

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the thread of this tokenizer, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def render(self, request: GenerationRequest, prompt: ChatPrompt) -> str:
        """Return the text of a chat prompt, rendered with the model's chat template. Does not use the tokenizer.

        Raises:
            InvalidRequestError: the model has no chat template; the template raises an error or exceeds its limits.
        """

        def write() -> bytes | str:
            if not self._tokenizer.has_chat_template:
                raise InvalidRequestError(
                    f"{self._model} has no chat template; send a prompt to /v1/completions instead", param="model"
                )
            given = self.chat_format.template_input(request, prompt)
            messages = given.pop("messages")
            return write_chat(self._tokenizer, messages, add_generation_prompt=True, **given, **prompt.template_options)

        try:
            # Each request has its own thread, because many messages take a long time.
            return await render_request(await in_thread(write, name="lmx-lab-template"))
        except LabError:
            raise
        except TemplateLimitError as exc:
            log.warning("request %s: the chat template of %s %s", request.caller.request_id, self._model, exc)
            raise InvalidRequestError(
                f"the chat template of {self._model} {exc}; send less, or use another model",
                param="messages",
            ) from exc
        # A template is a program that belongs to the model, and may raise any error.
        except Exception as exc:
            raise InvalidRequestError(
                f"the chat template of {self._model} refuses these messages: {exc}", param="messages"
            ) from exc

    async def encode(self, text: str, *, special: bool, param: str) -> list[int]:
        """Return the token ids of a text of a prompt.

        Raises:
            InvalidRequestError: the tokenizer fails.
            ContextLengthError: the text has too many tokens, or so many characters that it is not tokenized.
            QueueFullError: other long texts are being tokenized.
        """
        context, beginning = self._context_length, text
        if context is not None and len(text) > context * CHARACTERS_PER_TOKEN:
            beginning = text[: context * CHARACTERS_PER_TOKEN]
        ids = await self.encode_all(beginning, special=special, param=param)
        if beginning is not text:
            assert context is not None
            if len(ids) > context:
                raise self._too_long(len(ids), context, param)
            check_size(text, context, self._model, param)
            ids = await self.encode_all(text, special=special, param=param)
        return ids

    async def encode_all(self, text: str, *, special: bool, param: str) -> list[int]:
        """Do the same as ``encode`` for a text of any length."""
        if self._encoder is None:
            tokens = await self.call(partial(self._tokenizer.encode, text, add_special_tokens=special))
            return [int(token) for token in tokens]
        (encoded,) = await self._encoder.encode([text], param=param, special=special)
        return encoded.ids

    def _too_long(self, tokens: int, context: int, param: str) -> ContextLengthError:
        return ContextLengthError(
            f"the prompt has more than {tokens} tokens, and {self._model} takes {context}, including the answer; "
            "shorten the prompt",
            param=param,
        )

    def grammars(self, width: int) -> GrammarCompiler:
        """Return the compiler of grammars for this vocabulary.

        Args:
            width: Size of the vocabulary in the model's output.
        """
        if self._grammars is None:
            # It must not refer to this object, so that its process ends as soon as the model is unloaded.
            markers = self.chat_format.marker_tokens
            self._grammars = GrammarCompiler(partial(read_token_table, self._tokenizer, width=width, markers=markers))
        return self._grammars

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens.

        Raises:
            EngineError: the tokenizer fails.
        """
        return _decode(self._tokenizer, tokens, clean_up_tokenization_spaces=False)

    def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; those of a special token are its name."""
        return [self._vocabulary.bytes_of(token) for token in tokens]


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


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A chat model in memory. ``prompts`` is used on the prompt thread, everything else on the engine thread."""

    entry: ModelEntry
    model: Any
    tokenizer: Any
    prompts: PromptTokenizer
    context_length: int | None
    """Maximum number of tokens of a request, prompt and answer: the model's limit, or less if memory is too small."""
    memory_bytes: int
    traits: Traits
    """Those of the model, with the sizes of both models if there is a draft model."""
    draft: tuple[Any, int] | None
    """The draft model, and the number of tokens that both models know; None if there is none."""
    vocabulary: Vocabulary
    text: AnswerText

    def end_tokens(self, request: GenerationRequest | None = None) -> frozenset[int]:
        """Return the tokens that end the answer to a request; without a request, those that end any answer."""
        ends = frozenset(int(token) for token in self.tokenizer.eos_token_ids)
        if request is not None and isinstance(request.prompt, InfillPrompt) and self.prompts.infill is not None:
            return ends | self.prompts.infill.ends
        return ends

    @cached_property
    def hook_points(self) -> HookPoints:
        """The places in the model at which values can be read and replaced. The first use computes a few tokens.

        Raises:
            InvalidRequestError: the values of its blocks have no names.
        """
        return find_points(find_parts(self.model, self.entry.id), self.entry.id)

    def arithmetic(self) -> list[str]:
        """Return the properties, in addition to the model's files, that the values in KV caches depend on."""
        parameters: Any = tree_flatten(self.model.parameters())
        weights = sorted(f"{name} {value.dtype} {value.shape}" for name, value in parameters)
        versions = [f"{package} {version(package)}" for package in ("lmx-lab", "mlx", "mlx-lm")]
        return [*versions, str(mx.default_device()), *weights]


def load_chat(
    entry: ModelEntry, *, limit_bytes: int, dtype: str = "auto", context_length: int | None = None
) -> LoadedModel:
    """Load a chat model. Runs on the engine thread; takes seconds.

    Args:
        limit_bytes: Memory that the model and its requests may use.
        dtype: See ``Settings.dtype``.
        context_length: See ``LoadSpec``.

    Raises:
        UnusableModelError: mlx-lm cannot load these files, or they are not a chat model.
        OutOfMemoryError: the model does not fit in memory.
    """
    before = memory.used_bytes()
    try:
        model, tokenizer, own = _read(entry, limit_bytes=limit_bytes, dtype=dtype)
        traits = measure(model, memory.used_bytes() - before)
    except BaseException as exc:
        if not isinstance(exc, Exception) and not is_panic(exc):
            raise
        raise _load_error(entry, exc, limit_bytes) from exc
    draft = None
    if entry.draft is not None:
        draft, traits = _read_draft(entry, entry.draft, traits, limit_bytes=limit_bytes, dtype=dtype)
    context_length = _context_length(entry, traits.footprint, limit_bytes, context_length)
    try:
        encoder = build_encoder(own, entry.id)
        chat_format = detect_chat_format(SandboxedTokenizer.wrap(tokenizer, encoder))
    except (TemplateLimitError, InvalidRequestError) as exc:
        reason = exc.message if isinstance(exc, InvalidRequestError) else f"its chat template {exc}"
        raise UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {reason}", param="model") from exc
    return LoadedModel(
        entry=entry,
        model=model,
        tokenizer=tokenizer,
        prompts=PromptTokenizer(own, entry.id, context_length, chat_format, encoder),
        context_length=context_length,
        memory_bytes=traits.footprint.weights_bytes,
        traits=traits,
        draft=draft,
        vocabulary=Vocabulary(tokenizer),
        text=AnswerText(tokenizer),
    )


def _read(entry: ModelEntry, *, limit_bytes: int, dtype: str) -> tuple[Any, Any, Any]:
    """Return the model, and its tokenizer twice: each copy is used by one thread.

    The tokenizer is read at the same time as the weights. It causes most errors, which end the load immediately.
    """
    config = load_config(entry.path)

    def read_tokenizers() -> tuple[Any, Any]:
        tokenizer = without_word_cache(load_tokenizer(entry.path, eos_token_ids=config.get("eos_token_id")))
        # The copy has its own word cache. Copying may fail although a damaged tokenizer was read without an error.
        return tokenizer, without_word_cache(copy.deepcopy(tokenizer))

    reading = start_in_thread(read_tokenizers, name="lmx-lab-tokenizer")

    def raise_error() -> None:
        if reading.done():
            reading.result()

    try:
        # The weights are loaded lazily, and ``fit_weights`` reads them one by one.
        model, _ = load_model(entry.path, lazy=True, get_model_classes=checked_classes)
        fit_weights(model, dtype, limit_bytes=limit_bytes, before_each=raise_error)
    finally:
        wait([reading])
    return model, *reading.result()


def _load_error(entry: ModelEntry, exc: BaseException, limit_bytes: int, *, param: str = "model") -> LabError:
    """Return the error of a model whose files were not loaded because of this exception."""
    if memory.is_out_of_memory(exc):
        return OutOfMemoryError(f"{entry.id} does not fit in memory ({limit_bytes / 1e9:.1f} GB are allowed): {exc}")
    reason = f"{type(exc).__name__}: {exc}"
    return UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {reason}", param=param)


def _read_draft(
    entry: ModelEntry, draft: ModelEntry, traits: Traits, *, limit_bytes: int, dtype: str
) -> tuple[tuple[Any, int], Traits]:
    """Return the draft model and the number of tokens that both models know, and the traits of the model with the sizes
    of both.

    Raises:
        UnusableModelError: mlx-lm cannot load it, or a cache of one of the models cannot be trimmed.
    """
    before, weights_bytes = memory.used_bytes(), traits.footprint.weights_bytes
    limit_bytes = max(0, limit_bytes - weights_bytes)
    try:
        model, _ = load_model(draft.path, lazy=True, get_model_classes=checked_classes)
        fit_weights(model, dtype, limit_bytes=limit_bytes)
        own = measure(model, memory.used_bytes() - before)
    except Exception as exc:
        raise _load_error(draft, exc, limit_bytes, param="draft") from exc
    if untrimmed := next((it.id for it, known in ((entry, traits), (draft, own)) if not known.plain), None):
        raise UnusableModelError(
            f"drafts need a KV cache that can be trimmed, and {untrimmed} has sliding windows or recurrent layers; "
            "leave out draft",
            param="draft",
        )
    footprint = replace(
        traits.footprint,
        weights_bytes=weights_bytes + own.footprint.weights_bytes,
        draft_layers=own.footprint.layers,
    )
    known_tokens = min(traits.vocabulary_size, own.vocabulary_size)
    return (model, known_tokens), replace(traits, footprint=footprint)


def _context_length(entry: ModelEntry, footprint: Footprint, limit_bytes: int, requested: int | None) -> int | None:
    """Return the number of tokens that the model and the memory allow; None if neither has a limit.

    Raises:
        OutOfMemoryError: memory is enough for the weights, but not for ``MIN_CONTEXT_TOKENS``, or not for the
            requested context.
    """
    fitting = footprint.longest_request(limit_bytes, chunk=memory.MAX_CHUNK_TOKENS)
    if fitting < (requested or min(MIN_CONTEXT_TOKENS, entry.context_length or MIN_CONTEXT_TOKENS)):
        raise OutOfMemoryError(
            f"{entry.id} uses {footprint.weights_bytes / 1e9:.2f} GB, and {limit_bytes / 1e9:.2f} GB are allowed, "
            f"which is enough for {fitting} tokens; choose a smaller "
            f"{'context_length' if requested else 'or more quantized model'}, or raise memory_limit_bytes"
        )
    if requested is not None:
        return requested
    if entry.context_length is None:
        return fitting if fitting < UNBOUNDED_TOKENS else None
    return min(fitting, entry.context_length)


def check_fits(entry: ModelEntry, *, limit_bytes: int) -> None:
    """Check the size of the weights before loading, because on Metal running out of memory usually ends the process.

    Raises:
        OutOfMemoryError: the weights alone exceed the limit.
    """
    if entry.load_bytes > limit_bytes:
        draft = f" and its draft model {entry.draft.id} need" if entry.draft is not None else " needs"
        raise OutOfMemoryError(
            f"{entry.id}{draft} {entry.load_bytes / 1e9:.2f} GB for weights, and {max(0, limit_bytes) / 1e9:.2f} GB "
            "are allowed; choose a smaller or more quantized model, or raise memory_limit_bytes"
        )

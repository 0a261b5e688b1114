"""Load a chat model into memory, on the thread of loads. The tensors of a model are used on the engine thread later:
all of them are evaluated here, because a thread cannot evaluate what another one has only described.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config, load_model, load_tokenizer

from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.kv_cache import UNBOUNDED_TOKENS, Footprint, Traits, measure
from lmx_lab.engine.mlx.model import ChatWeights
from lmx_lab.engine.mlx.tokenizer import MlxTokenizer
from lmx_lab.engine.mlx.weights import checked_classes, fit_weights
from lmx_lab.engine.text.chat_format_detection import detect_chat_format
from lmx_lab.engine.tokenizing.encoder import is_panic
from lmx_lab.engine.tokenizing.loading import SandboxedTokenizer, build_encoder, without_word_cache
from lmx_lab.engine.tokenizing.templates import TemplateLimitError
from lmx_lab.errors import InvalidRequestError, LabError, OutOfMemoryError, UnusableModelError
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.files import start_in_thread

MIN_CONTEXT_TOKENS = 256
"""A model is not loaded if memory allows fewer tokens than this."""


def load_chat(
    entry: ModelEntry,
    *,
    limit_bytes: int,
    dtype: str = "auto",
    context_length: int | None = None,
    require_free: Callable[[int, str], object] = lambda *_: None,
    room_now: Callable[[], int] | None = None,
) -> tuple[ChatWeights, MlxTokenizer]:
    """Load a chat model, and return its weights and its tokenizer. Takes seconds.

    Args:
        limit_bytes: Memory that the model and its requests may use.
        dtype: See ``Settings.dtype``.
        context_length: See ``LoadSpec``.
        require_free: Called before each weight is read, with the size of the weights that are left and the name of the
            model. Raises ``OutOfMemoryError`` if other programs have taken the memory.
        room_now: Returns what is left of ``limit_bytes`` after the load, which limits the context. By default all of it
            is.

    Raises:
        UnusableModelError: mlx-lm cannot load these files, or they are not a chat model.
        OutOfMemoryError: the model does not fit in memory.
    """
    try:
        model, answers, own = _read(entry, limit_bytes=limit_bytes, dtype=dtype, require_free=require_free)
        traits = _measure(model)
    except BaseException as exc:
        if not isinstance(exc, Exception) and not is_panic(exc):
            raise
        raise _load_error(entry, exc, limit_bytes) from exc
    draft = None
    if entry.draft is not None:
        draft, traits = _read_draft(
            entry, entry.draft, traits, limit_bytes=limit_bytes, dtype=dtype, require_free=require_free
        )
    try:
        encoder = build_encoder(own, entry.id)
        chat_format = detect_chat_format(SandboxedTokenizer.wrap(answers, encoder))
    except (TemplateLimitError, InvalidRequestError) as exc:
        reason = exc.message if isinstance(exc, InvalidRequestError) else f"its chat template {exc}"
        raise UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {reason}", param="model") from exc
    room_bytes = limit_bytes if room_now is None else room_now()
    context_length = _context_length(entry, traits.footprint, room_bytes, context_length)
    tokenizer = MlxTokenizer(
        own,
        answers,
        entry,
        width=traits.vocabulary_size,
        context_length=context_length,
        chat_format=chat_format,
        encoder=encoder,
    )
    weights = ChatWeights(
        entry=entry,
        model=model,
        traits=traits,
        draft=draft,
        vocabulary=tokenizer.vocabulary,
        ends=tokenizer.ends,
    )
    return weights, tokenizer


def _measure(model: Any) -> Traits:
    """Return the traits of a model, and evaluate all its arrays, also those that no file has."""
    # Counted, because other models use and release memory during a load.
    parameters: Any = tree_flatten(model.parameters())
    traits = measure(model, sum(value.nbytes for _, value in parameters))
    mx.eval([value for _, module in model.named_modules() for value in module.values() if isinstance(value, mx.array)])
    return traits


def _read(
    entry: ModelEntry, *, limit_bytes: int, dtype: str, require_free: Callable[[int, str], object]
) -> tuple[Any, Any, Any]:
    """Return the model, and its tokenizer twice: each copy is used by one thread.

    The tokenizer is read at the same time as the weights. It causes most errors, which end the load immediately.
    """
    config = load_config(entry.path)

    def read_tokenizers() -> tuple[Any, Any]:
        tokenizer = without_word_cache(load_tokenizer(entry.path, eos_token_ids=config.get("eos_token_id")))
        # The copy has its own word cache. Copying may fail although a damaged tokenizer was read without an error.
        return tokenizer, without_word_cache(copy.deepcopy(tokenizer))

    reading = start_in_thread(read_tokenizers, name="lmx-lab-tokenizer")

    def before_each(left_bytes: int) -> None:
        if reading.done():
            reading.result()
        require_free(left_bytes, entry.id)

    try:
        # The weights are loaded lazily, and ``fit_weights`` reads them one by one.
        model, _ = load_model(entry.path, lazy=True, get_model_classes=checked_classes)
        fit_weights(model, dtype, limit_bytes=limit_bytes, before_each=before_each)
    finally:
        wait([reading])
    return model, *reading.result()


def _load_error(entry: ModelEntry, exc: BaseException, limit_bytes: int, *, param: str = "model") -> LabError:
    """Return the error of a model whose files were not loaded because of this exception."""
    if isinstance(exc, OutOfMemoryError):
        return exc
    if memory.is_out_of_memory(exc):
        return OutOfMemoryError(f"{entry.id} does not fit in memory ({limit_bytes / 1e9:.1f} GB are allowed): {exc}")
    reason = f"{type(exc).__name__}: {exc}"
    return UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {reason}", param=param)


def _read_draft(
    entry: ModelEntry,
    draft: ModelEntry,
    traits: Traits,
    *,
    limit_bytes: int,
    dtype: str,
    require_free: Callable[[int, str], object],
) -> tuple[tuple[Any, int], Traits]:
    """Return the draft model and the number of tokens that both models know, and the traits of the model with the sizes
    of both.

    Raises:
        UnusableModelError: mlx-lm cannot load it, or a cache of one of the models cannot be trimmed.
    """
    weights_bytes = traits.footprint.weights_bytes
    limit_bytes = max(0, limit_bytes - weights_bytes)
    try:
        model, _ = load_model(draft.path, lazy=True, get_model_classes=checked_classes)
        fit_weights(model, dtype, limit_bytes=limit_bytes, before_each=lambda left: require_free(left, draft.id))
        own = _measure(model)
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

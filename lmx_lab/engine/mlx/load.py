"""Load a chat model into memory, on the thread of loads. The tensors of a model are used on the engine thread later:
all of them are evaluated here, because a thread cannot evaluate what another one has only described.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_config, load_model, load_tokenizer

from lmx_lab.engine import memory as machine
from lmx_lab.engine.encoders.loading import encoder_bytes
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.kv_cache import UNBOUNDED_TOKENS, Traits, describe, try_batches
from lmx_lab.engine.mlx.tokenizer import MlxTokenizer
from lmx_lab.engine.mlx.weights import ChatWeights, checked_classes, fit_weights, read_bytes, read_weights
from lmx_lab.engine.text.chat_format_detection import detect_chat_format
from lmx_lab.engine.tokenizing.encoder import is_panic
from lmx_lab.engine.tokenizing.loading import SandboxedTokenizer, build_encoder, without_word_cache
from lmx_lab.engine.tokenizing.templates import TemplateLimitError
from lmx_lab.errors import InvalidRequestError, LabError, OutOfMemoryError, UnusableModelError
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.plan import CONCURRENCY, LargestContext, LoadPlan, kv_bytes_per_token, kv_constant_bytes
from lmx_lab.weights.files import start_in_thread

MIN_CONTEXT_TOKENS = 256
"""A model is not loaded if memory allows fewer tokens than this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenedModel:
    """A chat model, and its draft model if it has one, whose weights have not been read from disk."""

    model: Any
    draft: tuple[Any, Traits] | None
    """The draft model and its traits."""
    traits: Traits
    """Traits of the model, with the sizes of both."""


def open_chat(entry: ModelEntry, *, limit_bytes: int, dtype: str) -> OpenedModel:
    """Open a chat model: build it from the headers of its files, and choose the type of its weights in memory. Takes
    about 0.1 s. No weights are read.

    Raises:
        UnusableModelError: mlx-lm cannot build it from these files, they are not a chat model, or a cache of one of the
            models cannot be trimmed although there is a draft model.
    """
    free_bytes = machine.free_bytes()
    model, traits = _open(entry, limit_bytes=limit_bytes, dtype=dtype, free_bytes=free_bytes)
    if entry.draft is None:
        return OpenedModel(model=model, draft=None, traits=traits)
    weights_bytes = traits.footprint.weights_bytes
    left_bytes, free_bytes = (max(0, each - weights_bytes) for each in (limit_bytes, free_bytes))
    draft, own = _open(entry.draft, limit_bytes=left_bytes, dtype=dtype, free_bytes=free_bytes, param="draft")
    if untrimmed := next((it.id for it, known in ((entry, traits), (entry.draft, own)) if not known.plain), None):
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
    return OpenedModel(model=model, draft=(draft, own), traits=replace(traits, footprint=footprint))


def _open(
    entry: ModelEntry, *, limit_bytes: int, dtype: str, free_bytes: int, param: str = "model"
) -> tuple[Any, Traits]:
    try:
        model, _ = load_model(entry.path, lazy=True, get_model_classes=checked_classes)
        fit_weights(model, dtype, limit_bytes=limit_bytes, free_bytes=free_bytes)
        return model, describe(model)
    except Exception as exc:
        raise _load_error(entry, exc, limit_bytes, param=param) from exc


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
        room_now: Returns what is left of ``limit_bytes`` after the load, which limits the context; by default
            ``limit_bytes``.

    Raises:
        UnusableModelError: mlx-lm cannot load these files, or they are not a chat model.
        OutOfMemoryError: the model does not fit in memory.
    """
    opened = open_chat(entry, limit_bytes=limit_bytes, dtype=dtype)
    plan = _plan(entry, opened, limit_bytes, context_length)
    check_room(entry, plan, limit_bytes, context_length)
    try:
        traits, answers, own = _read(entry, opened, require_free)
    except BaseException as exc:
        if not isinstance(exc, Exception) and not is_panic(exc):
            raise
        raise _load_error(entry, exc, limit_bytes) from exc
    draft = None
    if opened.draft is not None and entry.draft is not None:
        draft_model, of_draft = opened.draft
        draft_id = entry.draft.id
        try:
            _read_weights(draft_model, of_draft, before_each=lambda left_bytes: require_free(left_bytes, draft_id))
        except Exception as exc:
            raise _load_error(entry.draft, exc, limit_bytes, param="draft") from exc
        draft = draft_model, min(traits.vocabulary_size, of_draft.vocabulary_size)
    try:
        encoder = build_encoder(own, entry.id)
        chat_format = detect_chat_format(SandboxedTokenizer.wrap(answers, encoder))
    except (TemplateLimitError, InvalidRequestError) as exc:
        reason = exc.message if isinstance(exc, InvalidRequestError) else f"its chat template {exc}"
        raise UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {reason}", param="model") from exc
    if room_now is not None:
        room_bytes = room_now()
        plan = _plan(entry, opened, room_bytes, context_length)
        check_room(entry, plan, room_bytes, context_length)
    tokenizer = MlxTokenizer(
        own,
        answers,
        entry,
        width=traits.vocabulary_size,
        context_length=context_length or plan.contexts[0].context_length,
        chat_format=chat_format,
        encoder=encoder,
    )
    weights = ChatWeights(
        entry=entry,
        model=opened.model,
        traits=traits,
        draft=draft,
        vocabulary=tokenizer.vocabulary,
        ends=tokenizer.ends,
    )
    return weights, tokenizer


def _read(
    entry: ModelEntry, opened: OpenedModel, require_free: Callable[[int, str], object]
) -> tuple[Traits, Any, Any]:
    """Read the weights of the model; return its traits, and its tokenizer twice: each copy is used by one thread.

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
        traits = _read_weights(opened.model, opened.traits, before_each=before_each)
    finally:
        wait([reading])
    return traits, *reading.result()


def _read_weights(model: Any, traits: Traits, *, before_each: Callable[[int], object]) -> Traits:
    """Read the weights of a model, and evaluate all its arrays, also those that no file has; return its traits."""
    read_weights(model, before_each=before_each)
    traits = try_batches(model, traits)
    mx.eval([value for _, module in model.named_modules() for value in module.values() if isinstance(value, mx.array)])
    return traits


def _load_error(entry: ModelEntry, exc: BaseException, limit_bytes: int, *, param: str = "model") -> LabError:
    """Return the error of a model whose files were not loaded because of this exception."""
    if isinstance(exc, OutOfMemoryError):
        return exc
    if memory.is_out_of_memory(exc):
        return OutOfMemoryError(f"{entry.id} does not fit in memory ({limit_bytes / 1e9:.1f} GB are allowed): {exc}")
    # Some messages of mlx-lm have several lines.
    reason = f"{type(exc).__name__}: {' '.join(str(exc).split())}".rstrip(".")
    return UnusableModelError(
        f"{entry.id} at {entry.path} cannot be loaded: {reason}; fetch it again, or use another model", param=param
    )


def plan_load(entry: ModelEntry, *, limit_bytes: int, dtype: str, context_length: int | None) -> LoadPlan:
    """Return what a load would use in memory, without reading the weights. Call it on a thread that ends afterwards.

    Args:
        limit_bytes, dtype, context_length: See ``load_chat``.

    Raises:
        UnusableModelError: the model cannot be loaded; see ``open_chat``.
    """
    try:
        if entry.kind == "chat":
            opened = open_chat(entry, limit_bytes=limit_bytes, dtype=dtype)
            return _plan(entry, opened, limit_bytes, context_length)
        weights_bytes = encoder_bytes(entry, limit_bytes=limit_bytes, dtype=dtype)
        return LoadPlan(
            model=entry.id,
            engine="mlx",
            kind=entry.kind,
            file_bytes=entry.load_bytes,
            weights_bytes=weights_bytes,
            needed_bytes=weights_bytes,
            context_length=entry.context_length,
        )
    finally:
        # Otherwise the process aborts at exit.
        mx.clear_streams()


def _plan(entry: ModelEntry, opened: OpenedModel, limit_bytes: int, requested: int | None) -> LoadPlan:
    footprint, chunk = opened.traits.footprint, memory.MAX_CHUNK_TOKENS
    layers = (*footprint.layers, *footprint.draft_layers)
    shortest = requested or min(MIN_CONTEXT_TOKENS, entry.context_length or MIN_CONTEXT_TOKENS)
    contexts = []
    for requests in CONCURRENCY:
        fitting = footprint.longest_request(limit_bytes, chunk=chunk, requests=requests)
        longest = min(fitting, entry.context_length or UNBOUNDED_TOKENS)
        contexts.append(
            LargestContext(requests=requests, context_length=longest if longest < UNBOUNDED_TOKENS else None)
        )
    return LoadPlan(
        model=entry.id,
        engine="mlx",
        kind=entry.kind,
        file_bytes=entry.load_bytes,
        weights_bytes=footprint.weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token(layers),
        kv_constant_bytes=kv_constant_bytes(layers),
        needed_bytes=footprint.running_bytes([shortest], chunk=min(chunk, shortest)),
        context_length=entry.context_length,
        contexts=tuple(contexts),
        read_bytes=read_bytes(opened.model),
    )


def check_room(entry: ModelEntry, plan: LoadPlan, limit_bytes: int, requested: int | None) -> None:
    """Check before a load that a model fits, because on Metal running out of memory usually ends the process.

    Args:
        limit_bytes: Memory that the model and its requests may use.
        requested: The requested context length.

    Raises:
        OutOfMemoryError: memory is not enough for the weights, or not for ``MIN_CONTEXT_TOKENS``, or not for the
            requested context.
    """
    if plan.needed_bytes <= limit_bytes:
        return
    weights, allowed = f"{plan.weights_bytes / 1e9:.2f} GB", f"{max(0, limit_bytes) / 1e9:.2f} GB"
    if plan.weights_bytes > limit_bytes or not plan.contexts:
        draft = f" and its draft model {entry.draft.id} need" if entry.draft is not None else " needs"
        raise OutOfMemoryError(
            f"{entry.id}{draft} {weights} for weights, and {allowed} are allowed; choose a smaller or more quantized "
            "model, or raise memory_limit_bytes"
        )
    raise OutOfMemoryError(
        f"{entry.id} uses {weights}, and {allowed} are allowed, which is enough for {plan.contexts[0].context_length} "
        f"tokens; choose a smaller {'context_length' if requested else 'or more quantized model'}, or raise "
        "memory_limit_bytes"
    )

"""Load embedders and rerankers from their files, on a thread of their own, and run them on the engine thread."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm import tokenizer_utils
from mlx_lm.utils import load_model

from lmx_lab.engine.encoders.bert import ROBERTAS, Bert
from lmx_lab.engine.encoders.decoder import Decoder, classifier_head, logit_head, open_decoder, read_decoder
from lmx_lab.engine.encoders.layers import (
    Encoder,
    Head,
    ModelConfig,
    Network,
    PaddedBatch,
    PooledHead,
    Pooling,
    PoolingMode,
    parameters,
    read_model,
    read_operation,
    require_memory,
)
from lmx_lab.engine.encoders.modernbert import ModernBert
from lmx_lab.engine.encoders.sentence_transformers import (
    ChatTemplateInput,
    SentenceTransformersConfig,
    read_sentence_transformers,
)
from lmx_lab.engine.encoders.tokenizer import (
    ChatPairFormat,
    PairFormat,
    TextRules,
    TextTokenizer,
    qwen_pairs,
)
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.weights import checked, fit_weights
from lmx_lab.engine.texts import TextTokens
from lmx_lab.engine.tokenizing.encoder import is_panic
from lmx_lab.engine.tokenizing.loading import without_word_cache
from lmx_lab.errors import EngineError, LabError, OutOfMemoryError, UnusableModelError
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.outputs import RerankMethod, Vectors
from lmx_lab.weights.facts import ENCODERS, read_card
from lmx_lab.weights.files import read_json

log = logging.getLogger(__name__)


ARCHITECTURES: Mapping[str, type[Encoder]] = {
    "bert": Bert,
    **dict.fromkeys(ROBERTAS, Bert),
    "modernbert": ModernBert,
}
"""The encoders that are implemented here, by ``model_type``. Other models are decoders of mlx-lm."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedEncoder:
    """An embedder or a reranker in memory.

    ``texts`` is used by the event loop, everything else by the engine thread.
    """

    entry: ModelEntry
    memory_bytes: int
    """Measured memory of the model."""
    context_length: int | None
    """Largest number of tokens of one text, including special ones."""
    dimensions: int | None
    """Size of a vector; None for rerankers."""
    method: RerankMethod
    texts: TextTokenizer
    network: Network
    head: Head
    sigmoid: bool
    """Whether scores are converted to the range 0 to 1, as the model's files require."""

    def forward(self, batch: Sequence[TextTokens]) -> Generator[mx.array, None, Vectors]:
        """Compute a batch layer by layer. Texts of similar length need the least padding.

        Yields the hidden state after each layer, and parts of it for long texts, usually not evaluated. The caller may
        evaluate it, do other work, or close the generator. Returns vectors (texts, dimensions) as the model's files
        define them or, for a reranker, scores (texts,) before the activation.

        Raises:
            EngineError: a result is not finite.
        """
        padded = PaddedBatch.from_texts(batch)
        hidden = yield from self.network.forward(padded)
        result: Vectors = np.array(self.head(hidden, padded).astype(mx.float32))
        if not np.isfinite(result).all():
            raise EngineError(
                f"{self.entry.id} computed numbers that are not finite; try a wider type, such as dtype float32"
            )
        return result

    def activate(self, raw: Vectors) -> Vectors:
        """Apply the activation of the model to scores, by default to the range 0 to 1. Vectors are unchanged."""
        if not self.sigmoid:
            return raw
        scores: Vectors = (0.5 + 0.5 * np.tanh(0.5 * raw)).astype(np.float32)
        return scores

    def batch_bytes(self, rows: int, length: int) -> int:
        """Estimate the memory of a batch of ``rows`` texts of ``length`` tokens, in addition to the weights."""
        return self.network.batch_bytes(rows, length)


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderFiles:
    """The contents of the small files of a model, which are read before the weights."""

    entry: ModelEntry
    config: ModelConfig
    modules_config: SentenceTransformersConfig
    tokenizer: Any
    limit_bytes: int
    dtype: str

    @property
    def architecture(self) -> type[Encoder] | None:
        """The architecture of an encoder; None for a decoder."""
        return ARCHITECTURES.get(self.entry.architecture)

    @property
    def is_reranker(self) -> bool:
        return self.entry.kind == "rerank"


def load_encoder(entry: ModelEntry, *, limit_bytes: int, dtype: str = "auto") -> LoadedEncoder:
    """Load an embedder or a reranker. Takes seconds.

    Args:
        dtype: As in ``Settings``.

    Raises:
        UnusableModelError: a file is damaged, or requires something that is not supported; the message names it.
        OutOfMemoryError: the model does not fit into the limit.
    """
    failure: LabError
    try:
        return _load(entry, limit_bytes=limit_bytes, dtype=dtype)
    except OutOfMemoryError as exc:
        failure = OutOfMemoryError(f"{entry.id} does not fit in memory: {exc.message}")
    except LabError as exc:
        failure = UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {exc.message}", param="model")
    except BaseException as exc:
        if not isinstance(exc, Exception) and not is_panic(exc):
            raise
        what = f"{type(exc).__name__}: {exc}"
        if memory.is_out_of_memory(exc):
            failure = OutOfMemoryError(f"{entry.id} does not fit in memory ({limit_bytes / 1e9:.1f} GB allowed): {exc}")
        else:
            failure = UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {what}", param="model")
    # Raised without the original exception as context: its frames hold weights.
    memory.release()
    raise failure


def _load(entry: ModelEntry, *, limit_bytes: int, dtype: str) -> LoadedEncoder:
    require_memory(entry.size_bytes, limit_bytes)
    # The tokenizer is loaded before the weights: it is small, and most errors occur there.
    files = EncoderFiles(
        entry=entry,
        config=ModelConfig(read_json(entry.path / "config.json")),
        modules_config=read_sentence_transformers(entry.path),
        tokenizer=without_word_cache(tokenizer_utils.load(entry.path)),
        limit_bytes=limit_bytes,
        dtype=dtype,
    )
    kind, architecture, settings = entry.architecture, files.architecture, files.modules_config
    if architecture is None and kind.replace("_", "-") in {name.replace("_", "-") for name in ENCODERS}:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise UnusableModelError(f"encoders of type {kind} are not supported; supported are {supported}")
    if settings.chat is not None and not files.is_reranker:
        raise UnusableModelError("its texts require a chat template, which is supported for rerankers only")
    pairs = _pair_format(files) if files.is_reranker else None
    network: Network
    head: Head | None = None
    if architecture is None:
        network, head = _read_decoder(files)
    else:
        has_head = files.is_reranker and settings.pooling is None
        network = encoder = _open_encoder(entry, architecture, has_head=has_head)
        read_model(network, limit_bytes=limit_bytes, dtype=dtype)
        if has_head:
            head = encoder.classify
    dimensions: int | None = None
    if head is None:
        head, dimensions = _pooled_head(files, network)
    # The smallest limit of the model and its files. sentence-transformers overrides the tokenizer.
    own = settings.max_tokens
    if own is None:
        own = getattr(files.tokenizer, "model_max_length", None)
    limits = [limit for limit in (own, entry.context_length, network.positions) if limit is not None]
    # Tokenizers without a limit have a larger ``model_max_length``.
    context = min((int(limit) for limit in limits if limit < 10**9), default=None)
    # Whether pairs have two segments if the tokenizer's files do not specify it.
    usual_inputs = ["token_type_ids"] if kind == "bert" else []
    inputs = files.tokenizer.init_kwargs.get("model_input_names") or usual_inputs
    rules = TextRules(
        context_length=context,
        vocabulary_size=network.vocabulary_size,
        segments=network.segments > 1 and "token_type_ids" in inputs,
        include_prompt=settings.pooling is None or settings.pooling.include_prompt,
        prompts=settings.prompts,
        lower_case=settings.lower_case,
        pairs=pairs,
    )
    rerank_method: RerankMethod = "decoder" if architecture is None else "cross-encoder"
    parts = [part for part in (network, head) if isinstance(part, Module)]
    loaded = LoadedEncoder(
        entry=entry,
        memory_bytes=sum(array.nbytes for part in parts for array in parameters(part).values()),
        context_length=context,
        dimensions=None if files.is_reranker else dimensions,
        method=rerank_method if files.is_reranker else "cosine",
        texts=TextTokenizer(files.tokenizer, entry, rules),
        network=network,
        head=head,
        sigmoid=files.is_reranker and settings.activation == "sigmoid",
    )
    # Computes one text, which evaluates all arrays: the engine thread cannot evaluate what another thread described.
    with contextlib.suppress(EngineError):
        for _ in loaded.forward([TextTokens((0,))]):
            pass
    return loaded


def encoder_bytes(entry: ModelEntry, *, limit_bytes: int, dtype: str) -> int:
    """Return the size of the weights of an embedder or a reranker in memory, without reading them.

    Raises:
        UnusableModelError: as ``load_encoder``, as far as the headers show.
    """
    try:
        config = ModelConfig(read_json(entry.path / "config.json"))
        has_pooling = read_sentence_transformers(entry.path).pooling is not None
        has_head = entry.kind == "rerank" and not has_pooling
        if (architecture := ARCHITECTURES.get(entry.architecture)) is not None:
            model: Any = _open_encoder(entry, architecture, has_head=has_head)
        else:
            model, _ = open_decoder(entry.path, config, head=has_head and not _is_classifier(config))
        fit_weights(model, dtype, limit_bytes=limit_bytes)
        return sum(value.nbytes for value in parameters(model).values())
    except Exception as exc:
        what = exc.message if isinstance(exc, LabError) else f"{type(exc).__name__}: {exc}"
        raise UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {what}", param="model") from exc


def _open_encoder(entry: ModelEntry, architecture: type[Encoder], *, has_head: bool) -> Encoder:
    """Return an encoder, with the head of a classifier if it is needed. Its weights have not been read yet."""

    # Called by mlx-lm with a keyword argument of this name.
    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        return checked(architecture), ModelConfig

    options = {"has_head": has_head}
    model, _ = load_model(entry.path, lazy=True, model_config=options, get_model_classes=classes)
    return model  # type: ignore[no-any-return]


def _read_decoder(files: EncoderFiles) -> tuple[Network, Head | None]:
    """Read the network of a decoder, and its head; None if the head consists of pooling and modules."""
    is_pooled = not files.is_reranker or files.modules_config.pooling is not None
    is_classifier, tokens = _is_classifier(files.config), files.modules_config.logit_tokens
    predicts = not (is_pooled or is_classifier)
    if predicts and tokens is None:
        # Qwen3-Reranker was published without sentence-transformers files.
        if files.entry.architecture != "qwen3":
            raise UnusableModelError(
                "its files do not define how it ranks: there is no LogitScore module and no classifier head"
            )
        true, false = (files.tokenizer.convert_tokens_to_ids(token) for token in ("yes", "no"))
        unknown = getattr(files.tokenizer, "unk_token_id", None)
        if not isinstance(true, int) or not isinstance(false, int) or unknown in {true, false}:
            raise UnusableModelError("its tokenizer has no single tokens for yes and no")
        tokens = true, false
    limit, dtype = files.limit_bytes, files.dtype
    model, score = read_decoder(files.entry.path, files.config, limit_bytes=limit, dtype=dtype, head=predicts)
    head: Head | None = None
    if not is_pooled:
        head = classifier_head(score) if is_classifier or tokens is None else logit_head(model, *tokens)
    return Decoder(model), head


def _is_classifier(config: ModelConfig) -> bool:
    names = config.values.get("architectures") or []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def _pair_format(files: EncoderFiles) -> PairFormat | None:
    """Return how pairs become text. Without a definition in the files, the chat template is used if it supports it."""
    modules_config = files.modules_config
    if modules_config.chat is not None:
        return ChatPairFormat(files.tokenizer, modules_config.chat, files.entry.id).template
    if files.architecture is not None or modules_config.plain:
        return None
    with contextlib.suppress(UnusableModelError):
        input_ = ChatTemplateInput(system=modules_config.prompts.prompt_for(None))
        return ChatPairFormat(files.tokenizer, input_, files.entry.id).template
    architectures = files.config.values.get("architectures") or []
    as_published = not modules_config.has_modules and "Qwen3ForCausalLM" in architectures
    return qwen_pairs if as_published or "Qwen3-Reranker" in read_card(files.entry.path) else None


def _pooled_head(files: EncoderFiles, network: Network) -> tuple[Head, int]:
    """Build the head from pooling and modules; return it and the width of its result."""
    pooling, modules = files.modules_config.pooling, files.modules_config.modules
    if pooling is None:
        mode: PoolingMode = "lasttoken" if files.architecture is None else "mean"
        log.warning("%s has no pooling files; using %s pooling and vectors of length 1", files.entry.id, mode)
        others = (module for module in modules if module[0] != "Normalize")
        pooling, modules = Pooling(modes=(mode,)), (*others, ("Normalize", files.entry.path))
    width = len(pooling.modes) * network.hidden_size
    operations: list[Module] = []
    for name, folder in modules:
        operation, width = read_operation(name, folder, width)
        operations.append(operation)
    if files.is_reranker and width != 1:
        raise UnusableModelError(f"its modules return {width} numbers; a reranker returns one")
    return PooledHead(pooling, operations, score=files.is_reranker), width

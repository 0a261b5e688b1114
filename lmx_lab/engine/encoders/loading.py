"""An embedder or reranker in memory: reading its files on the engine thread, and running it there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import tokenizer_utils

from lmx_lab.engine.encoders import bert, modernbert
from lmx_lab.engine.encoders.bert import Bert, FirstTokenHead
from lmx_lab.engine.encoders.decoder import read_classifier, read_decoder, read_logit_reranker
from lmx_lab.engine.encoders.layers import on_cpu
from lmx_lab.engine.encoders.modernbert import ModernBert, ModernBertHead
from lmx_lab.engine.encoders.network import Head, ModelConfig, Network, PaddedBatch
from lmx_lab.engine.encoders.pooling import Operation, PooledHead, operation
from lmx_lab.engine.encoders.sentence_transformers import (
    ChatTemplateInput,
    LogitTokens,
    Normalize,
    Pooling,
    PoolingMode,
    SentenceTransformersConfig,
    read_sentence_transformers,
)
from lmx_lab.engine.encoders.tensors import Tensors
from lmx_lab.engine.encoders.tokenizer import (
    ChatPairFormat,
    PairFormat,
    QwenPairFormat,
    TextRules,
    TextTokenizer,
    TextTokens,
)
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.mlx.weights_dtype import DTYPES
from lmx_lab.engine.word_cache import without_word_cache
from lmx_lab.errors import EngineError, LabError, OutOfMemoryError, UnusableModelError
from lmx_lab.values.encoding import RerankMethod, Vectors
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights.folder import ENCODERS, read_card, read_json

log = logging.getLogger(__name__)
HERE = frozenset({"bert", "modernbert"}) | bert.ROBERTAS
"""Encoders whose layers are known here, by ``model_type``."""
NO_LIMIT_TOKENS = 10**9
"""Tokenizers without a limit give one beyond this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedEncoder:
    """An embedder or a reranker in memory. ``texts`` belongs to the texts' thread, the rest to the engine's."""

    entry: ModelEntry
    memory_bytes: int
    """What the model takes, measured."""
    context_length: int | None
    """Tokens of one text at most, special ones included."""
    dimensions: int | None
    """Of a vector; None for rerankers."""
    method: RerankMethod
    texts: TextTokenizer
    network: Network
    head: Head
    sigmoid: bool
    """Whether the model's files want a score to be one between 0 and 1."""

    def forward(self, batch: Sequence[TextTokens]) -> Generator[mx.array, None, Vectors]:
        """Compute a batch layer by layer; texts of about the same length waste least.

        Yields the hidden state after each layer, in general not yet computed (of long texts partly): a caller may
        compute it, do something else, or close the generator. Returns (texts, dimensions) vectors as the model's files
        want them or, of a reranker, (texts,) scores before the activation.

        Raises:
            EngineError: a result is not finite.
        """
        padded = PaddedBatch.of(batch)
        hidden = yield from self.network.forward(padded)
        result: Vectors = np.array(self.head(hidden, padded).astype(mx.float32))
        if not np.isfinite(result).all():
            raise EngineError(
                f"{self.entry.id} computed numbers that are not finite; a wider type may help: dtype float32"
            )
        return result

    def activate(self, raw: Vectors) -> Vectors:
        """Scores as the model's files want them, by default between 0 and 1; vectors stay as they are."""
        if not self.sigmoid:
            return raw
        scores: Vectors = (0.5 + 0.5 * np.tanh(0.5 * raw)).astype(np.float32)
        return scores

    def batch_bytes(self, rows: int, length: int) -> int:
        """What computing a batch of so many texts of so many tokens takes beside the weights, about."""
        return self.network.batch_bytes(rows, length)


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderFiles:
    """What the small files say, before any weight is read."""

    entry: ModelEntry
    config: ModelConfig
    modules_config: SentenceTransformersConfig
    tokenizer: Any
    limit_bytes: int
    dtype: str

    @property
    def is_encoder(self) -> bool:
        return self.entry.architecture in HERE

    @property
    def is_reranker(self) -> bool:
        return self.entry.kind == "rerank"


def load_encoder(entry: ModelEntry, *, limit_bytes: int, dtype: str = "auto") -> LoadedEncoder:
    """Read an embedding model's or a reranker's files into memory. Engine thread only; takes seconds.

    Args:
        dtype: As in ``Settings``.

    Raises:
        UnusableModelError: the files are damaged, or ask for something that is not known here; both by name.
        OutOfMemoryError: it does not fit.
    """
    failure: LabError
    try:
        return _load(entry, limit_bytes=limit_bytes, dtype=dtype)
    except OutOfMemoryError as exc:
        failure = OutOfMemoryError(f"{entry.id} does not fit in memory: {exc.message}")
    except LabError as exc:
        failure = UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {exc.message}", param="model")
    except Exception as exc:
        what = f"{type(exc).__name__}: {exc}"
        if memory.is_out_of_memory(exc):
            failure = OutOfMemoryError(f"{entry.id} does not fit in memory ({limit_bytes / 1e9:.1f} GB allowed): {exc}")
        else:
            failure = UnusableModelError(f"{entry.id} at {entry.path} cannot be loaded: {what}", param="model")
    # Not from the exception: its frames hold weights.
    memory.release()
    raise failure


def _load(entry: ModelEntry, *, limit_bytes: int, dtype: str) -> LoadedEncoder:
    before = memory.used_bytes()
    _require(entry.size_bytes, limit_bytes)
    # The tokenizer before the weights: most that goes wrong goes wrong there, and it is small.
    files = EncoderFiles(
        entry=entry,
        config=ModelConfig(read_json(entry.path / "config.json")),
        modules_config=read_sentence_transformers(entry.path),
        tokenizer=without_word_cache(tokenizer_utils.load(entry.path)),
        limit_bytes=limit_bytes,
        dtype=dtype,
    )
    _check_known(files)
    pairs = _pair_form(files) if files.is_reranker else None
    network, head = _encoder(files) if files.is_encoder else _decoder(files)
    dimensions: int | None = None
    if head is None:
        head, dimensions = _pooled(files, network)
    context = _context_length(files, network)
    pooling = files.modules_config.pooling
    rules = TextRules(
        context_length=context,
        vocabulary_size=network.vocabulary_size,
        segments=_has_segments(files, network),
        include_prompt=pooling is None or pooling.include_prompt,
        prompts=files.modules_config.prompts,
        lower_case=files.modules_config.lower_case,
        pairs=pairs,
    )
    decoder_method: RerankMethod = "cross-encoder" if files.is_encoder else "decoder"
    return LoadedEncoder(
        entry=entry,
        memory_bytes=max(0, memory.used_bytes() - before),
        context_length=context,
        dimensions=None if files.is_reranker else dimensions,
        method=decoder_method if files.is_reranker else "cosine",
        texts=TextTokenizer(files.tokenizer, entry.id, rules),
        network=network,
        head=head,
        sigmoid=files.is_reranker and files.modules_config.activation == "sigmoid",
    )


def _require(needed_bytes: int, limit_bytes: int) -> None:
    if needed_bytes > limit_bytes:
        raise OutOfMemoryError(
            f"its weights take {needed_bytes / 1e9:.2f} GB, {limit_bytes / 1e9:.2f} GB are allowed; choose a smaller "
            "model, or raise memory_limit_bytes"
        )


def _check_known(files: EncoderFiles) -> None:
    kind = files.entry.architecture
    if not files.is_encoder and kind.replace("_", "-") in {name.replace("_", "-") for name in ENCODERS}:
        raise UnusableModelError(f"encoders of type {kind} are not known here; known are {', '.join(sorted(HERE))}")
    if files.modules_config.chat is not None and not files.is_reranker:
        raise UnusableModelError("its texts go through a chat template; that is known here for rerankers only")


def _encoder(files: EncoderFiles) -> tuple[Network, Head | None]:
    """The network, and the head of a classifier; None where pooling and modules do its work."""
    part = modernbert if files.entry.architecture == "modernbert" else bert
    wanted = DTYPES.get(files.dtype, mx.float32 if on_cpu() else None)
    tensors = Tensors.read(files.entry.path, wanted, part.rename, part.IGNORED)
    quantization = files.config.values.get("quantization")
    if isinstance(quantization, dict):
        tensors.expand(ModelConfig(quantization).size("bits"), ModelConfig(quantization).size("group_size"))
    _require(tensors.nbytes, files.limit_bytes)
    classifies = files.is_reranker and files.modules_config.pooling is None
    network: Network
    head: Head | None = None
    if files.entry.architecture == "modernbert":
        network = ModernBert.take(tensors, files.config)
        head = ModernBertHead.take(tensors, files.config) if classifies else None
    else:
        network = Bert.take(tensors, files.config)
        roberta = files.entry.architecture in bert.ROBERTAS
        head = FirstTokenHead.take(tensors, network.hidden_size, roberta=roberta) if classifies else None
    tensors.finish()
    return network, head


def _decoder(files: EncoderFiles) -> tuple[Network, Head | None]:
    """As ``_encoder``, from mlx-lm's architectures."""
    path, config, limit, dtype = files.entry.path, files.config, files.limit_bytes, files.dtype
    if not files.is_reranker or files.modules_config.pooling is not None:
        return read_decoder(path, config, limit_bytes=limit, dtype=dtype), None
    heads = config.values.get("architectures") or []
    if any(str(name).endswith("ForSequenceClassification") for name in heads):
        return read_classifier(path, config, limit_bytes=limit, dtype=dtype)
    tokens = files.modules_config.logit_tokens or _yes_and_no(files)
    return read_logit_reranker(path, config, tokens, limit_bytes=limit, dtype=dtype)


def _yes_and_no(files: EncoderFiles) -> LogitTokens:
    """The answers of Qwen3-Reranker as it was published, without files of sentence-transformers'."""
    if files.entry.architecture != "qwen3":
        raise UnusableModelError(
            "its files do not say how it ranks: there is neither a LogitScore module nor a classifier's head"
        )
    true, false = (files.tokenizer.convert_tokens_to_ids(token) for token in ("yes", "no"))
    unknown = getattr(files.tokenizer, "unk_token_id", None)
    if not isinstance(true, int) or not isinstance(false, int) or unknown in {true, false}:
        raise UnusableModelError("its tokenizer has no single tokens for yes and no")
    return LogitTokens(true=true, false=false)


def _pair_form(files: EncoderFiles) -> PairFormat | None:
    """How a pair becomes text. Files that do not say leave it to the chat template, if that knows the two roles."""
    if files.modules_config.chat is not None:
        return ChatPairFormat(files.tokenizer, files.modules_config.chat, files.entry.id)
    if files.is_encoder or files.modules_config.plain:
        return None
    with contextlib.suppress(UnusableModelError):
        return ChatPairFormat(
            files.tokenizer, ChatTemplateInput(system=files.modules_config.prompts.of(None)), files.entry.id
        )
    as_published = not files.modules_config.listed and "Qwen3ForCausalLM" in (
        files.config.values.get("architectures") or []
    )
    return QwenPairFormat() if as_published or "Qwen3-Reranker" in read_card(files.entry.path) else None


def _pooled(files: EncoderFiles, network: Network) -> tuple[Head, int]:
    """The head of pooling and modules, and how many numbers it leaves."""
    modules_config = files.modules_config
    pooling, steps = modules_config.pooling, modules_config.steps
    if pooling is None:
        mode: PoolingMode = "mean" if files.is_encoder else "lasttoken"
        log.warning("%s has no files about pooling: %s pooling, vectors of length 1", files.entry.id, mode)
        pooling, steps = Pooling(modes=(mode,)), (*(step for step in steps if step != Normalize()), Normalize())
    width = len(pooling.modes) * network.hidden_size
    operations: list[Operation] = []
    for step in steps:
        act, width = operation(step, width)
        operations.append(act)
    if files.is_reranker and width != 1:
        raise UnusableModelError(f"its modules leave {width} numbers; a reranker has one")
    return PooledHead(pooling, tuple(operations), score=files.is_reranker), width


def _context_length(files: EncoderFiles, network: Network) -> int | None:
    """The smallest limit of the model and its files; those of sentence-transformers go before the tokenizer's."""
    own = (
        getattr(files.tokenizer, "model_max_length", None)
        if files.modules_config.max_tokens is None
        else files.modules_config.max_tokens
    )
    limits = [own, files.entry.context_length, network.positions]
    return min((int(limit) for limit in limits if limit is not None and limit < NO_LIMIT_TOKENS), default=None)


def _has_segments(files: EncoderFiles, network: Network) -> bool:
    """BERT's tokenizer tells segments apart, RoBERTa's does not, unless its files say so."""
    usual = ["token_type_ids"] if files.entry.architecture == "bert" else []
    names = files.tokenizer.init_kwargs.get("model_input_names") or usual
    return isinstance(network, Bert) and network.segments > 1 and "token_type_ids" in names
